"""Train step and window step over 8 devices, on meshes of both axis types."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import count_compilations, cut, init_params, loss_mean_fn, relative_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    ALL_WAYS,
    GRADIENT,
    LAYOUTS,
    SCALE,
    TYPES,
    WAYS,
    K,
    applied,
    exact,
    make_batch,
    make_mesh,
    make_step,
    placed,
    run,
    stacked,
)
from nnx_ways import WAYS as NNX_WAYS

from optax_tokenaccum import CollectiveReport, collectives

SLOW = pytest.mark.slow
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
# (layout, axis type, way) for `reduce_every="window"` and for "micro_batch".
WINDOW = [
    *[(layout, kind, way) for layout in LAYOUTS for kind in TYPES for way in WAYS],
    ("data parallel", "auto", "nnx two programs"),
    ("fsdp", "auto", "nnx window"),
    *[
        pytest.param(layout, kind, way, marks=SLOW)
        for layout in LAYOUTS
        for kind in TYPES
        for way in NNX_WAYS
    ],
]
MICRO_BATCH = [
    *[(layout, "auto", way) for layout in LAYOUTS for way in WAYS[1:]],
    ("fsdp", "explicit", "two programs"),
    ("data parallel", "explicit", "window"),
    *[
        pytest.param(layout, "auto", way, marks=SLOW)
        for layout in LAYOUTS
        for way in NNX_WAYS
    ],
]


def check_update(layout: str, kind: str, way: str, reduce_every: Any) -> None:
    shape, specs = LAYOUTS[layout]
    mesh = make_mesh(shape, kind)
    batch = make_batch(shape[0])
    step = make_step(way, optax.sgd(SCALE), mesh, reduce_every=reduce_every)
    state, metrics = run(way, step, step.init(placed(mesh, specs)), batch)
    assert relative_error(applied(state.params), exact(shape[0])) < 2e-6
    assert metrics.updated and metrics.num_tokens == batch["mask"].sum()
    norm = optax.tree.norm(jax.tree.map(np.float64, exact(shape[0])))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    for name, x in state.params.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim)


@pytest.mark.parametrize(("layout", "kind", "way"), WINDOW)
def test_gradient_is_that_of_the_full_batch(layout: str, kind: str, way: str):
    check_update(layout, kind, way, "window")


@pytest.mark.parametrize(("layout", "kind", "way"), MICRO_BATCH)
def test_gradient_of_sharded_sums_is_that_of_the_full_batch(
    layout: str, kind: str, way: str
):
    check_update(layout, kind, way, "micro_batch")


@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kinds", [("auto", "explicit"), ("explicit", "auto")])
def test_axes_of_different_types(kinds: Any, way: str, reduce_every: Any):
    types = tuple(TYPES[kind] for kind in kinds)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    step = make_step(way, optax.sgd(SCALE), mesh, reduce_every=reduce_every)
    state = step.init(placed(mesh, LAYOUTS["fsdp and tensor parallel"][1]))
    state, _ = run(way, step, state, make_batch(4))
    assert relative_error(applied(state.params), exact(4)) < 2e-6


@pytest.mark.parametrize("devices", [8, 4])
def test_mean_over_devices_of_means_is_another_gradient(devices: int):
    batch = make_batch(devices)
    grad = jax.jit(jax.grad(loss_mean_fn, has_aux=True))
    parts = [part for part in cut(batch, K * devices) if part["mask"].any()]
    means = [grad(init_params(0), part)[0] for part in parts]
    naive = jax.tree.map(lambda *gs: np.mean(gs, 0), *means)
    assert relative_error(naive, exact(devices)) > 1e-2


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("layout", ["data parallel", "tensor parallel"])
def test_without_a_mesh_sharded_arrays_are_right_too(layout: str, way: str):
    """Sums are placed like the parameters and stay there."""
    shape, specs = LAYOUTS[layout]
    mesh, batch = make_mesh(shape), make_batch(shape[0])
    options = {"mesh": None, "data_axes": None}
    step = make_step(way, optax.sgd(SCALE), **options)
    rows = NamedSharding(mesh, P(None, "data") if "window" in way else P("data"))
    parts = [stacked(batch)] if "window" in way else cut(batch, K)
    state = step.init(placed(mesh, specs))
    with count_compilations() as compilations:
        for part in parts:
            state, _ = step(state, jax.device_put(part, rows))
    assert len(compilations) == (2 if "two programs" in way else 1)
    assert relative_error(applied(state.params), exact(shape[0])) < 2e-6
    if "window" not in way:
        for name, x in state.opt_state.acc_grads.items():
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), 2)


# The state of this optimizer is not shaped like its parameters, so the compiler would
# place it differently from `init`.
FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=4)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize(
    ("layout", "kind", "optimizer", "reduce_every"),
    [
        pytest.param("data parallel", "auto", ADAMW, "window", marks=SLOW),
        pytest.param("data parallel", "auto", ADAMW, "micro_batch", marks=SLOW),
        pytest.param("tensor parallel", "explicit", FACTORED, "window", marks=SLOW),
        ("fsdp and tensor parallel", "auto", FACTORED, "window"),
    ],
    ids=["data parallel", "ZeRO-2", "explicit", "fsdp"],
)
def test_compilations_of_20_windows_from_the_first_call_on(
    layout: str, kind: str, optimizer: Any, way: str, reduce_every: Any
):
    shape, specs = LAYOUTS[layout]
    mesh, batch = make_mesh(shape, kind), make_batch(shape[0])
    step = make_step(way, optimizer, mesh, reduce_every=reduce_every)
    state = step.init(placed(mesh, specs))
    where = jax.tree.map(lambda x: x.sharding, state)
    with count_compilations() as compilations:
        for _ in range(20):
            state, _ = run(way, step, state, batch)
    assert len(compilations) == (2 if "two programs" in way else 1)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{s}"),
        state,
        where,
    )


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", TYPES)
def test_compiled_ahead_no_call_compiles(kind: str, way: str):
    mesh, batch = make_mesh((8,), kind), make_batch(8)
    step = make_step(way, ADAMW, mesh)
    state = step.init(placed(mesh, LAYOUTS["data parallel"][1]))
    given = [stacked(batch)] if "window" in way else cut(batch, K)
    step.compile(state, [jax.eval_shape(lambda: given[0])])
    with count_compilations() as compilations:
        for part in given:
            state, metrics = step(state, part)
    assert metrics.updated and not compilations


@functools.cache
def reports(
    layout: str, kind: str, reduce_every: Any
) -> dict[str, tuple[CollectiveReport, Any]]:
    """Traffic and memory of accumulate, of close, and of a whole window."""
    shape, specs = LAYOUTS[layout]
    mesh, batch = make_mesh(shape, kind), make_batch(shape[0])
    step = make_step("two programs", ADAMW, mesh, reduce_every=reduce_every)
    state = step.init(placed(mesh, specs))
    lowered = {
        "accumulate": step.accumulate.lower(state, cut(batch, K)[0]),
        "close": step.close_window.lower(state),
    }
    step = make_step("window", ADAMW, mesh, reduce_every=reduce_every)
    state = step.init(placed(mesh, specs))
    lowered["window"] = step.lower(state, stacked(batch))
    compiled = {name: program.compile() for name, program in lowered.items()}
    return {
        name: (collectives(program), program.memory_analysis())
        for name, program in compiled.items()
    }


def gradients_sent(layout: str, kind: str, reduce_every: Any) -> list[float]:
    """Traffic over the data axis except gathers, in units of a device's gradient."""
    shape, specs = LAYOUTS[layout]
    split = {name: 2 if "model" in spec else 1 for name, spec in specs.items()}
    sizes = {"embed": 32 * 16, "hidden": 16 * 16, "out": 16 * 32}
    gradient = sum(4 * sizes[name] // split[name] for name in sizes)
    return [
        sum(
            report.bytes(kind=kind, axes="data")
            for kind in ("all-reduce", "reduce-scatter", "all-to-all")
        )
        / gradient
        for report, _ in reports(layout, kind, reduce_every).values()
    ]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layout", ["data parallel", "tensor parallel", "fsdp"])
def test_gradients_meet_once_a_window(layout: str, kind: str):
    accumulate, close, window = gradients_sent(layout, kind, "window")
    assert accumulate < 0.01
    assert 1 <= close < 1.01
    assert 1 <= window < 1.02  # including K losses and counts


@pytest.mark.parametrize("layout", ["data parallel", "fsdp"])
def test_sharded_sums_meet_in_every_micro_batch(layout: str):
    accumulate, close, window = gradients_sent(layout, "auto", "micro_batch")
    assert 1 <= accumulate < 1.01
    assert close < 0.01
    assert K <= window < K + 0.02  # including K losses and counts


def test_whole_sums_of_sharded_parameters_are_reduced_to_the_parts():
    report, _ = reports("fsdp", "auto", "window")["close"]
    assert report.bytes(kind="reduce-scatter") == GRADIENT
    assert report.bytes(kind="all-reduce") < 100
    assert report.bytes(kind="all-gather") == 0


def test_window_step_gathers_sharded_parameters_once():
    report, _ = reports("fsdp", "auto", "window")["window"]
    assert report.bytes(kind="all-gather") == GRADIENT


def test_close_scatters_only_what_tensor_parallelism_leaves_to_a_device():
    report, _ = reports("fsdp and tensor parallel", "auto", "window")["close"]
    # "embed" is not sharded over "model"; the others are.
    own = 4 * (32 * 16 + (16 * 16 + 16 * 32) // 2)
    assert report.bytes(kind="reduce-scatter") == own
    assert report.bytes(kind="all-gather") == 0


def test_sums_live_in_place():
    """A device stores only its own sum, or only a part of it if sums are sharded."""
    scalars = 64
    for reduce_every, own in (("window", GRADIENT), ("micro_batch", GRADIENT // 8)):
        _, memory = reports("data parallel", "auto", reduce_every)["accumulate"]
        assert own <= memory.alias_size_in_bytes < own + scalars
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert outputs < GRADIENT / 8


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", TYPES)
def test_inside_an_outer_jit(kind: str, way: str):
    mesh, batch = make_mesh((4, 2), kind), make_batch(4)
    step = make_step(way, optax.sgd(SCALE), mesh)
    state = step.init(placed(mesh, LAYOUTS["tensor parallel"][1]))
    outer = jax.jit(lambda state, batch: run(way, step, state, batch)[0])
    compiled = outer.lower(state, batch).compile()
    assert relative_error(applied(compiled(state, batch).params), exact(4)) < 2e-6
    # Parameters whose shardings are unknown are not assumed to be replicated.
    gathered = collectives(compiled).bytes(kind="all-gather", axes="model")
    assert gathered < GRADIENT / 2


def test_parameters_of_one_device_are_put_on_all():
    step = make_step("two programs", optax.sgd(SCALE), make_mesh((8,)))
    state, _ = run("two programs", step, step.init(init_params(0)), make_batch(8))
    assert relative_error(applied(state.params), exact(8)) < 2e-6
    assert len(state.params["out"].sharding.device_set) == 8
