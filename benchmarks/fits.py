"""Whether a decoder of 7 billion parameters fits on 16 chips, and what it sends.

    pip install libtpu && python -m benchmarks.fits

Prints the figures of layouts in docs/performance.md. Nothing runs. The memory is that
of programs for 16 chips of a TPU v5e. What is sent is that of programs for as many
devices of a CPU, because a program that does not fit on a TPU does not compile for it.

    python -m benchmarks.fits benchmarks/results/fits

writes the others: what a train step with SGD holds in an open micro-batch, on each chip
of `benchmarks.chips` whose packages are installed.
"""

import bisect
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import ahead, chips, report
from benchmarks.compiled_text import bytes_sent
from benchmarks.measure import interleaved, ratios, say
from benchmarks.ways import size_in_bytes
from benchmarks.workloads import stacked_layers, window_of
from optax_tokenaccum import make_train_step
from optax_tokenaccum.losses import softmax_cross_entropy_sum


class Model(NamedTuple):
    """Sizes of a decoder whose layers are stacked; `dtype` is of the computation."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    dtype: Any = jnp.bfloat16


class Batch(NamedTuple):
    """Sizes of a micro-batch, over all devices."""

    rows: int
    length: int


class Layout(NamedTuple):
    """Where the arrays of a step are."""

    mesh: tuple[int, int]  # the sizes of the axes "data" and "model"
    reduce_every: Literal["micro_batch", "window"]
    is_spread: bool  # whether parameters are spread over both axes
    constrains: bool  # whether the loss spreads activations over "data"


SEVEN_B, BATCH = Model(32, 4096, 11008, 32, 32000), Batch(16, 2048)
LAYOUTS = {
    "data parallel": Layout((16, 1), "window", False, False),
    "ZeRO-2": Layout((16, 1), "micro_batch", False, True),
    "FSDP": Layout((16, 1), "micro_batch", True, True),
    "FSDP, no constraint": Layout((16, 1), "micro_batch", True, False),
    "FSDP, tensor parallel": Layout((4, 4), "micro_batch", True, True),
}
DOES_NOT_FIT = {"temporaries": "does not compile", "in all": ""}
LOSSES = {"all logits": False, "chunks": True}
# On one chip: width and layers, 0.5 billion parameters without embedding and head; the
# bytes of a chip that a step may use; numbers of rows to try, of 1,024 tokens.
DECODER, WORDS = (1536, 24), (32_000, 128_000, 256_000)
LIMITS = {"H200": 80e9, "v5e": 15 * 2**30}
ROWS_TO_TRY = [n * 2**i for i in range(9) for n in (2, 3)]
# How every parameter is spread. The first axis of the layers' is that of the stack.
COLUMNS, ROWS = P(None, "data", "model"), P(None, "model", "data")
SPECS = {
    "embedding": P("model", "data"),
    "layers": dict.fromkeys(("query", "key", "value", "gate", "up"), COLUMNS)
    | dict.fromkeys(("out", "down"), ROWS),
    "head": P("data", "model"),
}


def params_of(model: Model, mesh: Mesh, is_spread: bool) -> Any:
    """The shapes of float32 parameters, with their shardings."""
    layers, width, hidden, _, vocabulary, _ = model
    square = dict.fromkeys(("query", "key", "value", "out"), (layers, width, width))
    shapes = {
        "embedding": (vocabulary, width),
        "layers": square
        | dict.fromkeys(("gate", "up"), (layers, width, hidden))
        | {"down": (layers, hidden, width)},
        "head": (width, vocabulary),
    }

    def shape_of(spec: P, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec if is_spread else P())
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    return jax.tree.map(shape_of, SPECS, shapes, is_leaf=lambda x: isinstance(x, P))


def loss_fn(model: Model, rows: Any, params: Any, batch: Any) -> Any:
    """The loss of next tokens; layers are computed again in the backward pass.

    Activations are constrained to the sharding `rows`, unless it is `None`.
    """

    def spread(x: jax.Array) -> jax.Array:
        return x if rows is None else jax.lax.with_sharding_constraint(x, rows)

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda w: w.astype(model.dtype), weights)
        y = _normalized(spread(x))
        query, key, value = (
            (y @ w[name]).reshape(*x.shape[:2], model.heads, -1)
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x += y.reshape(x.shape) @ w["out"]
        y = _normalized(x)
        x += (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return spread(x), None

    x = spread(params["embedding"].astype(model.dtype)[batch["tokens"]])
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = _normalized(x) @ params["head"].astype(model.dtype)
    return softmax_cross_entropy_sum(logits, batch["labels"], ignore_index=-1)


def _normalized(x: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)


class Programs(NamedTuple):
    """The state of a step, as shapes, and its two programs, not compiled."""

    state: Any
    accumulate: Any  # lowered
    close_window: Any  # lowered


def lowered(
    model: Model, batch: Batch, layout: Layout, devices: Sequence[Any]
) -> Programs:
    """The programs of a step with AdamW, for devices that need not be there."""
    mesh = Mesh(np.reshape(devices, layout.mesh), ("data", "model"))
    rows = NamedSharding(mesh, P("data"))
    step = make_train_step(
        functools.partial(loss_fn, model, rows if layout.constrains else None),
        optax.adamw(1e-4),
        4,
        mesh=mesh,
        data_axes="data",
        reduce_every=layout.reduce_every,
    )
    state = step.init(params_of(model, mesh, layout.is_spread))
    tokens = jax.ShapeDtypeStruct(batch, jnp.int32, sharding=rows)
    given = {"tokens": tokens, "labels": tokens}
    return Programs(
        state, step.accumulate.lower(state, given), step.close_window.lower(state)
    )


def held(programs: Programs) -> dict[str, str]:
    """What a device holds, in GB."""
    params, opt_state = programs.state
    parts = {
        "parameters": size_in_bytes(params),
        "moments": size_in_bytes(opt_state.inner_opt_state),
        "sums": size_in_bytes(opt_state.grad_sums),
    }
    try:
        analyses: list[Any] = [x.compile().memory_analysis() for x in programs[1:]]
        parts["temporaries"] = max(x.temp_size_in_bytes for x in analyses)
        parts["in all"] = sum(parts.values())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    columns = {name: f"{size / 1e9:.1f}" for name, size in parts.items()}
    return columns if "in all" in parts else columns | DOES_NOT_FIT


def sent(programs: Programs) -> list[int]:
    """The bytes that a device sends in a micro-batch, and at the close."""
    return [bytes_sent(x.compile().as_text() or "") for x in programs[1:]]


def held_by_a_chip(
    place: ahead.Place, rows: int, **options: Any
) -> tuple[float, float]:
    """The bytes of temporaries in an open micro-batch, and of all that a chip holds."""
    sizes = {"rows": rows, "length": 1024, "vocabulary": 128_000} | options
    make = functools.partial(
        stacked_layers, *DECODER, tied=False, dtype=jnp.bfloat16, **sizes
    )
    over: dict[str, Any] = {}
    if place.layout:
        over = {"mesh": place.mesh, "data_axes": "data", "reduce_every": "micro_batch"}
    workload = place.workload(make, bool(over))
    loss = functools.partial(workload.loss_fn, frozen={})
    step = make_train_step(loss, ahead.SGD, 4, **over)
    state = step.init(workload.params)
    batch = place.window(workload, 1).micro_batches[0]
    try:
        program = step.accumulate.lower(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf, math.inf
    memory: Any = program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    made += memory.argument_size_in_bytes + memory.generated_code_size_in_bytes
    return memory.temp_size_in_bytes, made + memory.temp_size_in_bytes


def what_to_try_first(chip: chips.Chip) -> report.Rows:
    """What a chip holds with each change, and those before it."""
    place = ahead.Place(chip.devices(), None)
    options: dict[str, Any] = {"remat": False, "scanned": False}
    changes = {
        "64 rows": {"rows": 64},
        "fewer rows: 16": {"rows": 16},
        "`jax.checkpoint`": {"remat": True},
        "layers in a scan": {"scanned": True},
        "`linear_cross_entropy_sum`": {"chunked": True},
        "FSDP on 8 chips": {"rows": 8 * 16},
    }
    rows: report.Rows = []
    for change, new in changes.items():
        say(f"fits: {change}")
        options |= new
        if "FSDP" in change:
            place = ahead.Place(chip.devices(), ahead.LAYOUTS["FSDP"])
        _, held = held_by_a_chip(place, **options)
        rows.append({"change": change, "GB on a chip": round(held / 1e9, 1)})
    return rows


def large_vocabularies(name: str, chip: chips.Chip) -> report.Rows:
    """Temporaries of 4 rows, and the most rows that fit, by either loss."""
    place, rows = ahead.Place(chip.devices(), None), []
    for words in WORDS:
        memory, most = ({"words": words, "of": f"{name}, {x}"} for x in ("MB", "rows"))
        for loss, chunked in LOSSES.items():
            say(f"fits: {name}, {words} words, {loss}")
            options = {"vocabulary": words, "chunked": chunked}
            held = functools.cache(functools.partial(held_by_a_chip, place, **options))
            found = held(4)[0] / 1e6
            memory[loss] = round(found) if found < math.inf else "does not fit"
            fit = bisect.bisect(ROWS_TO_TRY, LIMITS[name], key=lambda n: held(n)[1])
            most[loss] = ROWS_TO_TRY[fit - 1] if fit else 0
        rows += [memory, most]
    return rows


def time_of_logits() -> report.Rows:
    """The time of a loss with its gradient on this CPU, without layers."""
    runs = {}
    for name, chunked in LOSSES.items():
        loss = stacked_layers(512, 0, 8, 160, WORDS[0], tied=False, chunked=chunked)
        gradient = jax.jit(jax.value_and_grad(loss.loss_fn, has_aux=True))
        batch = window_of(loss, 1).micro_batches[0]
        runs[name] = functools.partial(gradient, loss.params, batch, {})
    found = ratios(interleaved(runs, rounds=5), "all logits")["chunks"]
    return [{"words": WORDS[0], "chunks / all logits": found}]


def on_one_chip(folder: Path) -> None:
    """Writes a suite of results for each chip that programs can be compiled for."""
    found = {"time of the logits": time_of_logits()}
    for name, chip in chips.CHIPS.items():
        if missing := chip.missing():
            say(f"fits: {name} skipped: pip install {' '.join(missing)}")
            continue
        compiled: report.Rows = [{"chip": name, "compiled by": chip.version()}]
        if name == "H200":
            found["what to try first"] = compiled + what_to_try_first(chip)
        found["large vocabularies"] = [
            *found.get("large vocabularies", []),
            *compiled,
            *large_vocabularies(name, chip),
        ]
    print(report.write(found, folder))


def main() -> None:
    """Prints a table, or all of those on one chip."""
    chips.prepare()
    if sys.argv[1:]:
        return on_one_chip(Path(sys.argv[1]))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    devices = jax.devices()
    of = functools.partial(topologies.get_topology_desc, platform="tpu")
    rows = []
    for name, layout in LAYOUTS.items():
        row = held(lowered(SEVEN_B, BATCH, layout, of("v5e:4x4").devices))
        micro_batch, close = sent(lowered(SEVEN_B, BATCH, layout, devices))
        row |= {
            "sent in a micro-batch": f"{micro_batch / 1e9:.1f}",
            "sent at the close": f"{close / 1e9:.1f}",
        }
        rows.append({"layout, GB on each of 16 chips": name} | row)
    print(report.table(rows))


if __name__ == "__main__":
    main()
