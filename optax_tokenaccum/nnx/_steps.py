"""Steps for an NNX model and an `nnx.Optimizer`, around the steps of the core."""

import abc
import dataclasses
from typing import Any

import jax
import optax
from flax import nnx

from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.checks import as_inner_optimizer
from optax_tokenaccum._core.donation import strong_and_unaliased
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import OptState, Tree, is_concrete, nodes_of
from optax_tokenaccum._devices.mesh import Devices
from optax_tokenaccum._multi_steps import accumulation_of
from optax_tokenaccum._steps import train_step, window_step
from optax_tokenaccum._steps.loss_fn import Loss
from optax_tokenaccum._steps.micro_batch import Setup
from optax_tokenaccum._steps.program import MEMO, Lowered
from optax_tokenaccum._steps.state import (
    Memo,
    StepMetrics,
    StepState,
    WindowOptState,
    tag,
)
from optax_tokenaccum._steps.step import Step
from optax_tokenaccum.nnx._model import Graph, SplitModel, place_state, split_model

WHERE_WINDOWS_LIVE = (
    "An open window lives in the optimizer, so a train step takes one that accumulates "
    "and a window step, which ends its windows, a plain one."
)


class ModelStep(abc.ABC):
    """Steps of the core for the transformation of each optimizer."""

    _core: type[Step]

    def __init__(self, loss: Loss, devices: Devices, donate: bool):
        self._loss = loss
        self._devices = devices
        self._donate = donate
        self._steps: dict[optax.GradientTransformation, Step] = {}
        self._graphs: Memo[nnx.Module, Graph] = Memo()

    def init(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """Places a model on the step's devices, and lays out its optimizer's sums.

        The first call of the step does the same, and `init` may be called again. Call
        it before a checkpoint is restored: `nnx.state((model, optimizer))` is then the
        target, with the right shardings.

        Args:
          model: placed like the parameters of a step of the core.
          optimizer: its moments are placed like the parameters they belong to, except
            moments that are spread over the mesh already: these stay where they are.

        Raises:
          TypeError: the step cannot use this optimizer.
          ValueError: a window is open whose sums are laid out for other devices; or as
            for the `init` of the core; or an array is gone.
        """
        self._lookup(model, optimizer, is_new=True)

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Tree, **kwargs: Tree
    ) -> StepMetrics:
        """Runs the core's step, and updates the model and the optimizer in place."""
        return BoundMethod(self, "__call__")(model, optimizer, *args, **kwargs)

    @abc.abstractmethod
    def _accumulation_of(self, optimizer: nnx.Optimizer) -> Accumulation:
        """What the step of the core does with the gradients."""

    def _opt_state(self, optimizer: nnx.Optimizer) -> OptState:
        """The variables of the optimizer, as the `opt_state` of the core's step."""
        return optimizer.opt_state

    def _lookup(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *given: Tree,
        is_new: bool = False,
    ) -> tuple[Step, SplitModel, StepState]:
        """The core's step for this optimizer, the variables, and the state in them.

        If they are new, they are laid out. Arrays may be donated, except what is
        `given` to the loss.
        """
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "An NNX step takes (model, nnx.Optimizer(model, tx, wrt=...), batch): "
                f"got a {type(optimizer).__name__} as the second."
            )
        step = self._steps.get(optimizer.tx)
        if step is None:
            accumulation = self._accumulation_of(optimizer)
            setup = Setup(self._loss, accumulation, self._devices)
            self._steps[optimizer.tx] = step = self._core(setup, self._donate)
        split = self._split(model, optimizer)
        state = split.state()
        leaves = jax.tree.leaves(state)
        key = tag(state)
        is_array = isinstance(key, jax.Array) and is_concrete(key)
        if is_array and any(type(x) is type(key) and x.is_deleted() for x in leaves):
            raise ValueError(
                "Arrays of the model or its optimizer are gone: an earlier call failed "
                "while it ran, or they are older than the last call. Restore a "
                "checkpoint, nnx.update((model, optimizer), checkpoint). donate=False "
                "keeps old arrays."
            )
        # Arrays that are there twice, or in no variable, are copied.
        taken = {*map(id, [*jax.tree.leaves(given), *split.loose_arrays])}
        known = MEMO.get(key)
        is_known = (
            known is not None and known.layout.step.setup.devices == self._devices
        )
        if is_new or (is_array and not is_known):
            state = place_state(step, state, {*taken})
            split.write(model, state)
            leaves = jax.tree.leaves(state)
        if is_array and self._donate:
            if len({*map(id, leaves)} | taken) < len(leaves) + len(taken):
                state = jax.tree.map(lambda x: strong_and_unaliased(x, taken), state)
        return step, split, state

    def _split(self, model: nnx.Module, optimizer: nnx.Optimizer) -> SplitModel:
        graph = self._graphs.get(model)
        if graph is not None and graph.is_unchanged(optimizer):
            return graph.split
        split = split_model(model, optimizer.wrt, self._opt_state(optimizer))
        graph = Graph(model, optimizer, split)
        if graph.is_static():
            self._graphs.remember(model, graph)
        return split


