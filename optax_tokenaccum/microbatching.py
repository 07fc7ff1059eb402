"""`optax.microbatching`: an accumulator for means over the tokens of a window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax.microbatching import Accumulator

from optax_tokenaccum._core.contribution import usable_tokens
from optax_tokenaccum._core.sums import (
    add_if,
    at_least_float32,
    divide,
    is_float0,
    zeros_of,
)


def token_mean() -> Accumulator:
    r"""An accumulator that divides sums by the number of tokens, once.

    `AccumulationType.MEAN` averages the means of micro-batches, which is another
    gradient if these have different numbers of tokens. This accumulator adds up losses,
    counts and gradients, and returns :math:`\sum_i x_i / \sum_i n_i`. Sums are float32,
    or wider if the values are. A micro-batch without tokens adds nothing, even if its
    gradient is NaN.

    Use it if all micro-batches have one shape and one denominator, and all rows are on
    one device or spread by `jit`. `make_window_step` has more: planned windows, several
    denominators, one reduction over devices, keys, metrics.

    Returns:
      An `optax.microbatching.Accumulator` for a function that returns `((loss_sum,
      num_tokens), grads)`, such as `jax.value_and_grad(loss_fn, has_aux=True)`. The
      microbatched function returns `((loss, num_tokens), grads)`: the means over all
      tokens, and their number. Gradients have the dtype of their sums.

    Raises:
      TypeError: when the function is traced, if it returns something else.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum.microbatching import token_mean
      >>> def loss_fn(w, batch):
      ...     return jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"])
      >>> f = optax.microbatching.microbatch(
      ...     jax.value_and_grad(loss_fn, has_aux=True), argnums=1, microbatch_size=2,
      ...     accumulator=token_mean())
      >>> batch = {"x": jnp.array([2.0, 30.0, 30.0, 30.0]),
      ...          "mask": jnp.array([1.0, 1.0, 0.0, 1.0])}
      >>> (loss, num_tokens), grad = f(jnp.array(1.0), batch)
      >>> print(num_tokens, round(float(grad), 3))  # 62 / 3
      3.0 20.667
    """
    return Accumulator(_init, _update, _finalize, _aggregate)


def _init(value: Any) -> Any:
    value = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), value)
    _check(value)

    def nothing(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
        dtype = x.dtype if is_float0(x) else at_least_float32(x.dtype)
        return zeros_of(jax.ShapeDtypeStruct(x.shape, dtype))

    sums = jax.tree.map(nothing, value)
    # optax 0.2.7 gives `init` the first value, later versions its shape.
    is_shape = isinstance(value[0][0], jax.ShapeDtypeStruct)
    return sums if is_shape else _update(sums, value, 0)


def _update(sums: Any, value: Any, _: int | jax.Array) -> Any:
    (_, num_tokens), _ = value
    counts = usable_tokens(num_tokens, jnp.float32) > 0

    def add(total: jax.Array, x: Any) -> jax.Array:
        return add_if(counts, total, x if is_float0(x) else jnp.asarray(x))

    return jax.tree.map(add, sums, value)


def _finalize(sums: Any) -> Any:
    (loss, num_tokens), grads = sums
    divisor = jnp.where(num_tokens > 0, num_tokens, 1)
    loss, grads = jax.tree.map(
        lambda x: x if is_float0(x) else divide(x, divisor), (loss, grads)
    )
    return (loss, num_tokens), grads


def _aggregate(values: Any) -> Any:
    """The sum over the leading axis, on which `micro_vmap` has a value for each row."""
    _check(jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), values))
    (_, num_tokens), _ = values
    counts = num_tokens > 0

    def add_up(x: jax.Array) -> jax.Array:
        x = jnp.where(jnp.expand_dims(counts, range(1, x.ndim)), x, 0)
        return jnp.sum(x, 0, dtype=at_least_float32(x.dtype))

    return jax.tree.map(add_up, values)


def _check(value: Any) -> None:
    try:
        (loss_sum, num_tokens), _ = value
        scalars = loss_sum, num_tokens
        is_right = all(getattr(x, "shape", None) == () for x in scalars)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise TypeError(
            "token_mean needs a function that returns ((loss_sum, num_tokens), grads), "
            f"with scalars: got {value}. Write "
            "jax.value_and_grad(loss_fn, has_aux=True), and leave other auxiliary "
            "values out."
        )
