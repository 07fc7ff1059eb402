"""The pure functions behind the train step: accumulate, close, and both in one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.loss_fn import LossFn, key_at, sums_and_gradient
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.modes import check_layout, over_all, over_rows
from optax_tokenaccum._steps import static_args
from optax_tokenaccum._steps.placement import Placement, as_it_is
from optax_tokenaccum._steps.state import (
    StepMetrics,
    StepState,
    close_and_apply,
    metrics_of,
)


@dataclass(frozen=True, eq=False)
class Programs:
    """The pure functions behind the step, for a state that is placed somehow.

    What is donated stands first and in the order in which it is returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and a parameter paired with
    a moment of its shape costs XLA a copy of both.
    """

    loss_fn: LossFn
    accumulation: Accumulation
    has_aux: bool
    devices: DataParallel | None

    @property
    def auto(self) -> Callable[..., Any]:
        return as_it_is if self.devices is None else self.devices.auto

    def accumulate(
        self,
        placement: Placement | None,
        opt_state: TokenAccumulationState,
        params: Any,
        batch: Any,
        rng: jax.Array | None,
        traced: list[Any],
        static: static_args.StaticPart,
    ) -> tuple[TokenAccumulationState, StepMetrics]:
        check_layout(opt_state.acc_grads, params, self.devices)

        def add(
            accumulation: Accumulation,
            opt_state: TokenAccumulationState,
            batch: Any,
            params: Any,
            rng: jax.Array | None,
            traced: list[Any],
        ) -> tuple[TokenAccumulationState, StepMetrics, Any]:
            layout = accumulation.layout
            loss_kwargs = static_args.join(traced, static) | key_at(
                rng, layout, opt_state.gradient_step, opt_state.mini_step
            )
            (loss_sum, (num_tokens, aux)), gradient = sums_and_gradient(
                self.loss_fn, self.has_aux, params, batch, loss_kwargs, layout
            )
            opt_state, skipped = accumulation.add(
                gradient, opt_state, params, num_tokens, loss_sum
            )
            metrics = metrics_of(accumulation, opt_state)
            return opt_state, metrics._replace(skipped=skipped), layout.stacked(aux)

        opt_state, metrics, aux = over_rows(
            self.devices,
            self.accumulation,
            placement,
            add,
            opt_state,
            batch,
            params,
            rng,
            traced,
        )
        return opt_state, metrics._replace(aux=aux)

    def close(
        self, placement: Placement | None, state: StepState, acc_grads: Any
    ) -> tuple[StepState, StepMetrics]:
        params, opt_state = with_acc_grads(state, acc_grads)
        check_layout(acc_grads, params, self.devices)
        params, opt_state, metrics = close_and_apply(
            over_all(self.devices, self.accumulation, placement),
            opt_state.mini_step > 0,
            params,
            opt_state,
        )
        return with_acc_grads(StepState(params, opt_state), None), metrics

    def whole(
        self,
        placement: Placement | None,
        state: StepState,
        batch: Any,
        rng: jax.Array | None,
        traced: list[Any],
        static: static_args.StaticPart,
    ) -> tuple[StepState, StepMetrics]:
        opt_state, added = self.accumulate(
            placement, state.opt_state, state.params, batch, rng, traced, static
        )
        closes = self.accumulation.schedule.closes(
            opt_state.mini_step, opt_state.acc_tokens, opt_state.gradient_step
        )
        params, opt_state, closed = close_and_apply(
            over_all(self.devices, self.accumulation, placement),
            closes,
            state.params,
            opt_state,
        )
        closed = closed._replace(skipped=added.skipped, aux=added.aux)
        return StepState(params, opt_state), closed


def with_acc_grads(state: StepState, acc_grads: Any) -> StepState:
    return state._replace(opt_state=state.opt_state._replace(acc_grads=acc_grads))
