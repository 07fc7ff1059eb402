"""The pure functions behind the train step: accumulate, close, and both in one."""

from typing import Any

import jax

from optax_tokenaccum import _static
from optax_tokenaccum._add_and_close import Accumulation, TokenAccumulationState
from optax_tokenaccum._micro_batch import LossFn, key_of_position, sums_and_gradient
from optax_tokenaccum._step_state import (
    StepMetrics,
    StepState,
    close_and_apply,
    metrics_of,
)


class Programs:
    """The pure functions behind the step.

    What is donated stands first and in the order in which it is returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and a parameter paired with
    a moment of its shape costs XLA a copy of both.
    """

    def __init__(self, loss_fn: LossFn, accumulation: Accumulation, has_aux: bool):
        self.loss_fn = loss_fn
        self.accumulation = accumulation
        self.has_aux = has_aux

    def accumulate(
        self,
        opt_state: TokenAccumulationState,
        params: Any,
        batch: Any,
        rng: jax.Array | None,
        traced: list[Any],
        static: _static.StaticPart,
    ) -> tuple[TokenAccumulationState, StepMetrics]:
        loss_kwargs = _static.join(traced, static) | key_of_position(
            rng, opt_state.gradient_step, opt_state.mini_step
        )
        (loss_sum, num_tokens, aux), gradient = sums_and_gradient(
            self.loss_fn, self.has_aux, params, batch, loss_kwargs
        )
        opt_state, skipped = self.accumulation.add(
            gradient, opt_state, params, num_tokens, loss_sum
        )
        metrics = metrics_of(self.accumulation, opt_state)
        return opt_state, metrics._replace(skipped=skipped, aux=aux)

    def close(self, state: StepState, acc_grads: Any) -> tuple[StepState, StepMetrics]:
        params, opt_state = with_acc_grads(state, acc_grads)
        params, opt_state, metrics = close_and_apply(
            self.accumulation, opt_state.mini_step > 0, params, opt_state
        )
        return with_acc_grads(StepState(params, opt_state), None), metrics

    def whole(
        self,
        state: StepState,
        batch: Any,
        rng: jax.Array | None,
        traced: list[Any],
        static: _static.StaticPart,
    ) -> tuple[StepState, StepMetrics]:
        opt_state, added = self.accumulate(
            state.opt_state, state.params, batch, rng, traced, static
        )
        closes = self.accumulation.schedule.closes(
            opt_state.mini_step, opt_state.acc_tokens, opt_state.gradient_step
        )
        params, opt_state, closed = close_and_apply(
            self.accumulation, closes, state.params, opt_state
        )
        closed = closed._replace(skipped=added.skipped, aux=added.aux)
        return StepState(params, opt_state), closed


def with_acc_grads(state: StepState, acc_grads: Any) -> StepState:
    return state._replace(opt_state=state.opt_state._replace(acc_grads=acc_grads))
