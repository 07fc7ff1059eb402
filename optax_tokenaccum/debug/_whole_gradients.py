"""Tells which gradients exist as a whole next to their sums."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from optax_tokenaccum._core.backward import collected_reports

_numbers = itertools.count()


def whole_gradients(f: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str]:
    """The parameters whose gradients need memory next to their sums, and why.

    A backward pass of this library adds the gradients of layers that are stacked for a
    scan layer by layer, and that of a parameter of at least 2**20 elements which a scan
    is given whole in every iteration. Every other gradient of a micro-batch exists as a
    whole next to its sum, which costs memory of its size. This names those that are at
    least 1 % of the parameters. Nothing is compiled or run: this traces `f`.

    Args:
      f: a step; one of its halves, `step.accumulate`; or any function that calls this
        library, such as a jitted step around `window_value_and_grad`.
      *args: as for a call. Arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: as for a call.

    Returns:
      The reason by the path of each such parameter. In a `jit` of your own, types do
      not tell whether the stacked axis of a parameter is spread over devices; a step
      knows.

    Raises:
      ValueError: nothing in `f` gives this library a loss, as in a loop by hand or with
        `token_accumulation`, which receive whole gradients.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> from optax_tokenaccum.debug import whole_gradients
      >>> def loss_fn(params, x):
      ...     layers = jnp.clip(params["layers"], -1, 1)  # of all layers at once
      ...     y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
      ...     return jnp.sum(y), len(x)
      >>> step = make_train_step(loss_fn, optax.sgd(0.1), 8)
      >>> state = step.init({"layers": jnp.ones((4, 16, 16))})
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> reasons = whole_gradients(step, state, x)
      >>> print(*reasons)  # reasons["['layers']"] tells of jnp.clip
      ['layers']
    """
    step = getattr(f, "accumulate", f)  # a train step, whose halves are programs
    lower = getattr(step, "lower", None) or jax.jit(f).lower
    # In a new context, JAX traces again what it has traced before.
    context = set_xla_metadata(whole_gradients=str(next(_numbers)))
    with context, collected_reports() as found:
        lower(*args, **kwargs)
    if not found:
        raise ValueError("f must give this library a loss: got none, or gradients.")
    least = sum(math.prod(shape) for shape, _ in found.values()) / 100
    return {
        path: reason
        for path, (shape, reason) in found.items()
        if reason and math.prod(shape) >= least
    }