class BoundMethod:
    """A method of the core's step, on a model; `lower` takes the same arguments."""

    def __init__(self, step: ModelStep, name: str):
        self._step = step
        self._name = name

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Tree, **kwargs: Tree
    ) -> StepMetrics:
        return self._call(None, model, optimizer, *args, **kwargs)

    def _call(
        self,
        compiled: Any,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *args: Tree,
        **kwargs: Tree,
    ) -> StepMetrics:
        owner = self._step
        step, split, state = owner._lookup(model, optimizer, args, kwargs)
        run = getattr(step, self._name) if compiled is None else compiled
        state, metrics = run(state, *args, **kwargs)
        split.write(model, state)
        if not isinstance(owner, WindowStep):  # whose state has the count
            count, updates = optimizer.step, metrics.gradient_step
            if not is_concrete(updates):  # a loop needs the dtype that it began with
                updates = updates.astype(count.get_raw_value().dtype)
            count.set_raw_value(updates)
        return metrics

    def lower(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Tree, **kwargs: Tree
    ) -> Lowered:
        step, _, state = self._step._lookup(model, optimizer)
        program: Any = step if self._name == "__call__" else getattr(step, self._name)
        return Lowered(program.lower(state, *args, **kwargs), self._call)


class TrainStep(ModelStep):
    """See `optax_tokenaccum.nnx.make_train_step`."""

    _core = train_step.TrainStep

    def __init__(self, loss: Loss, devices: Devices, donate: bool):
        super().__init__(loss, devices, donate)
        self.accumulate = BoundMethod(self, "accumulate")
        self.close_window = BoundMethod(self, "close_window")
        self.lower = BoundMethod(self, "__call__").lower

    def _accumulation_of(self, optimizer: nnx.Optimizer) -> Accumulation:
        accumulation = accumulation_of(optimizer.tx)
        if accumulation is None or accumulation.gradients != "sum":
            raise TypeError(
                f"{WHERE_WINDOWS_LIVE} Here, give nnx.Optimizer(model, "
                "token_accumulation(...)), with a chain inside of it, or "
                "MultiSteps(..., gradients='sum')."
            )
        return accumulation


class WindowStep(ModelStep):
    """See `optax_tokenaccum.nnx.make_window_step`."""

    _core = window_step.WindowStep

    def __init__(
        self, loss: Loss, accumulation: Accumulation, devices: Devices, donate: bool
    ):
        super().__init__(loss, devices, donate)
        self._accumulation = accumulation  # for any inner optimizer
        self.lower = BoundMethod(self, "__call__").lower

    def _accumulation_of(self, optimizer: nnx.Optimizer) -> Accumulation:
        kinds = TokenAccumulationState, optax.MultiStepsState
        if accumulation_of(optimizer.tx) or nodes_of(kinds, optimizer.opt_state):
            raise TypeError(
                f"{WHERE_WINDOWS_LIVE} Here, give the plain optimizer alone."
            )
        inner = as_inner_optimizer(optimizer.tx)
        return dataclasses.replace(self._accumulation, inner=inner)

    def _opt_state(self, optimizer: nnx.Optimizer) -> OptState:
        step: Any = optimizer.step
        return WindowOptState(step, optimizer.opt_state)
