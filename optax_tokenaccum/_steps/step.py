"""What the steps share: programs that leave arrays in place, and the update."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef

from optax_tokenaccum._core.backward import zero_if
from optax_tokenaccum._core.checks import check_params
from optax_tokenaccum._core.state import (
    ArrayMemo,
    StepMetrics,
    StepState,
    TokenAccumulationState,
    canonicalize_state,
    copy_aliased,
    copy_for_donation,
    require_step_state,
    scalar_sharding,
    tag,
)
from optax_tokenaccum._core.trees import (
    Gradients,
    Leaf,
    ModelState,
    OptState,
    Params,
    TracedBool,
    Tree,
    is_concrete,
    sharding_of,
    zeros_after,
)
from optax_tokenaccum._devices.mesh import (
    Shardings,
    put,
    warn_of_whole_sums,
    with_auto_axes,
)
from optax_tokenaccum._steps.micro_batch import Setup

StepT = TypeVar("StepT", bound="Step")
ParamsT = TypeVar("ParamsT")  # the tree of parameters


@dataclasses.dataclass(eq=False)
class Layout:
    """The structure of a step's states and the shardings of their leaves.

    `shardings` is `None` if no leaf is on a mesh; `model` is the structure of the model
    state. `jitted` has the functions of the step's programs for such states; `is_ready`
    tells whether the program that closes the window is compiled.
    """

    step: "Step"
    structure: PyTreeDef
    shardings: tuple[NamedSharding | None, ...] | None
    is_concrete: bool
    model: PyTreeDef
    jitted: dict["Program", jax.stages.Wrapped] = dataclasses.field(
        default_factory=dict
    )
    is_ready: bool = False


class HostInfo(NamedTuple):
    """What the host knows of a state that a step returned."""

    layout: Layout
    count: int | None = None  # the value of `mini_step`, so that no call waits for it


# Of all steps, because steps may take turns on one state.
MEMO: ArrayMemo[HostInfo] = ArrayMemo()


class Program(abc.ABC, Generic[StepT]):
    """A jitted function: `program(state, ...) -> (state, StepMetrics)`.

    A state over several devices stays where it is: the program's outputs get the
    shardings of the state. Otherwise the compiler would choose them, for example for a
    moment whose shape matches no parameter, and the next call would compile again.

    Donated arguments come first, in the order in which they are returned: `jit` pairs
    donated buffers with outputs of the same shape in order, and pairing a parameter
    with a moment of its shape costs XLA a copy of both.
    """

    row_axis = 0  # along which the `aux` of devices are stacked

    def __init__(self, step: StepT):
        self.step = step

    @abc.abstractmethod
    def arguments(self, *args: Tree, **kwargs: Tree) -> tuple[Tree, ...]:
        """Checks what a call is given besides the state, and returns what is traced."""

    @abc.abstractmethod
    def body(self, *args: Tree, **kwargs: Tree) -> tuple[Tree, StepMetrics]:
        """The function to jit: `body(donated, kept, *traced, shardings=...)`.

        It returns new values of what is donated, and metrics. The shardings are those
        of the parameters.
        """

    def partition(
        self, state: StepState
    ) -> tuple[Tree, Tree, Callable[[Tree], StepState]]:
        """Returns `(donated, kept, combine)`: the parts of a state that are needed.

        `combine(donated)` is the state with new values of what was donated.
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
        self.step._require(state)
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
        MEMO.remember(tag(new), known)
        return new, metrics, known

    def lower(self, state: StepState, *args: Tree, **kwargs: Tree) -> "Lowered":
        self.step._require(state)
        traced = self.arguments(*args, **kwargs)
        lowered = self._lower(state, self.step.layout_of(state), traced)
        return Lowered(lowered, self._call)

    def make_ready(self, state: StepState, layout: Layout) -> None:
        """Compiles a program without other arguments, unless it is compiled."""
        if layout.is_concrete:
            self._lower(state, layout, ()).compile()

    def _lower(
        self, state: StepState, layout: Layout, traced: tuple[Tree, ...]
    ) -> jax.stages.Lowered:
        donated, kept, _ = self.partition(state)
        return self._at(layout).lower(donated, kept, *traced)

    def _at(self, layout: Layout) -> jax.stages.Wrapped:
        """The jitted function for states with this layout."""
        if self not in layout.jitted:
            layout.jitted.setdefault(self, self._make(layout))
        return layout.jitted[self]

    def _make(self, layout: Layout) -> jax.stages.Wrapped:
        devices, of_params, out = self.step.setup.devices, None, None
        # `shardings` are those of the whole state, leaf by leaf. Put in the places of
        # its leaves, they can be split as a state is: into those of the parameters,
        # which the body constrains gradients to, and those of what is donated, which
        # must come back where it was.
        if layout.shardings is not None:
            leaves = [x or UNKNOWN for x in layout.shardings]
            known: StepState = layout.structure.unflatten(leaves)
            of_params = tuple(map(_or_none, jax.tree.leaves(known.params)))
            out = jax.tree.map(_or_none, self.partition(known)[0])
        unknown: Tree = [None] * (len(StepMetrics._fields) - 1)
        # Metrics are scalars on every device, except `aux`, which may have rows.
        metrics = StepMetrics(*unknown, aux=devices.of_rows(self.row_axis))
        body = functools.partial(self.body, shardings=of_params)
        # In an outer `jit`, the caller's program decides where arrays are.
        is_pinned = layout.shardings is not None and layout.is_concrete
        return jax.jit(
            with_auto_axes(body, devices, (out, metrics)),
            donate_argnums=0 if self.step.donate else (),
            out_shardings=(out, None) if is_pinned else None,
        )


