"""The formulas of `examples/scaling.py` against compiled programs, and their page."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scaling
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import collectives, make_train_step

PAGE = Path(__file__).parents[2] / "docs/scaling.md"
SCALARS = 64  # bytes: losses, counts and norms
SHAPES = {"in": (16, 64), "out": (64, 16)}
PARAMETERS = sum(rows * columns for rows, columns in SHAPES.values())
CASE = scaling.Case(4, {"data": 8, "replicas": 2, "shards": 4}, PARAMETERS, 4, 4)
ADAM = optax.adamw(1e-3)

WHOLE = {"in": P(), "out": P()}
SPREAD = {"in": P(None, "data"), "out": P("data")}
IN_SHARDS = {"in": P(None, "shards"), "out": P("shards")}
ON_DATA = {"data_axes": "data"}
EACH_TIME = ON_DATA | {"reduce_every": "micro_batch"}


class Program(NamedTuple):
    """How a way is written: mesh axes, parameter specs, options of the step."""

    axes: tuple[str, ...]
    specs: dict[str, P]
    told: dict[str, str]
    has_whole_moments: bool = False


PROGRAMS = {
    "data parallel": Program(("data",), WHOLE, {}),
    "data parallel, deferred": Program(("data",), WHOLE, ON_DATA),
    "ZeRO-2": Program(("data",), WHOLE, EACH_TIME),
    "ZeRO-2, whole moments": Program(("data",), WHOLE, EACH_TIME, True),
    "FSDP": Program(("data",), SPREAD, EACH_TIME),
    "FSDP, deferred": Program(("data",), SPREAD, ON_DATA),
    "HSDP": Program(("replicas", "shards"), IN_SHARDS, {}),
    "HSDP, deferred over replicas": Program(
        ("replicas", "shards"), IN_SHARDS, {"data_axes": "replicas"}
    ),
}
# There, one all-reduce covers both axes; its bytes equal those over shards here.
OTHERWISE_COMPILED = {"HSDP"} if jax.__version_info__ < (0, 10) else set()


def loss_fn(params: Any, batch: Any) -> Any:
    predicted = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return jnp.sum((predicted - batch["y"]) ** 2), batch["y"].size


def with_whole_moments(state: Any) -> Any:
    """Replicate the moments, as in a checkpoint of a run that did not shard them."""
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    inner = optax.tree_map_params(
        ADAM, jax.device_put, state.opt_state.inner_opt_state, shardings
    )
    return state._replace(opt_state=state.opt_state._replace(inner_opt_state=inner))


def compile_way(way: str, dtype: Any = jnp.float32) -> Any:
    """Return the traffic of a window's programs, and the bytes of a device's sums."""
    axes, specs, told, has_whole_moments = PROGRAMS[way]
    sizes = tuple(CASE.axes[axis] for axis in axes)
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    options: Any = {"mesh": mesh, **told} if told else {}
    step = make_train_step(loss_fn, ADAM, CASE.k, **options)
    params = {
        name: jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, specs[name]))
        for name, shape in SHAPES.items()
    }
    state = step.init(params)
    if has_whole_moments:
        state = with_whole_moments(state)
    # More rows than parameters; otherwise XLA would gather the rows.
    rows = np.ones((2048, 16), np.float32)
    batch = jax.device_put({"x": rows, "y": rows}, NamedSharding(mesh, P(axes)))
    reports = {
        "micro_batch": collectives(step.accumulate.lower(state, batch).compile()),
        "close": collectives(step.close_window.lower(state).compile()),
    }
    sums = state.opt_state.acc_grads.values()
    return reports, sum(x.addressable_shards[0].data.nbytes for x in sums)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return {way: compile_way(way) for way in PROGRAMS}


def sent(report: Any) -> dict[tuple[str, str], int]:
    """Return bytes by kind and axis, without scalars, separate or with a gradient."""
    total: dict[tuple[str, str], int] = {}
    for entry in report.entries:
        key = entry.kind, "+".join(entry.axes)
        total[key] = total.get(key, 0) + entry.bytes * entry.times
    scalars = {key: n % PARAMETERS for key, n in total.items()}
    assert max(scalars.values(), default=0) <= SCALARS
    return {key: n - scalars[key] for key, n in total.items() if n > scalars[key]}


def on_paper(way: str, program: str) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for operation in getattr(scaling.WAYS[way], program):
        kind = operation.kind
        if program == "micro_batch" and kind == "reduce-scatter":
            # A CPU runs jit's reduce-scatter as an all-reduce and keeps its part.
            # The close is a reduce-scatter on a CPU, too.
            kind = "all-reduce"
        key = kind, operation.over
        total[key] = total.get(key, 0) + scaling.bytes_of(operation, CASE)
    return total


def test_every_way_is_compiled():
    assert {*PROGRAMS} == {*scaling.WAYS}


@pytest.mark.parametrize("way", PROGRAMS)
def test_programs_send_what_the_formula_says_and_no_other_does(
    compiled: dict[str, Any], way: str
):
    if way in OTHERWISE_COMPILED:
        pytest.skip("this jax reduces over both axes at once")
    reports, _ = compiled[way]
    got = {program: sent(report) for program, report in reports.items()}
    alike = [
        other
        for other in scaling.WAYS
        if got == {program: on_paper(other, program) for program in reports}
    ]
    assert alike == [way]


@pytest.mark.parametrize("way", PROGRAMS)
def test_sums_on_a_device(compiled: dict[str, Any], way: str):
    assert compiled[way][1] == scaling.sums_on_a_device(scaling.WAYS[way], CASE)


def test_close_of_bfloat16_parameters_sends_float32_sums():
    case = CASE._replace(parameter_bytes=2)
    way = "data parallel, deferred"
    reports, sums = compile_way(way, jnp.bfloat16)
    [operation] = scaling.WAYS[way].close
    assert reports["close"].bytes() == scaling.bytes_of(operation, case) == sums
    assert sums == 2 * PARAMETERS * case.parameter_bytes


@pytest.mark.parametrize("has_aux", [False, True], ids=["", "aux"])
@pytest.mark.parametrize(
    ("reduce_every", "times", "gathers"), [("window", 1, 1), ("micro_batch", 6, 2)]
)
def test_layers_in_a_scan_are_gathered_at_once_or_one_by_one(
    reduce_every: Any, times: int, gathers: int, has_aux: bool
):
    def loss_fn(layers: Any, x: Any) -> Any:
        """With `aux`, a micro-batch without tokens runs the forward pass."""
        num_tokens = jnp.sum(x != 0) if has_aux else x.size
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        return jnp.sum(x), (num_tokens, jnp.max(x)) if has_aux else num_tokens

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layers = NamedSharding(mesh, P(None, "data"))
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": reduce_every}
    step = make_train_step(loss_fn, ADAM, has_aux=has_aux, **options)
    state = step.init(jax.device_put(jnp.ones((6, 16, 16)), layers))
    lowered = step.accumulate.lower(state, np.ones((2048, 16), np.float32))
    gathered = [e for e in collectives(lowered.compile()).entries if "gather" in e.kind]
    assert [(e.times, e.times * e.bytes) for e in gathered] == [
        (times, gathers * state.params.nbytes)
    ]


def test_wire_of_a_ring():
    """Each of n devices sends (n - 1) / n of an array, and twice that to all-reduce."""
    [reduce] = scaling.WAYS["data parallel"].micro_batch
    gather, scatter = scaling.WAYS["FSDP"].micro_batch
    size = 4 * PARAMETERS
    assert scaling.wire_of(reduce, CASE) == 2 * 7 / 8 * size
    assert scaling.wire_of(gather, CASE) == scaling.wire_of(scatter, CASE)
    assert scaling.wire_of(scatter, CASE) == 7 / 8 * size
    one = CASE._replace(axes={"data": 1})
    assert scaling.wire_of(reduce, one) == 0


def test_every_device_of_a_host_is_a_way_out():
    fsdp, hsdp = scaling.LAYOUTS["1,024 FSDP"], scaling.LAYOUTS["128 x 8 HSDP"]
    [scatter] = scaling.WAYS["FSDP, deferred"].close
    case = CASE._replace(axes=fsdp.axes)
    wire = scaling.wire_of(scatter, case)
    assert scaling.out_of_host(scatter, case, fsdp.in_host) == wire / 8
    case = CASE._replace(axes=hsdp.axes)
    way = scaling.WAYS["HSDP, deferred over replicas"]
    for operation in way.micro_batch:
        assert scaling.out_of_host(operation, case, hsdp.in_host) == 0
    [reduce] = way.close
    wire = scaling.wire_of(reduce, case)
    assert scaling.out_of_host(reduce, case, hsdp.in_host) == wire
    seconds = scaling.seconds_of(reduce, case, hsdp.in_host)
    assert seconds == wire / scaling.BETWEEN / 1e9


def test_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    scaling.main()
    printed = capsys.readouterr().out
    shown = PAGE.read_text()
    parts = printed.strip().split("\n\n")
    assert len(parts) == 5
    for part in parts:
        assert part in shown
    figures = [
        line
        for line in shown.splitlines()
        if line.startswith("|") and re.search(r"\| [\d,.]+ \|", line)
    ]
    assert not {*figures} - {*printed.splitlines()}
