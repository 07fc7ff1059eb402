"""The two halves of the train step: `accumulate` and `close_window`, jitted."""

from typing import Any

import jax

from optax_tokenaccum import _static
from optax_tokenaccum._mini_step_memo import MiniStepMemo
from optax_tokenaccum._programs import Programs, with_acc_grads
from optax_tokenaccum._step_state import (
    StepMetrics,
    StepState,
    require_step_state,
)


class AccumulateStep:
    """`TrainStep.accumulate`: the program of every micro-batch.

    Parameters are only read and the inner optimizer's state is not even an argument;
    the sums are donated, and each gradient is added to them as it is made.
    """

    def __init__(self, programs: Programs, memo: MiniStepMemo, donate: bool):
        self._memo = memo
        self._keeps_count = programs.accumulation.should_skip_update_fn is None
        self._jitted = jax.jit(
            programs.accumulate,
            static_argnames="static",
            donate_argnames="opt_state" if donate else None,
        )

    def __call__(
        self,
        state: StepState,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> tuple[StepState, StepMetrics]:
        arguments = _accumulate_arguments(state, batch, rng, loss_kwargs)
        known = self._memo.get(state.opt_state.mini_step)
        opt_state, metrics = self._jitted(*arguments)
        if known is not None and self._keeps_count:
            self._memo.remember(opt_state.mini_step, known + 1)
        opt_state = opt_state._replace(inner_opt_state=state.opt_state.inner_opt_state)
        return StepState(state.params, opt_state), metrics

    def lower(
        self,
        state: StepState,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> jax.stages.Lowered:
        return self._jitted.lower(
            *_accumulate_arguments(state, batch, rng, loss_kwargs)
        )


class CloseWindowStep:
    """`TrainStep.close_window`: the program of every update.

    The sums are only read; parameters and inner state are donated.
    """

    def __init__(self, programs: Programs, memo: MiniStepMemo, donate: bool):
        self._memo = memo
        self._jitted = jax.jit(
            programs.close, donate_argnames="state" if donate else None
        )

    def __call__(self, state: StepState) -> tuple[StepState, StepMetrics]:
        closable, acc_grads = _close_arguments(state)
        state, metrics = self._jitted(closable, acc_grads)
        self._memo.remember(state.opt_state.mini_step, 0)
        return with_acc_grads(state, acc_grads), metrics

    def lower(self, state: StepState) -> jax.stages.Lowered:
        return self._jitted.lower(*_close_arguments(state))


def _accumulate_arguments(
    state: StepState, batch: Any, rng: Any, loss_kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    require_step_state(state, accumulates=True)
    opt_state = state.opt_state._replace(inner_opt_state=None)
    return opt_state, state.params, batch, rng, *_static.split(loss_kwargs)


def _close_arguments(state: StepState) -> tuple[Any, ...]:
    require_step_state(state, accumulates=True)
    return with_acc_grads(state, None), state.opt_state.acc_grads