class Lowered:
    """A `jax.stages.Lowered`, whose compiled program is called as it was lowered."""

    def __init__(self, lowered: Any, call: Callable[..., Any]):
        self._lowered = lowered
        self._call = call

    def compile(self, *args: Any, **kwargs: Any) -> "Compiled":
        return Compiled(self._lowered.compile(*args, **kwargs), self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)


class Compiled:
    """A `jax.stages.Compiled`, which is called with a state instead of its parts."""

    def __init__(self, compiled: Any, call: Callable[..., Any]):
        self._compiled = compiled
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._compiled, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


UNKNOWN = object()  # in the place of a sharding, since `None` is not a leaf


def _or_none(x: Leaf) -> NamedSharding | None:
    return None if x is UNKNOWN else x


@dataclasses.dataclass(eq=False, repr=False)
class Step(abc.ABC):
    """A step for a loss of parameters, for one micro-batch or for a whole window."""

    setup: Setup
    donate: bool
    _warned = False
    opt_state_type: ClassVar[type]  # of its states
    _layouts: dict[Hashable, Layout] = dataclasses.field(
        init=False, default_factory=dict
    )

    @abc.abstractmethod
    def __post_init__(self) -> None:
        """Makes the programs."""

    def __getstate__(self) -> dict[str, Tree]:
        return self.__dict__ | {"_layouts": {}}

    def init(
        self, params: ParamsT, model_state: ModelState = None
    ) -> StepState[ParamsT]:
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
          A `StepState`.

        Raises:
          TypeError: a leaf is not an array; or `params` is an NNX model, and a variable
            is not an `nnx.Param` or is in two places; or there is a `model_state`
            without `has_model_state=True`, or the reverse.
          ValueError: an array is on a mesh other than the step's.
        """
        has_model_state = self.setup.loss.has_model_state
        if has_model_state != (model_state is not None):
            given = ", model_state" * has_model_state
            raise TypeError(f"has_model_state={has_model_state}: init(params{given}).")
        check_params(params)
        leaves = jax.tree.leaves((params, model_state))
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        own = shapes_of if is_abstract else copy_for_donation
        params = self.setup.devices.place(own(params))
        init = self._of_shapes if is_abstract else self._init
        if not self._warned:
            self._warned = warn_of_whole_sums(self.setup.devices, params)
        # Its own, because an optimizer may return an array that it keeps.
        opt_state = own(self.setup.devices.init(init, params))
        if model_state is not None:
            model_state = self.setup.devices.place(
                canonicalize_state(params, own(model_state))
            )
        state = StepState(params, opt_state, model_state)
        MEMO.remember(tag(state), HostInfo(self.layout_of(state), count=0))
        return state

    @abc.abstractmethod
    def _init(self, params: Params) -> OptState:
        """The `opt_state` of new parameters."""

    def _of_shapes(self, params: Params) -> OptState:
        """On a mesh, `init` is traced on an Explicit one, whose types tell where."""
        place = scalar_sharding(params)
        if not isinstance(place, NamedSharding):
            made = jax.eval_shape(self._init, params)
            return jax.tree.map(lambda x: put(x, x.sharding or place), made)
        mesh = place.mesh
        explicit = (AxisType.Explicit,) * len(mesh.axis_names)
        typed = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=explicit)

        def on(
            mesh: Mesh | AbstractMesh, x: jax.ShapeDtypeStruct
        ) -> jax.ShapeDtypeStruct:
            return put(x, NamedSharding(mesh, x.sharding.spec if x.sharding else P()))

        like = jax.tree.map(functools.partial(on, typed), params)
        with jax.sharding.use_abstract_mesh(typed):
            made = jax.eval_shape(self._init, like)
        return jax.tree.map(functools.partial(on, mesh), made)

    def _require(self, state: StepState) -> None:
        """Raises if this step cannot take the state."""
        has_model_state = self.setup.loss.has_model_state
        require_step_state(state, self.opt_state_type, has_model_state=has_model_state)

    def lookup(self, state: StepState) -> HostInfo:
        """What is known of the state of a call, also if another step returned it."""
        known = MEMO.get(tag(state))
        if known is None:
            return HostInfo(self.layout_of(state))
        # The static part of a model, such as `train()`, may have changed.
        model = jax.tree.structure(state.model_state)
        if known.layout.step is not self or known.layout.model != model:
            return known._replace(layout=self.layout_of(state))
        return known

    def layout_of(self, state: StepState) -> Layout:
        leaves, structure = jax.tree.flatten(state)
        found = tuple(map(sharding_of, leaves))
        shardings = found if any(x is not None for x in found) else None
        key = structure, shardings, all(map(is_concrete, leaves))
        model = jax.tree.structure(state.model_state)
        return self._layouts.setdefault(key, Layout(self, *key, model))

    def _check_sums(self, sums: Gradients, params: Params) -> None:
        """Raises `ValueError` if the sums belong to a different number of devices."""
        leaves = jax.tree.leaves(params)
        for acc, p in zip(jax.tree.leaves(sums), leaves, strict=False):
            expected = (*self.setup.devices.device_axis, *p.shape)
            if acc.shape != expected and p.shape in (acc.shape, acc.shape[1:]):
                raise ValueError(
                    "The sums must be laid out for this step's devices: expected shape "
                    f"{expected} in grad_sums, got {acc.shape}. Write "
                    "reshard_state(state, step.init(params))."
                )

    def _metrics(self, opt_state: TokenAccumulationState) -> StepMetrics:
        """The metrics of an open window."""
        loss, num_tokens = self.setup.accumulation.window_so_far(opt_state)
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
        params: Params,
        opt_state: TokenAccumulationState,
        closes: TracedBool,
        shardings: Shardings,
    ) -> tuple[Params, TokenAccumulationState, StepMetrics]:
        """If the window `closes`, applies its update to the parameters."""
        accumulation, devices = self.setup.accumulation, self.setup.devices
        metrics = self._metrics(opt_state)

        def update(
            state: TokenAccumulationState, held: tuple[Params, jax.Array]
        ) -> tuple[Gradients, tuple[Params, jax.Array], OptState]:
            sums = devices.reduce_over_devices(state.grad_sums, shardings)
            whole, params = state._replace(grad_sums=sums), held[0]
            gradient, norm = accumulation.gradient_and_norm(whole, params)
            extra = {"value": metrics.loss, "num_tokens": metrics.num_tokens}
            updates, inner_state = accumulation.inner.update(
                gradient, state.inner_opt_state, params, **extra
            )
            params = jax.tree.map(_applied, params, updates)
            params = devices.constrain(params, shardings, like_sums=True)
            made = (params, norm), inner_state
            # Until the update has ended, their memory is free for what it computes.
            return zeros_after(state.grad_sums, made), *made

        params = devices.constrain(params, shardings, like_sums=True)
        try:
            closed, (params, grad_norm) = accumulation.close(
                opt_state, closes, update, (params, metrics.grad_norm)
            )
        except TypeError as error:
            error.add_note(
                "A step gives its optimizer gradients, parameters, value, num_tokens. "
                "If it needs more, such as value_fn, use token_accumulation in a loop."
            )
            raise
        is_empty = closes & jnp.logical_not(closed.has_updated)
        closed = closed._replace(grad_sums=zero_if(is_empty, closed.grad_sums))
        # Gathered after the loop: 554 instead of 705 MB, and half the bytes.
        params = devices.constrain(params, shardings)
        metrics = metrics._replace(
            grad_norm=grad_norm,
            updated=closed.has_updated,
            mini_step=closed.mini_step,
            gradient_step=closed.gradient_step,
        )
        return params, closed, metrics


def _applied(param: jax.Array, update: jax.Array) -> Leaf:
    """The parameter plus its update, which weight decay gives an integer too."""
    is_trained = jnp.issubdtype(param.dtype, jnp.inexact)
    return optax.apply_updates(param, update) if is_trained else param


def shapes_of(tree: Tree) -> Tree:
    """Shapes in the place of arrays, with a sharding where one was chosen."""

    def shape_of(x: Leaf) -> jax.ShapeDtypeStruct:
        is_placed = getattr(x, "committed", hasattr(x, "sharding"))
        sharding = x.sharding if is_placed else None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(shape_of, tree)
