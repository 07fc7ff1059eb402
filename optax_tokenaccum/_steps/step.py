"""What a step for one micro-batch and a step for a whole window have in common."""

import abc
import functools
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import arrays, checks
from optax_tokenaccum._core.accumulation import Accumulation, Norm
from optax_tokenaccum._core.loss import Loss
from optax_tokenaccum._core.once import in_conditional
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Gradients, OptState, TracedBool
from optax_tokenaccum._devices.mode import Mode
from optax_tokenaccum._steps import abstract
from optax_tokenaccum._steps.in_place import Layers, in_least_memory
from optax_tokenaccum._steps.program import ShardingCache
from optax_tokenaccum._steps.state import (
    AnyStepState,
    ModelStepState,
    P,
    S,
    StepMetrics,
    StepState,
    require_step_state,
)


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
        self._of_programs: Any = {
            "auto": mode.auto,
            "shardings": ShardingCache(),
            "donate": donate,
        }

    def init(self, params: P, model_state: Any = None) -> Any:
        """Returns a state with copies of the arrays: the caller's are never donated.

        To restore a checkpoint, use `jax.eval_shape(step.init, params)` as the target;
        over several devices, use the state itself, which has shardings.

        Args:
          params: a pytree of arrays; integer arrays are never updated. If the step has
            a mesh, arrays on that mesh stay where they are, and other arrays are copied
            to all its devices. Or a pytree of `jax.ShapeDtypeStruct`, whose shardings
            may lie on devices that are not there (`jax.experimental.topologies`): the
            state is then made of shapes, with the shardings that arrays would have, for
            `lower`.
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
        if abstract.is_abstract((params, model_state)):
            return self._shapes(params, model_state)
        params = self._mode.place(arrays.owned(params))  # lets go of the caller's
        # An optimizer may return an array that it keeps: optax.add_noise, its key.
        opt_state = arrays.owned(self._mode.init(self._init, params))
        if not has_model_state:
            return StepState(params, opt_state)
        model_state = arrays.stable(params, arrays.owned(model_state))
        return ModelStepState(params, opt_state, self._mode.place(model_state))

    def _shapes(self, params: Any, model_state: Any) -> Any:
        """The state that `init` returns, for shapes."""
        params = self._mode.place(abstract.shapes_of(params))
        lead = self._mode.layout().leading_axes
        init = functools.partial(abstract.init_of_shapes, self._init, lead)
        opt_state = self._mode.init(init, params)
        if model_state is None:
            return StepState(params, opt_state)
        model_state = self._mode.place(abstract.shapes_of(model_state))
        model_state = abstract.placed_at(arrays.home(params), model_state)
        return ModelStepState(params, opt_state, model_state)

    @abc.abstractmethod
    def _init(self, params: P) -> TokenAccumulationState:
        """The optimizer's state, for parameters that are placed."""

    def _require(self, state: AnyStepState[P]) -> None:
        require_step_state(
            state,
            accumulates=self._accumulates,
            has_model_state=self._loss.has_model_state,
        )

    def _metrics(self, opt_state: TokenAccumulationState) -> StepMetrics:
        """The metrics of an open window."""
        loss, num_tokens = self._accumulation.window_so_far(opt_state)
        return StepMetrics(
            loss=loss,
            num_tokens=num_tokens,
            grad_norm=jnp.zeros_like(loss),
            updated=jnp.zeros((), jnp.bool_),
            skipped=jnp.zeros((), jnp.bool_),
            mini_step=opt_state.mini_step,
            gradient_step=opt_state.gradient_step,
        )

    def _update(
        self,
        shardings: P | None,
        closes: TracedBool,
        state: S,
        *,
        may_overwrite: bool = False,
        window: Layers | None = None,
    ) -> tuple[S, StepMetrics]:
        """If the window `closes`, applies its update to the parameters.

        If `may_overwrite`, the sums are lost with it, and can hold what it computes.
        `window`: see `in_least_memory`.
        """
        accumulation = self._accumulation.on(self._mode.layout(shardings))
        inner, layout = accumulation.inner, accumulation.layout
        params: Any = state.params
        opt_state = state.opt_state
        checks.check_inner_state(inner, opt_state.inner_opt_state, params)
        metrics = self._metrics(opt_state)

        # Its operations are read before it runs: both share one trace.
        @jax.jit
        def update_of(
            gradient: Gradients, inner_opt_state: OptState, params: optax.Params
        ) -> tuple[optax.Updates, OptState]:
            return inner.update(gradient, inner_opt_state, params, value=metrics.loss)

        def update(
            gradient: Gradients,
            norm: Norm,
            otherwise: tuple[optax.Params, jax.Array],
            inner_opt_state: OptState,
        ) -> tuple[tuple[optax.Params, jax.Array], OptState]:
            params, _ = otherwise
            updates, inner_opt_state = update_of(gradient, inner_opt_state, params)
            applied = layout.place(jax.tree.map(_applied, params, updates))
            return (applied, norm()), inner_opt_state

        only_if, first = in_conditional, None
        try:
            if may_overwrite:
                traced = update_of.trace(params, opt_state.inner_opt_state, params)
                only_if, first = in_least_memory(
                    traced.jaxpr,
                    opt_state.acc_grads,
                    params,
                    layout,
                    is_alone=self._mode.num_devices == 1,
                    window=window,
                )
            (params, grad_norm), closed = accumulation.close(
                opt_state,
                closes,
                params,
                update,
                otherwise=(params, metrics.grad_norm),
                only_if=only_if,
                first=first,
            )
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                "The optimizer of a step must need nothing but gradients, parameters "
                f"and value, the window's loss: {error}. Give update what it needs in "
                "a loop of your own, with token_accumulation; or leave out the line "
                "search, optax.lbfgs(1.0, linesearch=None)."
            ) from error
        metrics = metrics._replace(
            grad_norm=grad_norm,
            updated=closed.has_updated,
            mini_step=closed.mini_step,
            gradient_step=closed.gradient_step,
        )
        return state._replace(params=params, opt_state=closed), metrics


def _applied(param: jax.Array, update: jax.Array) -> optax.Params:
    """The parameter plus its update, which weight decay gives an integer too."""
    is_trained = jnp.issubdtype(param.dtype, jnp.inexact)
    return optax.apply_updates(param, update) if is_trained else param
