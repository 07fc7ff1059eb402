"""Programs of a step, which leave arrays in their place, and what the host knows."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from optax_tokenaccum._core.donation import copy_aliased
from optax_tokenaccum._core.trees import Leaf, Tree, is_concrete
from optax_tokenaccum._devices.mesh import with_auto_axes
from optax_tokenaccum._steps.micro_batch import Setup
from optax_tokenaccum._steps.state import Memo, StepMetrics, StepState, tag


class Owner(Protocol):
    """The step that a program is of."""

    setup: Setup
    donate: bool

    def require(self, state: StepState) -> None: ...
    def lookup(self, state: StepState) -> "HostInfo": ...
    def layout_of(self, state: StepState) -> "StateLayout": ...


StepT = TypeVar("StepT", bound=Owner)
Partition = tuple[Tree, Tree, Callable[[Tree], StepState]]


@dataclasses.dataclass(eq=False)
class StateLayout:
    """The structure of a step's states and the shardings of their leaves."""

    step: Owner
    structure: PyTreeDef
    shardings: tuple[NamedSharding | None, ...] | None  # `None`: no leaf is on a mesh
    is_concrete: bool
    model: PyTreeDef  # the structure of the model state
    # The functions of the step's programs for such states.
    jitted: dict["Program", jax.stages.Wrapped] = dataclasses.field(
        default_factory=dict
    )
    is_ready: bool = False  # whether the program that closes the window is compiled


class HostInfo(NamedTuple):
    """What the host knows of a state that a step returned."""

    layout: StateLayout
    count: int | None = None  # the value of `mini_step`, so that no call waits for it


# Of all steps, because steps may take turns on one state.
MEMO: Memo[Leaf, HostInfo] = Memo()


def remember(state: StepState, known: HostInfo) -> None:
    array = tag(state)
    if isinstance(array, jax.Array) and is_concrete(array):
        MEMO.remember(array, known)


class Program(abc.ABC, Generic[StepT]):
    """A jitted function: `program(state, ...) -> (state, StepMetrics)`.

    A state over several devices stays where it is: the program's outputs get the
    shardings of the state.
    """

    row_axis = 0  # along which the `aux` of devices are stacked

    def __init__(self, step: StepT):
        self.step = step

    @abc.abstractmethod
    def arguments(self, *args: Tree, **kwargs: Tree) -> tuple[Tree, ...]:
        """Checks what a call is given besides the state, and returns what is traced."""

    @abc.abstractmethod
    def body(self, *args: Tree, **kwargs: Tree) -> tuple[Tree, StepMetrics]:
        """The function to jit: `body(shardings, donated, kept, *traced)`.

        It returns new values of what is donated, and metrics. The shardings are those
        of the parameters.
        """

    def partition(self, state: StepState) -> Partition:
        """Returns `(donated, kept, combine)`: the parts of a state that are needed.

        `combine(donated)` is the state with new values of what was donated. Parts are
        in the order of `StepState`.
        """
        parts = state.params, state.opt_state, state.model_state
        return parts, (), lambda new: StepState(*new)

    @abc.abstractmethod
    def next_info(self, known: HostInfo) -> HostInfo:
        """What is known of the new state, from what was known of the old one."""

    def __call__(
        self, state: StepState, *args: Tree, **kwargs: Tree
    ) -> tuple[StepState, StepMetrics]:
        return self._call(None, state, *args, **kwargs)

    def _call(
        self, compiled: Any, state: StepState, *args: Tree, **kwargs: Tree
    ) -> tuple[StepState, StepMetrics]:
        self.step.require(state)
        traced = self.arguments(*args, **kwargs)
        return self.run(state, self.step.lookup(state), traced, compiled)[:2]

    def run(
        self,
        state: StepState,
        known: HostInfo,
        traced: tuple[Tree, ...],
        compiled: jax.stages.Compiled | None = None,
    ) -> tuple[StepState, StepMetrics, HostInfo]:
        """Runs the program with a state and arguments that are checked."""
        donated, kept, combine = self.partition(state)
        if self.step.donate:
            donated, traced = copy_aliased(donated, traced)
        run = self._at(known.layout) if compiled is None else compiled
        donated, metrics = run(donated, kept, *traced)
        new, known = combine(donated), self.next_info(known)
        remember(new, known)
        return new, metrics, known

    def lower(self, state: StepState, *args: Tree, **kwargs: Tree) -> "Lowered":
        self.step.require(state)
        traced = self.arguments(*args, **kwargs)
        lowered = self._lower(state, self.step.layout_of(state), traced)
        return Lowered(lowered, self._call)

    def make_ready(self, state: StepState, layout: StateLayout) -> None:
        """Compiles a program that takes only a state; its call finds it compiled."""
        if layout.is_concrete and not layout.is_ready:
            self._lower(state, layout, ()).compile()
        layout.is_ready = True

    def _lower(
        self, state: StepState, layout: StateLayout, traced: tuple[Tree, ...]
    ) -> jax.stages.Lowered:
        donated, kept, _ = self.partition(state)
        return self._at(layout).lower(donated, kept, *traced)

    def _at(self, layout: StateLayout) -> jax.stages.Wrapped:
        """The jitted function for states with this layout."""
        if self not in layout.jitted:
            layout.jitted.setdefault(self, self._make(layout))
        return layout.jitted[self]

    def _make(self, layout: StateLayout) -> jax.stages.Wrapped:
        devices, of_params, out = self.step.setup.devices, None, None
        # `shardings` are those of the whole state, leaf by leaf. Put in the places of
        # its leaves, they can be split as a state is: into those of the parameters,
        # which the body constrains gradients to, and those of what is donated, which
        # must come back where it was.
        if layout.shardings is not None:
            leaves = [x or UNKNOWN for x in layout.shardings]
            state_of_shardings: StepState = layout.structure.unflatten(leaves)
            of_params = tuple(map(_or_none, jax.tree.leaves(state_of_shardings.params)))
            out = jax.tree.map(_or_none, self.partition(state_of_shardings)[0])
        unknown: Tree = [None] * (len(StepMetrics._fields) - 1)
        # Metrics are scalars on every device, except `aux`, which may have rows.
        metrics = StepMetrics(*unknown, aux=devices.of_rows(self.row_axis))
        body = functools.partial(self.body, of_params)
        # The compiler would choose other shardings, for example for a moment whose
        # shape matches no parameter, and the next call would compile again. In an outer
        # `jit`, the caller's program decides where arrays are.
        is_pinned = layout.shardings is not None and layout.is_concrete
        return jax.jit(
            with_auto_axes(body, devices, (out, metrics)),
            # First, and in the order of the outputs: `jit` pairs donated buffers with
            # outputs of the same shape in order, and pairing a parameter with a moment
            # of its shape costs XLA a copy of both.
            donate_argnums=0 if self.step.donate else (),
            out_shardings=(out, None) if is_pinned else None,
        )


class Stage:
    """A stage of JAX, for a program that is called with a state, not with its parts."""

    def __init__(self, stage: Any, call: Callable[..., Any]):
        self._stage = stage
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Lowered(Stage):
    """A `jax.stages.Lowered`, whose compiled program is called as it was lowered."""

    def compile(self, *args: Any, **kwargs: Any) -> "Compiled":
        return Compiled(self._stage.compile(*args, **kwargs), self._call)


class Compiled(Stage):
    """A `jax.stages.Compiled`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._stage, *args, **kwargs)


UNKNOWN = object()  # in the place of a sharding, since `None` is not a leaf


def _or_none(x: Leaf) -> NamedSharding | None:
    return None if x is UNKNOWN else x
