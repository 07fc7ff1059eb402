"""The steps for NNX models behind the interface of the core's steps."""

import contextlib
from typing import Any, NamedTuple

import jax
from flax import nnx

import optax_tokenaccum.nnx
from benchmarks.nnx_loop import Holder
from optax_tokenaccum import token_accumulation

WAYS = ["nnx two programs", "nnx one program", "nnx window"]
OF_THE_STEP = "has_aux", "mesh", "data_axes", "reduce_every", "donate"


class State(NamedTuple):
    """A model and its optimizer, which read like the state of a step."""

    model: Holder
    optimizer: nnx.Optimizer

    @property
    def params(self) -> Any:
        return self.model.params()

    @property
    def opt_state(self) -> Any:
        def is_read(x: Any) -> bool:
            return isinstance(x, nnx.Variable | Holder | nnx.State)

        def read(x: Any) -> Any:
            if not is_read(x):
                return x
            own = None if isinstance(x, nnx.Variable) else self.model.structure
            leaves = jax.tree.leaves(x)
            return leaves[0] if own is None else own.unflatten(leaves)

        return jax.tree.map(read, self.optimizer.opt_state, is_leaf=is_read)


class Part:
    """`part(state, batch)` and `part.lower(state, batch)`."""

    def __init__(self, part: Any):
        self._part = part

    def __call__(self, state: State, *batch: Any, **kwargs: Any) -> Any:
        return state, self._part(*state, *batch, **kwargs)

    def lower(self, state: State, *batch: Any, **kwargs: Any) -> Any:
        return Lowered(self._part.lower(*state, *batch, **kwargs))


class Lowered:
    """Of a state: what it compiles, or anything else of what was lowered."""

    def __init__(self, lowered: Any):
        self._lowered = lowered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)

    def compile(self) -> Any:
        return Compiled(self._lowered.compile())


class Compiled(Lowered):
    def __call__(self, state: State, *batch: Any, **kwargs: Any) -> Any:
        return state, self._lowered(*state, *batch, **kwargs)


class Step(Part):
    """What the core's steps have, for a step for NNX models."""

    def __init__(self, step: Any, tx: Any):
        super().__init__(step)
        self._tx = tx
        self.accumulate = Part(getattr(step, "accumulate", None))
        self.close_window = Part(getattr(step, "close_window", None))

    def init(self, params: Any) -> State:
        model = Holder(params)
        # Older jax needs the mesh where types bind arrays to it, in nnx.Optimizer too.
        mesh: Any = getattr(model.leaves[0].get_raw_value().sharding, "mesh", None)
        binds = mesh and jax.sharding.AxisType.Explicit in mesh.axis_types
        with jax.set_mesh(mesh) if binds else contextlib.nullcontext():
            optimizer = nnx.Optimizer(model, self._tx, wrt=nnx.Param)
        self._part.init(model, optimizer)
        return State(model, optimizer)

    def lay_out(self, state: State) -> None:
        self._part.init(*state)


def make_step(way: str, loss_fn: Any, inner: Any, k: int, **options: Any) -> Step:
    def loss_of_model(model: Holder, batch: Any, **kwargs: Any) -> Any:
        return loss_fn(model.params(), batch, **kwargs)

    if way == "nnx window":
        step = optax_tokenaccum.nnx.make_window_step(loss_of_model, **options)
        return Step(step, inner)
    own = {name: options.pop(name) for name in OF_THE_STEP if name in options}
    schedule = k if way == "nnx two programs" else lambda _: k
    step = optax_tokenaccum.nnx.make_train_step(loss_of_model, **own)
    return Step(step, token_accumulation(inner, schedule, **options))
