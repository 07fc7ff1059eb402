"""Steps for an NNX model and an `nnx.Optimizer`, around the steps of the core."""

import abc
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from optax_tokenaccum import _train_step, _window_step
from optax_tokenaccum._accumulation import Accumulation, make_accumulation
from optax_tokenaccum._devices import Devices
from optax_tokenaccum._loss import Loss
from optax_tokenaccum._multi_steps import transformation_of
from optax_tokenaccum._nnx_model import Opened, laid_out, open_model
from optax_tokenaccum._schedule import make_schedule
from optax_tokenaccum._state import (
    ArrayMemo,
    ModelStepState,
    StepMetrics,
    TokenAccumulationState,
    key_array,
    settled,
)
from optax_tokenaccum._trees import OptState, is_concrete, nodes_of


class ModelStep(abc.ABC):
    """Steps of the core for the transformation of each optimizer."""

    _counts_calls = True  # in `optimizer.step`; otherwise the program counts updates

    def __init__(self, loss: Loss, devices: Devices, donate: bool):
        self._loss = loss
        self._devices = devices
        self._donate = donate
        self._steps: dict[optax.GradientTransformation, Any] = {}
        # Whether a model and its optimizer are where the step needs them.
        self._is_laid_out: ArrayMemo[bool] = ArrayMemo()
        self._counts: ArrayMemo[int] = ArrayMemo()  # of the calls of an optimizer

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_steps": {}}

    def init(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """Places a model on the step's devices, and lays out its optimizer's sums.

        Both are changed in place. The first call of the step does the same, and `init`
        may be called again. Call it before a checkpoint is restored:
        `nnx.state((model, optimizer))` is then the target, with the right shardings.

        Args:
          model: if the step has a mesh, arrays on that mesh stay where they are, and
            other arrays are copied to all its devices.
          optimizer: its moments are placed like the parameters they belong to, except
            moments that are spread over the mesh already: these stay where they are.

        Raises:
          TypeError: the step cannot use this optimizer.
          ValueError: a window is open whose sums are laid out for other devices; an
            array of the model is on a mesh other than the step's; or an array is gone,
            donated to a call that failed while it ran.
        """
        step, opened = self._opened(model, optimizer)
        self._write(opened, laid_out(step, opened.state()))

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Any, **kwargs: Any
    ) -> StepMetrics:
        """Runs the core's step, and updates the model and the optimizer in place."""
        return self._run("__call__", model, optimizer, *args, **kwargs)

    @abc.abstractmethod
    def _build(self, optimizer: nnx.Optimizer) -> Any:
        """A step of the core for the optimizer's transformation."""

    def _opt_state(self, optimizer: nnx.Optimizer) -> OptState:
        """The variables of the optimizer, as the `opt_state` of the core's step."""
        return optimizer.opt_state

    def _opened(
        self, model: nnx.Module, optimizer: nnx.Optimizer
    ) -> tuple[Any, Opened]:
        """The core's step for this optimizer, and the places of the arrays."""
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "The optimizer must be an nnx.Optimizer, made with "
                f"nnx.Optimizer(model, tx, wrt=nnx.Param): got {optimizer!r}."
            )
        if optimizer.tx not in self._steps:
            self._steps[optimizer.tx] = self._build(optimizer)
        opened = open_model(model, optimizer.wrt, self._opt_state(optimizer))
        check_alive(opened.state())
        return self._steps[optimizer.tx], opened

    def _prepared(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *given: Any
    ) -> tuple[Any, Opened, ModelStepState]:
        """Also the state, of arrays that may be donated, except what is `given`."""
        step, opened = self._opened(model, optimizer)
        state = opened.state()
        key = key_array(state)
        if not isinstance(key, jax.Array) or not is_concrete(key):
            return step, opened, state
        if not self._is_laid_out.get(key):
            state = laid_out(step, state)
            self._write(opened, state)
        if self._donate:
            # Arrays that are there twice, or in no variable, are copied.
            taken = {*map(id, [*jax.tree.leaves(given), *opened.loose_arrays()])}
            leaves = jax.tree.leaves(state)
            if len({*map(id, leaves)} | taken) < len(leaves) + len(taken):
                state = jax.tree.map(lambda x: settled(x, taken), state)
        return step, opened, state

    def _run(
        self,
        part: str,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> StepMetrics:
        """Calls the method `part` of the core's step, and writes its results."""
        step, opened, state = self._prepared(model, optimizer, args, kwargs)
        if part != "close_window":
            kwargs["nnx_static"] = opened.static
        state, metrics = getattr(step, part)(state, *args, **kwargs)
        self._write(opened, state)
        if self._counts_calls:
            self._count_call(optimizer.step)
        return metrics

    def _lower(
        self,
        part: str,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> jax.stages.Lowered:
        """Lowers the program that the method `part` of the core's step runs."""
        step, opened, state = self._prepared(model, optimizer)
        if part != "close_window":
            kwargs["nnx_static"] = opened.static
        owner = step if part == "__call__" else getattr(step, part)
        return owner.lower(state, *args, **kwargs)

    def _write(self, opened: Opened, state: ModelStepState) -> None:
        opened.write(state)
        self._is_laid_out.remember(key_array(state), True)

    def _count_call(self, variable: nnx.Variable) -> None:
        """Adds 1 without a program, and without waiting for a device."""
        old = variable.get_raw_value()
        if not isinstance(old, jax.Array) or not is_concrete(old):
            variable.set_raw_value(old + 1)
            return
        known = self._counts.get(old)
        count = 1 + (int(old) if known is None else known)
        new = np.asarray(count, old.dtype)
        new = jax.device_put(new, old.sharding if old.committed else None)
        self._counts.remember(new, count)
        variable.set_raw_value(new)


class Part:
    """A method of the core's step that is a program; `lower` has its arguments."""

    def __init__(self, step: ModelStep, name: str):
        self._step = step
        self._name = name

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Any, **kwargs: Any
    ) -> StepMetrics:
        return self._step._run(self._name, model, optimizer, *args, **kwargs)

    def lower(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Any, **kwargs: Any
    ) -> jax.stages.Lowered:
        return self._step._lower(self._name, model, optimizer, *args, **kwargs)


class TrainStep(ModelStep):
    """See `optax_tokenaccum.nnx.make_train_step`."""

    def __init__(self, loss: Loss, devices: Devices, donate: bool):
        super().__init__(loss, devices, donate)
        self.accumulate = Part(self, "accumulate")
        self.close_window = Part(self, "close_window")

    def _build(self, optimizer: nnx.Optimizer) -> _train_step.TrainStep:
        accumulation = _accumulation_of(optimizer)
        return _train_step.TrainStep(
            self._loss, accumulation, self._devices, self._donate
        )


class WindowStep(ModelStep):
    """See `optax_tokenaccum.nnx.make_window_step`."""

    _counts_calls = False

    def __init__(
        self, loss: Loss, options: dict[str, Any], devices: Devices, donate: bool
    ):
        super().__init__(loss, devices, donate)
        self._options = options
        self.lower = Part(self, "__call__").lower

    def _build(self, optimizer: nnx.Optimizer) -> _window_step.WindowStep:
        kinds = TokenAccumulationState, optax.MultiStepsState
        if transformation_of(optimizer.tx) or nodes_of(kinds, optimizer.opt_state):
            raise ValueError(
                "The optimizer of a window step must not accumulate, since a call is a "
                "whole window: got an accumulation in it. Give nnx.Optimizer the plain "
                "optimizer, or use make_train_step."
            )
        accumulation = make_accumulation(optimizer.tx, make_schedule(), **self._options)
        return _window_step.WindowStep(
            self._loss, accumulation, self._devices, self._donate
        )

    def _opt_state(self, optimizer: nnx.Optimizer) -> TokenAccumulationState:
        """With the only number that the optimizer keeps, that of its updates."""
        step: Any = optimizer.step
        no: Any = None
        return TokenAccumulationState(no, step, optimizer.opt_state, (), no, no, no)

    def _write(self, opened: Opened, state: ModelStepState) -> None:
        # No variable of the optimizer holds it.
        no: Any = None
        opt_state = state.opt_state._replace(has_updated=no)
        super()._write(opened, state._replace(opt_state=opt_state))


def check_alive(state: ModelStepState) -> None:
    """Raises `ValueError` if a call that failed, or another step, took an array."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    if any(is_concrete(x) and x.is_deleted() for x in arrays):
        raise ValueError(
            "The arrays of the model and its optimizer must not have been donated: got "
            "some that are gone, because an earlier call failed while it ran, or "
            "because they are older than the last call. Restore a checkpoint, "
            "nnx.update((model, optimizer), checkpoint); or, if the parameters are "
            "still there, begin with a new nnx.Optimizer and step.init. Build the step "
            "with donate=False to lose nothing."
        )


def _accumulation_of(optimizer: nnx.Optimizer) -> Accumulation:
    given = getattr(optimizer, "tx", optimizer)
    transformation = transformation_of(given)
    if not isinstance(optimizer, nnx.Optimizer) or transformation is None:
        raise TypeError(
            "The optimizer must be an nnx.Optimizer around token_accumulation(...) "
            "itself, or around MultiSteps(..., gradients='sum'): got "
            f"{given!r}. A chain goes inside: token_accumulation(optax.chain(...), k)."
        )
    gradients = transformation.accumulation.gradients
    if gradients != "sum":
        raise ValueError(
            "loss_fn returns a sum over tokens, so the optimizer must be told "
            f"gradients='sum': got {gradients!r}. Write token_accumulation(inner, k), "
            "or MultiSteps(inner, k, gradients='sum')."
        )
    return transformation.accumulation
