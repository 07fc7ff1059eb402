"""The exact mean loss and gradient of a whole window, in one program."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.accumulation import Accumulation, make_accumulation
from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum._core.body import add_micro_batch, call
from optax_tokenaccum._core.loss import (
    Loss,
    LossFn,
    MicroBatch,
    Output,
    make_loss,
    unpack,
)
from optax_tokenaccum._core.model_state import changes, integers_of
from optax_tokenaccum._core.schedule import make_schedule
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Batch, DType, Gradients, M
from optax_tokenaccum._core.turned import turned_for
from optax_tokenaccum._devices.own_map import PeersInMap, SumsInMap, peers_in_map
from optax_tokenaccum._steps.micro_batches import Bound, explained, for_each, stack_of

# The open window, the model state, and whether a micro-batch was rejected.
Carry = tuple[TokenAccumulationState, M, jax.Array]


# (loss, (num_tokens, aux))
WindowValues = tuple[jax.Array, tuple[jax.Array, Any]]


def window_value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    has_model_state: bool = False,
    accumulator_dtype: DType | None = None,
) -> Callable[..., Any]:
    r"""Like `jax.value_and_grad`, for the exact mean loss of a window.

    The returned function computes
    :math:`\left(\sum_i \ell_i / \sum_i n_i,\; \sum_i \nabla \ell_i / \sum_i n_i\right)`
    over micro-batches with summed losses :math:`\ell_i` and token counts :math:`n_i`.
    Use it if you write your own train step. It runs one loop over the micro-batches,
    and works inside any `jit`. The gradient of an integer parameter is zeros of its
    dtype, which every optimizer accepts.

    The backward pass adds to one buffer of the gradient's size, on jax 0.11 and newer;
    there `vmap` and `jvp` of the returned function work, but reverse-mode derivatives
    ("Linearization failed") and `vmap` of a `jvp` raise an error. For these, add up
    `jax.value_and_grad` of each micro-batch by hand, or use `token_accumulation`.

    In a `shard_map`, `jax.grad` adds the gradients of all devices with respect to
    parameters that all devices share. In the same way, `loss`, `num_tokens` and `grads`
    are then over the rows of all devices, as soon as one parameter is shared; `loss_fn`
    still returns the loss and the count of this device. They are reduced once, after
    the last micro-batch; `aux` and `rng` are this device's. If every parameter differs,
    `jax.lax.pcast(params, axis_name, to="varying")`, or with `check_vma=False`, the
    results are those of this device. A loss that also reads from other devices, such as
    parts of parameters, must return both numbers reduced with `jax.lax.psum`.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      has_aux: as for `make_train_step`.
      has_model_state: as for `make_train_step`. In a `shard_map`, the model state is
        each device's own during the window, and its keys are not folded; then floating
        values are averaged over the devices that share parameters.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.

    Returns:
      `f(params, micro_batches, *, rng=None, num_micro_batches=None, **loss_kwargs) ->
      ((loss, (num_tokens, aux)), grads)`; with `has_model_state`, `f(params,
      model_state, micro_batches, ...) -> (((loss, (num_tokens, aux)), model_state),
      grads)`.

      * `micro_batches`: leaves `[k, micro, ...]`, see `split_batch`.
      * `rng`: one key for this window. `loss_fn` receives it as `rng`, folded with the
        index of the micro-batch. Fold in the number of the update yourself.
      * `num_micro_batches`: runs only the first `num_micro_batches`. The number is
        traced: another number does not compile again. An array is clipped to the range
        0 to `k`.
      * `loss_kwargs`: passed to `loss_fn` unchanged, not differentiated.
      * `loss`: float32, or wider if a parameter is wider.
      * `num_tokens`: tokens in the window.
      * `aux`: stacked `[k, ...]`, zeros for micro-batches that did not run; or `None`.
      * `grads`: in the parameters' dtypes.

      A window without tokens has a loss and a gradient of 0.

    Raises:
      ValueError: leading axes differ or are 0 (the error names the leaf), or
        `num_micro_batches` is outside 0 to `k` and not an array; or, in a `shard_map`,
        only one of the loss and the count is reduced over devices, or none of them and
        devices with parameters of their own communicate.
      TypeError: `loss_fn` returned anything other than described above; or `params` is
        an NNX model, and a variable is not an `nnx.Param` or is in two places.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum import window_value_and_grad
      >>> def loss_fn(w, batch):
      ...     return jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"])
      >>> micro_batches = {"x": jnp.asarray([[2.0, 0.0, 0.0], [30.0, 30.0, 30.0]]),
      ...                  "mask": jnp.asarray([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
      >>> f = jax.jit(window_value_and_grad(loss_fn))
      >>> (loss, (num_tokens, _)), grad = f(jnp.asarray(1.0), micro_batches)
      >>> print(loss, num_tokens, grad)  # not 16, the mean of the means
      23.0 4.0 23.0
    """
    checks.check_function(loss_fn, "loss_fn")
    loss = make_loss(loss_fn, has_aux, has_model_state)
    value_and_grad = make_window(loss, accumulator_dtype).value_and_grad
    if has_model_state:
        return value_and_grad

    def without_model_state(
        params: optax.Params, micro_batches: Batch, **kwargs: Any
    ) -> Any:
        (values, _), grads = value_and_grad(params, None, micro_batches, **kwargs)
        return values, grads

    return without_model_state


def make_window(loss: Loss, accumulator_dtype: DType | None) -> "Window":
    """A window that is not followed by an update."""
    accumulation = make_accumulation(
        optax.identity(), make_schedule(), accumulator_dtype=accumulator_dtype
    )
    return Window(loss, accumulation)


@dataclass(frozen=True, eq=False)
class Window:
    """The loop that all functions of a whole window share."""

    loss: Loss
    accumulation: Accumulation

    def value_and_grad(
        self,
        params: optax.Params,
        model_state: M,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: Bound = None,
        **loss_kwargs: Any,
    ) -> tuple[tuple[WindowValues, M], Gradients]:
        """See `window_value_and_grad`."""
        checks.check_nnx_variables(params)
        given = MicroBatch(micro_batches, rng, loss_kwargs)
        peers = self._peers_in_map(given, params, model_state, num_micro_batches)
        (state, (new_model_state, _), aux) = self.run(
            self.accumulation.on(SumsInMap(), PeersInMap(())),
            None,
            given,
            peers.own(params),
            peers.own(model_state),
            num_micro_batches,
        )
        state = peers.reduced_like(state, params)
        model_state = peers.unified_like(new_model_state, model_state)
        loss, num_tokens = self.accumulation.window_so_far(state)
        # Reverse-mode derivatives are lost where the backward pass adds.
        may_loop = BackwardPass.is_supported
        gradient = self.accumulation.window_gradient_in_place(
            state, params, may_loop=may_loop
        )
        return ((loss, (num_tokens, aux)), model_state), gradient

    def _peers_in_map(
        self,
        micro_batches: MicroBatch,
        params: optax.Params,
        model_state: M,
        num_micro_batches: Bound,
    ) -> PeersInMap:
        """The devices that share the window, if this is called in a `shard_map`."""
        stack = stack_of(micro_batches.rows, num_micro_batches)

        def of_first() -> Any:
            first = micro_batches._replace(rows=stack.pick(0))
            returned, new = call(self.loss, params, model_state, first.at(0))
            same = integers_of(model_state, changes(model_state, new))
            loss_sum, (num_tokens, _) = unpack(returned, self.loss.has_aux)
            return loss_sum, num_tokens, params, same

        return peers_in_map(of_first)

    def run(
        self,
        accumulation: Accumulation,
        _: None,
        micro_batches: MicroBatch,
        params: optax.Params,
        model_state: M,
        num_micro_batches: Bound,
        gradient_step: jax.Array | None = None,
    ) -> Output:
        """Runs the micro-batches, from an empty window to one that may be closed.

        With a `gradient_step`, the key is one for the whole run, folded as in
        `make_train_step`; without one, it is the key of this window.

        Returns:
          `Output(opt_state, (model_state, any_skipped), aux)`.
        """
        stack = stack_of(micro_batches.rows, num_micro_batches)

        def with_note(*args: Any, **kwargs: Any) -> Any:
            with explained(micro_batches.rows, args[-1]):
                return self.loss.call(*args, **kwargs)

        loss = replace(self.loss, call=with_note)
        accumulation = replace(accumulation, begins_empty=True)
        empty = accumulation.empty_window(params)
        if gradient_step is not None:
            empty = empty._replace(gradient_step=gradient_step)

        def at(batch: Batch, state: TokenAccumulationState) -> MicroBatch:
            run = () if gradient_step is None else (state.gradient_step,)
            return micro_batches._replace(rows=batch).at(*run, state.mini_step)

        def loss_of_first(params: optax.Params) -> jax.Array:
            first = at(stack.pick(0), empty)
            returned, _ = call(loss, params, model_state, first)
            return unpack(returned, loss.has_aux)[0]

        turned = turned_for(accumulation, loss_of_first, params)

        def add(batch: Batch, carry: Carry) -> tuple[Carry, Any]:
            state, model_state, any_skipped = carry
            state, (model_state, skipped), aux = add_micro_batch(
                turned.of_turned(loss),
                accumulation.on(turned, accumulation.peers),
                state,
                at(batch, state),
                turned.turn(params),
                model_state,
            )
            return (state, model_state, any_skipped | skipped), aux

        def aux_of(batch: Batch) -> Any:
            returned, _ = call(loss, params, model_state, at(batch, empty))
            return unpack(returned, loss.has_aux)[1][1]

        begun = empty._replace(acc_grads=turned.take(empty.acc_grads))
        carry = begun, model_state, jnp.zeros((), jnp.bool_)
        (state, model_state, any_skipped), aux = for_each(
            stack, add, carry, aux_of if loss.has_aux else None
        )
        state = state._replace(acc_grads=turned.hand_over(state.acc_grads))
        return Output(state, (model_state, any_skipped), aux)
