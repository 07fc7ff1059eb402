"""The mean loss and gradient of a window, from a function that computes gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import optax

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.accumulation import make_accumulation
from optax_tokenaccum._core.loss import MicroBatch, unpack
from optax_tokenaccum._core.schedule import make_schedule
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.sums import is_float0, zeros_of
from optax_tokenaccum._core.trees import Batch, DType, Gradients, P
from optax_tokenaccum._devices.own_map import SumsInMap, peers_in_map
from optax_tokenaccum._steps.micro_batches import (
    Bound,
    Index,
    explained,
    for_each,
    stack_of,
)
from optax_tokenaccum._steps.window import WindowValues

# value_and_grad_fn(params, batch, **kwargs) -> ((value, num_tokens), grads). With
# has_aux it returns ((value, (num_tokens, aux)), grads).
ValueAndGradFn = Callable[..., tuple[tuple[Any, Any], Gradients]]


def accumulate_over_window(
    value_and_grad_fn: ValueAndGradFn,
    *,
    gradients: Literal["sum", "mean"] = "sum",
    has_aux: bool = False,
    accumulator_dtype: DType | None = None,
) -> Callable[..., tuple[WindowValues, Gradients]]:
    r"""The exact mean loss and gradient of a window, from gradients of micro-batches.

    The returned function computes
    :math:`\left(\sum_i \ell_i / \sum_i n_i,\; \sum_i g_i / \sum_i n_i\right)` over
    micro-batches with summed losses :math:`\ell_i`, their gradients :math:`g_i` and
    token counts :math:`n_i`, in one loop, inside any `jit`.

    Use it if you are handed a function that computes gradients: by a trainer, or
    because you clip or change the gradient of each micro-batch. If you have the loss,
    prefer `window_value_and_grad`: its backward pass adds to the sums, while a gradient
    that is handed over exists as a whole next to them.

    In a `shard_map`, a gradient whose type does not vary along an axis is a sum over
    the devices of that axis, such as that of `jax.grad` with respect to parameters that
    all devices share. As soon as one gradient is, `loss`, `num_tokens` and `grads` are
    over the rows of all these devices. Otherwise, and with `check_vma=False`, they are
    those of this device.

    Args:
      value_and_grad_fn: `value_and_grad_fn(params, batch, **kwargs) -> ((value,
        num_tokens), grads)`, as `jax.value_and_grad(loss_fn, has_aux=True)` returns.
        `grads` may be any tree of arrays.
      gradients: `"sum"` if `value` and `grads` are of the loss summed over the
        micro-batch's tokens; `"mean"` if they are of its mean over these tokens.
      has_aux: the function returns `((value, (num_tokens, aux)), grads)`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **kwargs) ->
      ((loss, (num_tokens, aux)), grads)`, with the arguments and results of the
      function that `window_value_and_grad` returns. `grads` has the tree, shapes and
      dtypes of the gradients that `value_and_grad_fn` returns.

    Raises:
      ValueError: as for `window_value_and_grad`; `gradients` is another word; or, in a
        `shard_map`, gradients of means are reduced over devices.
      TypeError: `value_and_grad_fn` returned anything other than described above.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum import accumulate_over_window
      >>> def mean_loss_fn(w, batch):
      ...     n = jnp.sum(batch["mask"])
      ...     return jnp.sum(w * batch["x"] * batch["mask"]) / n, n
      >>> grad_fn = jax.value_and_grad(mean_loss_fn, has_aux=True)  # of a trainer
      >>> micro_batches = {"x": jnp.asarray([[2.0, 0.0, 0.0], [30.0, 30.0, 30.0]]),
      ...                  "mask": jnp.asarray([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
      >>> f = jax.jit(accumulate_over_window(grad_fn, gradients="mean"))
      >>> (loss, (num_tokens, _)), grad = f(jnp.asarray(1.0), micro_batches)
      >>> print(loss, num_tokens, grad)  # not 16, the mean of the means
      23.0 4.0 23.0
    """
    checks.check_function(value_and_grad_fn, "value_and_grad_fn")
    accumulation = make_accumulation(
        optax.identity(), make_schedule(), gradients, None, accumulator_dtype
    )

    def accumulate(
        params: P,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: Bound = None,
        **kwargs: Any,
    ) -> tuple[WindowValues, Gradients]:
        stack = stack_of(micro_batches, num_micro_batches)

        def call(batch: Batch, i: Index) -> Any:
            with explained(micro_batches, batch):
                key = MicroBatch(batch, rng, kwargs).at(i).rng
                own = {} if rng is None else {"rng": key}
                returned = value_and_grad_fn(params, batch, **kwargs, **own)
            return _unpack(returned, has_aux)

        def of_first() -> Any:
            (value, (num_tokens, _)), grads = call(stack.pick(0), 0)
            return value, num_tokens, _without_float0(grads), {}

        own = accumulation.on(SumsInMap(), peers_in_map(of_first))
        own = replace(own, begins_empty=True)

        def add(
            batch: Batch, state: TokenAccumulationState
        ) -> tuple[TokenAccumulationState, Any]:
            (value, (num_tokens, aux)), grads = call(batch, state.mini_step)
            grads = _without_float0(grads)
            return own.add(grads, state, None, num_tokens, value).state, aux

        _, like = jax.eval_shape(lambda: call(stack.pick(0), 0))
        summed = _without_float0(like)
        aux_of = (lambda batch: call(batch, 0)[0][1][1]) if has_aux else None
        state, aux = for_each(stack, add, own.empty_window(summed), aux_of)
        loss, num_tokens = accumulation.window_so_far(state)
        grads = accumulation.window_gradient_in_place(state, summed, may_loop=False)
        grads = jax.tree.map(
            lambda x, g: zeros_of(x) if is_float0(x) else g, like, grads
        )
        return (loss, (num_tokens, aux)), grads

    return accumulate


def _unpack(returned: Any, has_aux: bool) -> Any:
    form = "(value, (num_tokens, aux))" if has_aux else "(value, num_tokens)"
    rule = (
        f"value_and_grad_fn must return ({form}, grads), as "
        "jax.value_and_grad(loss_fn, has_aux=True) does"
    )
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"{rule}: got {returned}.")
    value, grads = returned
    return unpack(value, has_aux, rule), grads


def _without_float0(grads: Gradients) -> Gradients:
    """`grads` without those of integers, which nothing can be added to."""
    return jax.tree.map(lambda g: None if is_float0(g) else g, grads)
