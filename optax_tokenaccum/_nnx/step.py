"""What the steps for a model share: they run the plain steps, and write in place."""

import abc
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from optax_tokenaccum._core.trees import Batch, OptState, is_concrete
from optax_tokenaccum._devices.mode import Mode
from optax_tokenaccum._nnx.model_loss import AuxAndVariables, Models
from optax_tokenaccum._nnx.nodes import (
    Nodes,
    check_alive,
    check_laid_out,
    laid_out,
    places_of,
    read,
)
from optax_tokenaccum._steps.program import ArrayMemo
from optax_tokenaccum._steps.state import ModelStepState, StepMetrics, key_array


class ModelStep(abc.ABC):
    """A step of `_steps` for the transformation of each optimizer.

    Args:
      mode: how the step runs on its devices.
      donate: whether calls update buffers in place.
    """

    _counts_calls = True  # in `optimizer.step`; otherwise the program counts updates

    def __init__(self, mode: Mode, donate: bool):
        self._mode = mode
        self._donate = donate
        self._steps: dict[optax.GradientTransformation, Any] = {}
        self._models = Models()
        # Whether a model and its optimizer are where the step needs them.
        self._is_laid_out: ArrayMemo[bool] = ArrayMemo()
        self._counts: ArrayMemo[int] = ArrayMemo()  # of the calls of an optimizer

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_steps": {}, "_models": Models()}

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
        self._step_of(optimizer)
        nodes = self._read(model, optimizer)
        check_alive(nodes.state())
        self._lay_out(nodes)

    def _step_of(self, optimizer: nnx.Optimizer) -> Any:
        """The step of `_steps` for the optimizer's transformation, built once."""
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "The optimizer must be an nnx.Optimizer, made with "
                f"nnx.Optimizer(model, tx, wrt=nnx.Param): got {optimizer!r}."
            )
        if optimizer.tx not in self._steps:
            self._steps[optimizer.tx] = self._build(optimizer)
        return self._steps[optimizer.tx]

    @abc.abstractmethod
    def _build(self, optimizer: nnx.Optimizer) -> Any:
        """A step of `_steps` for the optimizer's transformation."""

    def _opt_state(self, optimizer: nnx.Optimizer) -> OptState:
        """The variables of the optimizer, as the `opt_state` of the plain step."""
        return optimizer.opt_state

    def _read(self, model: nnx.Module, optimizer: nnx.Optimizer) -> Nodes:
        opt_state = places_of(self._opt_state(optimizer))
        return Nodes(read(self._models, model, optimizer.wrt), opt_state)

    def _run(
        self,
        part: str,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *args: Any,
        **kw: Any,
    ) -> StepMetrics:
        """Calls the method `part` of the plain step, and writes its results."""
        step, nodes, state = self._opened(model, optimizer, (args, kw))
        state, metrics = getattr(step, part)(state, *args, **kw)
        nodes.write(state)
        self._is_laid_out.remember(key_array(state), True)
        if self._counts_calls:
            self._count_call(optimizer.step)
        if isinstance(metrics.aux, AuxAndVariables):
            aux, variables = metrics.aux
            metrics = metrics._replace(aux=aux)
            if variables is not None:
                nnx.update(model, variables)
        return metrics

    def _lowered(
        self,
        part: str,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """Calls the method `part` of the plain step, which only compiles."""
        step, _, state = self._opened(model, optimizer)
        owner, _, name = part.rpartition(".")
        return getattr(getattr(step, owner) if owner else step, name)(
            state, *args, **kw
        )

    def _opened(
        self, model: nnx.Module, optimizer: nnx.Optimizer, given: Batch = ()
    ) -> tuple[Any, Nodes, ModelStepState]:
        step, nodes = self._step_of(optimizer), self._read(model, optimizer)
        state = nodes.state()
        check_alive(state)
        key = key_array(state)
        if isinstance(key, jax.Array) and is_concrete(key):
            if not self._is_laid_out.get(key):
                self._lay_out(nodes)
                state = nodes.state()
            if self._donate:
                state = nodes.donatable(state, given)
        else:
            check_laid_out(state, self._mode)
        return step, nodes, state

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

    def _lay_out(self, nodes: Nodes) -> None:
        state = laid_out(nodes.state(), self._mode)
        nodes.write(state)
        self._is_laid_out.remember(key_array(state), True)


class Part:
    """A method of the plain step that is a program; `lower` has its arguments."""

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
        part = f"{self._name}.lower"
        return self._step._lowered(part, model, optimizer, *args, **kwargs)
