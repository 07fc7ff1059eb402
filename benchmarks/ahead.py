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
from benchmarks.measure import say
from benchmarks.report import Rows
from benchmarks.ways import WAYS
from benchmarks.workloads import Window, Workload, as_window, stacked_layers

K = 8  # micro-batches in a window
# Layers, width, length and vocabulary. Gradients must not fit into the on-chip memory
# of a TPU, 128 MiB.
SIZES, QUICK_SIZES = (24, 2048, 512, 32_768), (32, 1024, 256, 16_384)
# What each way of ours is compared with.
BY_HAND = {
    "train step": "pair by hand",
    "window step": "scan by hand",
    "window_value_and_grad": "gradient by hand",
    "token_accumulation": "optax.MultiSteps",
}
FEW_WAYS = "scan by hand", "train step", "window step"
SWAP = "optax.MultiSteps", "token_accumulation"
OF_A_LOSS = [way for way in BY_HAND if way not in SWAP]
ALL_WAYS = ("gradients alone", *(BY_HAND[way] for way in OF_A_LOSS), *OF_A_LOSS)
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
# Programs that run once per micro-batch; the others run once per window.
EVERY_MICRO_BATCH = "gradient", "accumulate"


class Layout(NamedTuple):
    """How eight devices share the work; rows are spread over "data"."""

    mesh: tuple[int, int]  # the sizes of the axes "data" and "model"
    is_spread: bool  # whether parameters are spread over both axes


ONE = "one device"
LAYOUTS = {
    "data parallel": Layout((8, 1), False),
    "FSDP": Layout((8, 1), True),
    "FSDP, tensor parallel": Layout((4, 2), True),
}
COLUMNS, ROWS = ("data", "model"), ("model", "data")
SPECS = {"up": COLUMNS, "down": ROWS, "up_a": ("data", None), "up_b": (None, "model")}
SPECS |= {"embedding": ROWS, "head": COLUMNS}
# Values of `reduce_every`. With data parallelism, "micro_batch" is ZeRO-2.
MODES = NO_MESH, WINDOW, MICRO_BATCH = "no mesh", "window", "micro_batch"


class Case(NamedTuple):
    """What is compiled for each chip."""

    layout: str  # one device, or a key of `LAYOUTS`
    model: str  # a key of `models`
    layers: int
    ways: tuple[str, ...]  # keys of `WAYS`
    modes: tuple[str, ...] = MODES  # of steps over several devices
    optimizer: str = ""  # a key of `OPTIMIZERS`; empty for SGD


def run(quick: bool) -> Rows:
    """Returns a row for every model, layout and way, with columns for each chip.

    Layers compute in bfloat16, with activations computed again in the backward pass.
    Programs are compiled for shapes. The optimizer is SGD, which has no state, unless
    a row names another one. Chips are left out if the packages that compile for them
    are not installed.
    """
    for name, chip in CHIPS.items():
        if missing := chip.missing():
            say(f"ahead: {name} skipped: pip install {' '.join(missing)}")
    chips = {name: chip for name, chip in CHIPS.items() if not chip.missing()}
    rows: Rows = [
        {"chip": name, "compiled by": chip.version()} for name, chip in chips.items()
    ]
    sizes = QUICK_SIZES if quick else SIZES
    for case in cases(quick) if chips else ():
        found: dict[tuple[str, str], dict[str, Any]] = {}
        make = models(case.layers, *sizes[1:])[case.model]
        for name, chip in chips.items():
            say(f"ahead: {case.layout}, {case.model}, {name} {case.optimizer}")
            measured = measure(case, make, chip.devices(), 2 if quick else K)
            for key, columns in measured.items():
                named = {f"{name}{column}": x for column, x in columns.items()}
                found.setdefault(key, {}).update(named)
        for (way, mode), columns in found.items():
            row = {"layout": case.layout, "model": case.model, "way": way}
            row |= {"optimizer": case.optimizer} if case.optimizer else {}
            rows.append(row | ({} if case.layout == ONE else {"mesh": mode}) | columns)
    return rows


