"""What a step for one micro-batch and a step for a whole window have in common."""

import abc
from collections.abc import Iterable
from typing import Any, ClassVar, Generic

from optax_tokenaccum._core import arrays, checks
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.loss import Loss
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import ParamShardings, TracedBool
from optax_tokenaccum._devices.mode import Mode
from optax_tokenaccum._steps.compile_ahead import Programs, Progress, compile_all
from optax_tokenaccum._steps.program import ShardingCache
from optax_tokenaccum._steps.state import (
    AnyStepState,
    ModelStepState,
    P,
    StepMetrics,
    StepState,
    require_step_state,
)
from optax_tokenaccum._steps.update import close_and_apply


class Step(abc.ABC, Generic[P]):
    """A step for a loss of parameters.

    Args:
      loss: of a micro-batch.
      accumulation: of its gradients.
      mode: how the step runs on its devices.
      donate: whether calls update buffers in place.
    """

    _accumulates: ClassVar[bool]  # whether a window may be open between calls

    def __init__(
        self, loss: Loss, accumulation: Accumulation, mode: Mode, donate: bool
    ):
        self._loss = loss
        self._accumulation = accumulation
        self._mode = mode
        self._of_programs: Any = dict(
            auto=mode.auto, shardings=ShardingCache(), donate=donate
        )

    def init(self, params: P, model_state: Any = None) -> Any:
        """Returns a state with copies of the arrays: the caller's are never donated.

        To restore a checkpoint, use `jax.eval_shape(step.init, params)` as the target;
        over several devices, use the state itself, which has shardings. A window step's
        state of version 0.2.0 is restored without a target, and converted by
        `regroup_sums`.

        Args:
          params: a pytree of arrays; integer arrays are never updated. If the step has
            a mesh, arrays on that mesh stay where they are, and other arrays are copied
            to all its devices.
          model_state: if the step has `has_model_state=True`, a pytree of arrays that
            the loss changes; placed like `params`.

        Returns:
          A `StepState`, or with `has_model_state=True` a `ModelStepState`.

        Raises:
          TypeError: a leaf is not an array; or `params` is an NNX model, and a variable
            is not an `nnx.Param` or is in two places; or there is a `model_state`
            without `has_model_state=True`, or the reverse.
          ValueError: an array is on a mesh other than the step's.
        """
        has_model_state = self._loss.has_model_state
        if has_model_state != (model_state is not None):
            got = "none" if model_state is None else "one"
            raise TypeError(
                f"A step with has_model_state={has_model_state} is begun with "
                f"step.init(params{', model_state' * has_model_state}): got {got}."
            )
        checks.check_nnx_variables(params)
        params = self._mode.place(arrays.owned(params))  # lets go of the caller's
        # An optimizer may return an array that it keeps: optax.add_noise, its key.
        opt_state = arrays.owned(self._mode.init(self._init, params))
        if not has_model_state:
            return StepState(params, opt_state)
        model_state = arrays.stable(params, arrays.owned(model_state))
        return ModelStepState(params, opt_state, self._mode.place(model_state))

    @abc.abstractmethod
    def _init(self, params: P) -> TokenAccumulationState:
        """The optimizer's state, for parameters that are placed."""

    def _compile(
        self,
        state: AnyStepState[P],
        batches: Iterable[Any],
        progress: Progress,
        **kwargs: Any,
    ) -> None:
        name = "batches" if self._accumulates else "windows"
        compile_all(self._programs(state, **kwargs), batches, name, progress)

    @abc.abstractmethod
    def _programs(self, state: AnyStepState[P], **kwargs: Any) -> Programs:
        """The programs of a run whose calls have these keywords."""

    def _require(self, state: Any) -> None:
        require_step_state(
            state,
            accumulates=self._accumulates,
            has_model_state=self._loss.has_model_state,
        )

    def _update(
        self,
        shardings: ParamShardings,
        closes: TracedBool,
        params: P,
        opt_state: TokenAccumulationState,
    ) -> tuple[P, TokenAccumulationState, StepMetrics]:
        """If the window closes, the update of the parameters."""
        accumulation = self._accumulation.on(self._mode.layout(shardings))
        return close_and_apply(accumulation, closes, params, opt_state)
