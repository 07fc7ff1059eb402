"""The two halves of the train step: `accumulate` and `close_window`, jitted."""

from typing import Any

import jax

from optax_tokenaccum._core.trees import is_concrete
from optax_tokenaccum._devices.rows import spread_rows
from optax_tokenaccum._steps import static_args
from optax_tokenaccum._steps.compile_ahead import signature
from optax_tokenaccum._steps.memo import ArrayMemo, MiniStepMemo
from optax_tokenaccum._steps.placement import PlacedJit, Placement, Placements
from optax_tokenaccum._steps.programs import Programs, with_acc_grads
from optax_tokenaccum._steps.state import StepMetrics, StepState, require_step_state


class AccumulateStep:
    """`TrainStep.accumulate`: the program of every micro-batch.

    Parameters are only read and the inner optimizer's state is not even an argument;
    the sums are donated, and each gradient is added to them as it is made.
    """

    def __init__(
        self,
        programs: Programs,
        memo: MiniStepMemo,
        placements: Placements,
        donate: bool,
    ):
        self._memo = memo
        self._placements = placements
        self._devices = programs.devices
        self._keeps_count = programs.accumulation.should_skip_update_fn is None
        self._jitted = PlacedJit(
            programs.accumulate,
            lambda state: state.opt_state._replace(inner_opt_state=None),
            programs.auto,
            donate,
        )

    def __call__(
        self,
        state: StepState,
        batch: Any,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> tuple[StepState, StepMetrics]:
        if self._devices is not None:
            self._devices.agreement.check(batch)
        placement, arguments, static = self._arguments(state, batch, rng, loss_kwargs)
        known = self._memo.get(state.opt_state.mini_step)
        opt_state, metrics = self._jitted.at(placement)(*arguments, static=static)
        if known is not None and self._keeps_count:
            self._memo.remember(opt_state.mini_step, known + 1)
        self._placements.remember(opt_state.mini_step, placement)
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
        placement, arguments, static = self._arguments(state, batch, rng, loss_kwargs)
        return self._jitted.at(placement).lower(*arguments, static=static)

    def _arguments(
        self, state: StepState, batch: Any, rng: Any, loss_kwargs: dict[str, Any]
    ) -> tuple[Placement | None, tuple[Any, ...], static_args.StaticPart]:
        require_step_state(state, accumulates=True)
        if self._devices is not None:
            batch = spread_rows(self._devices, batch)
        placement = self._placements.of(state, state.opt_state.mini_step)
        opt_state = state.opt_state._replace(inner_opt_state=None)
        traced, static = static_args.split(loss_kwargs)
        return placement, (opt_state, state.params, batch, rng, traced), static


class CloseWindowStep:
    """`TrainStep.close_window`: the program of every update.

    The sums are only read; parameters and inner state are donated.
    """

    def __init__(
        self,
        programs: Programs,
        memo: MiniStepMemo,
        placements: Placements,
        donate: bool,
    ):
        self._memo = memo
        self._placements = placements
        self._jitted = PlacedJit(
            programs.close,
            lambda state: with_acc_grads(state, None),
            programs.auto,
            donate,
        )
        self._compiled: set[Any] = set()
        self._is_ready: ArrayMemo[bool] = ArrayMemo()

    def __call__(self, state: StepState) -> tuple[StepState, StepMetrics]:
        placement, closable, acc_grads = self._arguments(state)
        state, metrics = self._jitted.at(placement)(closable, acc_grads)
        self._memo.remember(state.opt_state.mini_step, 0)
        self._placements.remember(state.opt_state.mini_step, placement)
        self.stay_ready(state)
        return with_acc_grads(state, acc_grads), metrics

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": set()}

    def make_ready(self, state: StepState) -> None:
        """Compiles the program for `state` now, if it is not compiled yet.

        The last call of a window accumulates, which donates the sums, and then closes
        it: an error in the optimizer and Ctrl-C while this compiles must come before.
        """
        if self._is_ready.get(state.opt_state.mini_step):
            return
        if not all(map(is_concrete, jax.tree.leaves(state))):
            return  # in a trace, where nothing is donated
        placement, *arguments = self._arguments(state)
        key = placement, signature(arguments)
        if key not in self._compiled:
            self._jitted.at(placement).lower(*arguments).compile()
            self._compiled.add(key)

    def stay_ready(self, state: StepState) -> None:
        """Notes that `state` is laid out like one that the program is compiled for."""
        self._is_ready.remember(state.opt_state.mini_step, True)

    def lower(self, state: StepState) -> jax.stages.Lowered:
        placement, *arguments = self._arguments(state)
        return self._jitted.at(placement).lower(*arguments)

    def _arguments(self, state: StepState) -> tuple[Placement | None, StepState, Any]:
        require_step_state(state, accumulates=True)
        placement = self._placements.of(state, state.opt_state.mini_step)
        return placement, with_acc_grads(state, None), state.opt_state.acc_grads