def cases(quick: bool) -> Iterator[Case]:
    """Every model on one device and in each layout, then every optimizer."""
    layers, *_ = QUICK_SIZES if quick else SIZES
    names = tuple(models(*SIZES))
    updated = "float32", "bfloat16", "unrolled", "unrolled, bfloat16"
    layouts, ways, optimizers = tuple(LAYOUTS), ALL_WAYS, tuple(OPTIMIZERS)
    if quick:
        names, updated = ("bfloat16", "along axis 1"), ("bfloat16",)
        layouts, ways, optimizers = layouts[2:], FEW_WAYS, optimizers[:1]
    for model in names:
        yield Case(ONE, model, layers, ways)
    for layout in layouts:
        yield Case(layout, "float32", layers, ways, (NO_MESH,) if quick else MODES)
    # All of what an update reads and writes must fit into the memory of one chip.
    for model in updated:
        for name in optimizers:
            yield Case(ONE, model, layers // 4, BOTH_PAIRS, optimizer=name)
    yield Case(ONE, "float32", layers // 4, SWAP, optimizer=optimizers[0])
    yield Case("FSDP", "bfloat16", layers, BOTH_PAIRS, (MICRO_BATCH,), optimizers[0])


def models(
    layers: int, width: int, length: int, vocabulary: int
) -> dict[str, partial[Workload]]:
    """The models by name; they take `rows` and `spread`."""
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


class Place:
    """Places shapes: on the first of the chips, or in a layout over eight of them."""

    def __init__(self, chips: np.ndarray, layout: Layout | None):
        self.layout, self._chip = layout, SingleDeviceSharding(chips[0])
        if layout:
            self.mesh = Mesh(chips.reshape(layout.mesh), ("data", "model"))

    def __call__(self, x: Any, spec: P) -> jax.ShapeDtypeStruct:
        where = NamedSharding(self.mesh, spec) if self.layout else self._chip
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def workload(self, make: partial[Workload], constrains: bool) -> Workload:
        """The workload with shapes in the place of its arrays.

        Without a constraint, XLA may gather activations instead of parameters.
        """
        rows = make.keywords.get("rows", 8 if self.layout else 1)
        make, made = partial(make, rows=rows), []
        if constrains:
            rows = NamedSharding(self.mesh, P("data"))
            spread = partial(jax.lax.with_sharding_constraint, shardings=rows)
            make = partial(make, spread=spread)

        def arrays() -> Any:
            made.append(make())
            return made[0].params, made[0].frozen

        def place(path: Any, x: Any) -> Any:
            spec = [None] * (x.ndim - 2)
            if self.layout and self.layout.is_spread:
                axis = make.keywords.get("axis", 0)  # along which layers are stacked
                spec = [*SPECS[path[0].key]]
                spec[axis:axis] = [None] * (x.ndim - 2)
            return self(x, P(*spec))

        params, frozen = (
            jax.tree_util.tree_map_with_path(place, shapes)
            for shapes in jax.eval_shape(arrays)
        )
        return made[0]._replace(params=params, frozen=frozen)

    def window(self, workload: Workload, k: int) -> Window:
        window = as_window([workload.micro_batch(np.random.default_rng(0))] * k)
        specs = P("data"), P(None, "data"), P("data")
        return Window(
            *(
                jax.tree.map(lambda x, spec=spec: self(x, spec), part)
                for part, spec in zip(window, specs, strict=True)
            )
        )

    def state(self, params: Any, init: Callable[[Any], Any]) -> Any:
        """The shapes of a state; no two parameters with one shape are spread unlike."""
        leaves = jax.tree.leaves(params)
        specs = {x.shape: getattr(x.sharding, "spec", P()) for x in leaves}
        return jax.tree.map(
            lambda x: self(x, specs.get(x.shape, P())), jax.eval_shape(init, params)
        )


def measure(
    case: Case, make: partial[Workload], chips: np.ndarray, k: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """The columns of every way and mode; only steps have several modes.

    They are peaks relative to those of the first way, and to those by hand, and the
    bytes that a device sends in a window.
    """
    layout, peaks, sent = LAYOUTS.get(case.layout), {}, {}
    place = Place(chips, layout)
    inner = OPTIMIZERS.get(case.optimizer, SGD)
    for way in case.ways:
        for mode in case.modes if layout and way in STEPS else (NO_MESH,):
            options = {}
            if layout and mode != NO_MESH:
                options = {"mesh": place.mesh, "data_axes": "data"}
                options["reduce_every"] = mode
            # With "window", the loss sees the rows of one device.
            workload = place.workload(make, bool(layout) and mode != WINDOW)
            loop = WAYS[way].build(workload, inner, k, **options)
            if way in STEPS:
                state = loop.init(workload.params)
            else:
                state = place.state(workload.params, loop.init)
            own, sent[way, mode] = {}, 0
            for name, program in loop.lower(state, place.window(workload, k)).items():
                compiled = program.lowered.compile()
                own[name] = program.peak(compiled)
                runs = k if name in EVERY_MICRO_BATCH else 1
                sent[way, mode] += runs * bytes_sent(compiled.as_text() or "")
            peaks[way, mode] = own
    first, columns = max(peaks[case.ways[0], NO_MESH].values()), {}
    for (way, mode), own in peaks.items():
        peak, like = max(own.values()), (BY_HAND.get(way, ""), NO_MESH)
        by_hand = max(peaks[like].values()) if like in peaks else None
        columns[way, mode] = {
            "": {name: x / first for name, x in own.items()},
            " MB": round(peak / 1e6),
            " / by hand": peak / by_hand if by_hand else None,
        }
        if layout:
            columns[way, mode] |= {
                " GB sent": sent[way, mode] / 1e9,
                " sent / by hand": sent[way, mode] / sent[like] if by_hand else None,
            }
    return columns
