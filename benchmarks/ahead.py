"""Memory and communication of programs for TPUs and GPUs, compiled without either."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.chips import CHIPS
from benchmarks.compiled_text import bytes_sent
from benchmarks.settings import Settings
from benchmarks.ways import WAYS
from benchmarks.workloads import Window, Workload, stacked_layers

# What each way of ours is compared with.
BY_HAND = {
    "train step": "pair by hand",
    "window step": "scan by hand",
    "window_value_and_grad": "gradient by hand",
    "coupled_value_and_grad": "gradient by hand",
}
ALL_WAYS = (
    "gradients alone",
    "pair by hand",
    "scan by hand",
    "gradient by hand",
    *BY_HAND,
)
FEW_WAYS = "scan by hand", "train step", "window step", "coupled_value_and_grad"
FEW_MODELS = "bfloat16", "along axis 1", "many words"
FEW_LAYOUTS = "data parallel", "FSDP, tensor parallel"
STEPS = "train step", "window step"
BOTH_PAIRS = "pair by hand", "scan by hand", *STEPS
SGD = optax.sgd(1e-4)
# Updates that hold more than plain SGD does, each for a reason of its own.
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "clipped AdamW": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
    "LAMB": optax.lamb(1e-4),
    "apply_if_finite(AdamW)": optax.apply_if_finite(optax.adamw(1e-4), 3),
    "Muon": optax.contrib.muon(1e-4),
}
UPDATED = "float32", "bfloat16", "unrolled", "unrolled, bfloat16"
# Programs that run once per micro-batch; the others run once per window.
EVERY_MICRO_BATCH = "gradient", "accumulate"


class Layout(NamedTuple):
    """How eight devices share the work; rows are always spread over "data"."""

    mesh: tuple[int, ...]  # the sizes of the axes "data" and "model"
    fsdp: str | None = None  # the axis over which parameters are spread
    tensor: str | None = None  # the axis of the inner width of the layers

    def spec(self, name: str, ndim: int, axis: int) -> P:
        """How a parameter is spread whose layers are stacked along this axis."""
        spec = {
            "up": (self.fsdp, self.tensor),
            "down": (self.tensor, self.fsdp),
            "up_a": (self.fsdp, None),
            "up_b": (None, self.tensor),
            "embedding": (self.tensor, self.fsdp),
            "head": (self.fsdp, self.tensor),
        }[name]
        return P(*spec) if ndim == 2 else P(*spec[:axis], None, *spec[axis:])


ONE = "one device"
LAYOUTS = {
    "data parallel": Layout((8,)),
    "FSDP": Layout((8,), fsdp="data"),
    "FSDP, tensor parallel": Layout((4, 2), fsdp="data", tensor="model"),
    "data, tensor parallel": Layout((4, 2), tensor="model"),
}
# Values of `reduce_every`. With data parallelism, "micro_batch" is ZeRO-2.
MODES = NO_MESH, WINDOW, MICRO_BATCH = "no mesh", "window", "micro_batch"


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every model, layout and way, with columns for each chip.

    Layers compute in bfloat16, with activations computed again in the backward pass.
    Programs are compiled for shapes. The optimizer is SGD, which has no state, unless
    a row names another one. Chips are left out if the packages that compile for them
    are not installed.
    """
    for name, chip in CHIPS.items():
        if missing := chip.missing():
            settings.say(f"ahead: {name} skipped: pip install {' '.join(missing)}")
    chips = {name: chip for name, chip in CHIPS.items() if not chip.missing()}
    rows: list[dict[str, Any]] = [
        {"chip": name, "compiled by": chip.version()} for name, chip in chips.items()
    ]
    for what in cases(settings) if chips else ():
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for chip, kind in chips.items():
            settings.say(f"ahead: {what.layout}, {what.model}, {chip} {what.optimizer}")
            make = models(settings, what.layers)[what.model]
            inner = OPTIMIZERS.get(what.optimizer, SGD)
            case = Case(make, what.layout, kind.devices(), settings.k, inner)
            for way, columns in case.measure(what.ways, what.modes).items():
                named = {f"{chip}{column}": x for column, x in columns.items()}
                found.setdefault(way, {}).update(named)
        for (way, mode), columns in found.items():
            row = {"layout": what.layout, "model": what.model, "way": way}
            row |= {"optimizer": what.optimizer} if what.optimizer else {}
            rows.append(row | ({} if what.layout == ONE else {"mesh": mode}) | columns)
    return rows


class What(NamedTuple):
    """What is compiled for each chip."""

    layout: str  # one device, or a key of `LAYOUTS`
    model: str  # a key of `models`
    ways: tuple[str, ...]  # keys of `WAYS`
    modes: tuple[str, ...]  # of steps over several devices
    layers: int  # of the model
    optimizer: str = ""  # a key of `OPTIMIZERS`; empty for SGD


def cases(settings: Settings) -> Iterator[What]:
    """Every layout and model with SGD, then every optimizer on one device and FSDP."""
    layers, *_ = settings.ahead_sizes
    names, layouts, ways, modes = FEW_MODELS, FEW_LAYOUTS, FEW_WAYS, (NO_MESH,)
    optimizers, updated = ("clipped AdamW",), ("bfloat16",)
    if settings.ahead_all:
        names = tuple(models(settings, layers))
        layouts, ways, modes = LAYOUTS, ALL_WAYS, MODES
        optimizers, updated = OPTIMIZERS, UPDATED
    for layout in (ONE, *layouts):
        for model in names if layout in (ONE, "FSDP") else ("float32",):
            own = modes if model == "float32" else (MICRO_BATCH,)
            yield What(layout, model, ways, own, layers)
    # Of unrolled layers, XLA reduces gradients once, after the loop that adds them up.
    yield What("data parallel", "unrolled", ways, modes, layers)
    # All of what an update reads and writes must fit into the memory of one chip.
    for layout, depth in ((ONE, layers // 4), ("FSDP", layers)):
        for model in updated if layout == ONE else updated[:2]:
            for name in optimizers:
                yield What(layout, model, BOTH_PAIRS, (MICRO_BATCH,), depth, name)


def models(settings: Settings, layers: int) -> dict[str, partial[Workload]]:
    """The models by name; they take `rows` and `spread`."""
    _, width, length, vocabulary = settings.ahead_sizes
    half = partial(stacked_layers, dtype=jnp.bfloat16)
    large = partial(half, width, layers, length=length)
    return {
        "float32": large,
        "bfloat16": partial(large, stored=jnp.bfloat16),
        "tied embedding": partial(large, vocabulary=vocabulary),
        "along axis 1": partial(large, axis=1),
        "unrolled": partial(large, scanned=False),
        "unrolled, bfloat16": partial(large, scanned=False, stored=jnp.bfloat16),
        "LoRA": partial(large, rank=16),
        "many words": partial(
            half, 512, 8, length=4 * length, vocabulary=32_000, tied=False
        ),
    }


class Measured(NamedTuple):
    """What the programs of a way need; see `benchmarks.programs` for peaks."""

    peaks: dict[str, int]  # of every program, in bytes on each device
    peak: int  # of the largest
    sent: int  # the bytes that a device sends in a window


class Case:
    """A model on chips of one kind, in one layout."""

    def __init__(
        self,
        make: partial[Workload],
        layout: str,
        chips: np.ndarray,
        k: int,
        inner: optax.GradientTransformation = SGD,
    ):
        self._make, self._k, self._inner = make, k, inner
        self._layout, self._chip = LAYOUTS.get(layout), chips[0]
        if self._layout:
            names = ("data", "model")[: len(self._layout.mesh)]
            self._mesh = Mesh(chips.reshape(self._layout.mesh), names)

    def measure(
        self, ways: tuple[str, ...], modes: tuple[str, ...]
    ) -> dict[tuple[str, str], dict[str, Any]]:
        """The columns of every way and mode; only steps have several modes.

        Peaks are relative to those of the first way.
        """
        on_mesh = modes if self._layout else (NO_MESH,)
        measured = {
            (way, mode): self._measured(way, mode)
            for way in ways
            for mode in (on_mesh if way in STEPS else (NO_MESH,))
        }
        first, columns = measured[ways[0], NO_MESH].peak, {}
        for (way, mode), own in measured.items():
            by_hand = measured.get((BY_HAND.get(way, ""), NO_MESH))
            columns[way, mode] = {
                "": {name: peak / first for name, peak in own.peaks.items()},
                " MB": round(own.peak / 1e6),
                " / by hand": own.peak / by_hand.peak if by_hand else None,
            }
            if self._layout:
                sent = own.sent / by_hand.sent if by_hand else None
                of_window = {" GB sent": own.sent / 1e9, " sent / by hand": sent}
                columns[way, mode] |= of_window
        return columns

    def _measured(self, way: str, mode: str = NO_MESH) -> Measured:
        options = {}
        if mode != NO_MESH:
            options = {"mesh": self._mesh, "data_axes": "data", "reduce_every": mode}
        # With "window", the loss sees the rows of one device.
        workload = self._placed(bool(self._layout) and mode != WINDOW)
        loop = WAYS[way].build(workload, self._inner, self._k, **options)
        if way in STEPS:
            state = loop.init(workload.params)
        else:
            state = self._placed_like(workload.params, loop.init)
        programs = loop.lower(state, self._window(workload))
        peaks, sent = {}, 0
        for name, program in programs.items():
            compiled = program.lowered.compile()
            peaks[name] = program.peak(compiled)
            runs = self._k if name in EVERY_MICRO_BATCH else 1
            sent += runs * bytes_sent(compiled.as_text() or "")
        return Measured(peaks, max(peaks.values()), sent)

    def _placed_like(self, params: Any, init: Callable[[Any], Any]) -> Any:
        """The shapes of a state; no two parameters with one shape are spread unlike."""
        leaves = jax.tree.leaves(params)
        specs = {x.shape: getattr(x.sharding, "spec", P()) for x in leaves}

        def place(x: Any) -> Any:
            return self._place(x, specs.get(x.shape, P()))

        return jax.tree.map(place, jax.eval_shape(init, params))

    def _placed(self, constrains: bool) -> Workload:
        """The workload with shapes in the place of its arrays."""
        make, made = partial(self._make, rows=8 if self._layout else 1), []
        if constrains:
            make = partial(make, spread=self._spread)

        def arrays() -> Any:
            made.append(make())
            return made[0].params, made[0].frozen

        axis = self._make.keywords.get("axis", 0)
        layout = self._layout or Layout(())

        def place(path: Any, x: Any) -> Any:
            return self._place(x, layout.spec(path[0].key, x.ndim, axis))

        params, frozen = (
            jax.tree_util.tree_map_with_path(place, shapes)
            for shapes in jax.eval_shape(arrays)
        )
        return made[0]._replace(params=params, frozen=frozen)

    def _window(self, workload: Workload) -> Window:
        one, k = workload.micro_batch(np.random.default_rng(0)), self._k

        def window_of(spec: P, shape: Callable[[np.ndarray], tuple[int, ...]]) -> Any:
            return jax.tree.map(
                lambda x: self._place(jax.ShapeDtypeStruct(shape(x), x.dtype), spec),
                one,
            )

        rows = P("data")
        return Window(
            [window_of(rows, lambda x: x.shape)] * k,
            window_of(P(None, "data"), lambda x: (k, *x.shape)),
            window_of(rows, lambda x: (k * len(x), *x.shape[1:])),
        )

    def _place(self, x: Any, spec: P) -> jax.ShapeDtypeStruct:
        where = SingleDeviceSharding(self._chip)
        if self._layout:
            where = NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def _spread(self, x: jax.Array) -> jax.Array:
        """Without it, XLA may gather activations instead of parameters."""
        where = NamedSharding(self._mesh, P("data"))
        return jax.lax.with_sharding_constraint(x, where)
