"""What the train step compiles to: number of programs, memory, no blocking."""

import functools
import inspect
from pathlib import Path
from typing import Any

import chex
import cloudpickle
import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import problems
import pytest
from helpers import net_bytes
from jax._src.array import ArrayImpl
from problems import K

from benchmarks.chips import CHIPS
from benchmarks.ways import WAYS
from benchmarks.workloads import square_layers, stacked_layers, window_of
from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    token_accumulation,
)
from optax_tokenaccum._core import backward

WIDTH, DEPTH = 128, 4
GRADIENT_BYTES = 4 * DEPTH * WIDTH**2
BATCH = np.ones((2, WIDTH), np.float32)
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
MUON = optax.contrib.muon(1e-3)
CLIPPED_LATE = optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))
in_threes = functools.partial(make_train_step, every_k_schedule=K)


def loss_fn(params: Any, batch: Any) -> Any:
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.sum(batch**2), batch.shape[0]


def new_params() -> list[jax.Array]:
    return [jnp.full((WIDTH, WIDTH), 0.01) for _ in range(DEPTH)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect one entry for every array whose value the host fetches."""
    seen: list[int] = []
    value = ArrayImpl._value

    def counting(self: Any) -> Any:
        seen.append(1)
        return value.fget(self)

    monkeypatch.setattr(ArrayImpl, "_value", property(counting))
    int(jnp.zeros(()))
    assert seen.pop() == 1
    return seen


@pytest.mark.parametrize(
    ("schedule", "programs", "is_placed"),
    [
        ({"every_k_schedule": np.int64(3)}, 2, True),
        ({"every_k_schedule": 1}, 1, False),
        ({"every_n_tokens": 6}, 1, False),
        ({"every_k_schedule": 3} | helpers.SKIPS, 1, False),
    ],
    ids=["int k", "k = 1", "token budget", "skip function"],
)
def test_20_windows_compile_once_and_never_wait_for_the_device(
    schedule: Any, programs: int, is_placed: bool, reads: list[int]
):
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(n=1)
    inner = ADAMW._replace(update=traced_once(ADAMW.update))
    step = make_train_step(traced_once(loss_fn), inner, **schedule)
    place = jax.devices()[0] if is_placed else None
    state = step.init(jax.device_put(new_params(), place))
    with helpers.count_compilations() as compilations:
        state, metrics = helpers.run_step(step, state, [BATCH] * 60)
    assert reads == []
    assert int(metrics.gradient_step) >= 20
    assert len(compilations) == programs


def test_restored_state_is_read_once(reads: list[int]):
    step = make_train_step(loss_fn, ADAMW, 4)
    state, _ = step(step.init(new_params()), BATCH)
    restored, updated = jax.tree.map(jnp.copy, state), []
    for _ in range(8):
        restored, metrics = step(restored, BATCH)
        updated.append(metrics.updated)
    assert len(reads) == 1
    assert [bool(x) for x in updated] == [False, False, True, False] * 2


def test_steps_that_take_turns_wait_for_nothing(reads: list[int]):
    steps = [make_train_step(loss_fn, ADAMW, 4) for _ in range(2)]
    state, updated = steps[0].init(new_params()), []
    for i in range(8):
        state, metrics = steps[i % 2](state, BATCH)
        updated.append(metrics.updated)
    assert reads == []
    assert [bool(x) for x in updated] == [False, False, False, True] * 2


def gradients_alone() -> int:
    gradients = jax.jit(jax.grad(loss_fn, has_aux=True))
    return net_bytes(gradients.lower(new_params(), BATCH))


def optimizer_alone() -> int:
    """Of a donating optimizer step on given sums, without a window around it."""

    def apply(params: Any, inner_opt_state: Any, sums: Any, n: Any) -> Any:
        norm = optax.tree.norm(sums) / n
        gradient = jax.tree.map(lambda x: x / n, sums)
        updates, inner_opt_state = ADAMW.update(gradient, inner_opt_state, params)
        return optax.apply_updates(params, updates), inner_opt_state, norm

    params = new_params()
    jitted = jax.jit(apply, donate_argnums=(0, 1))
    return net_bytes(jitted.lower(params, ADAMW.init(params), params, 1.0))


def test_accumulate_needs_no_gradient_sized_temporary():
    step = make_train_step(loss_fn, ADAMW, 4)
    accumulate = step.accumulate.lower(step.init(new_params()), BATCH)
    assert net_bytes(accumulate) <= gradients_alone()
    assert net_bytes(accumulate) < GRADIENT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("way", ["transformation", "one program"])
def test_a_whole_step_needs_its_gradients_and_what_the_optimizer_needs(way: str):
    """Zeros are created where they are read, and updates reuse the sums' buffers."""
    params, transformation = new_params(), token_accumulation(ADAMW, 4)
    step, donated = helpers.micro_step(transformation, loss_fn), (0, 1)
    state: Any = params, transformation.init(params)
    if way == "one program":
        step, donated = in_threes(loss_fn, ADAMW), (0,)
        state = (step.init(params),)
    lowered = jax.jit(step, donate_argnums=donated).lower(*state, BATCH)
    assert net_bytes(lowered) <= gradients_alone() + optimizer_alone() + 4096


def test_close_works_in_place():
    """Parameters and moments have one shape; a wrong pairing would copy them all."""
    step = make_train_step(loss_fn, ADAMW, 4)
    lowered = step.close_window.lower(step.init(new_params()))
    # A GPU aligns each of some ten scalars to 256 bytes.
    scalars = 1024 if jax.default_backend() == "cpu" else 4096
    # Below jax 0.11, the conditional reads a copy of the sums, which are emptied.
    copies = 0 if backward.CAN_ADD_IN_PLACE else len(jax.tree.leaves(new_params()))
    needed = optimizer_alone() + scalars + copies * 4 * WIDTH**2
    assert net_bytes(lowered) <= needed
    lines = lowered.compile().as_text().splitlines()
    matrix = f"f32[{WIDTH},{WIDTH}]"
    assert sum(" copy(" in x and matrix in x for x in lines) <= 2 * copies


def layers() -> Any:
    half = {"dtype": jnp.bfloat16, "stored": jnp.bfloat16}
    return stacked_layers(2048, 6, 1, 256, **half)


@pytest.mark.slow
@pytest.mark.skipif(not backward.CAN_ADD_IN_PLACE, reason="gradients are whole")
@pytest.mark.parametrize(
    ("optimizer", "make", "chip"),
    [(MUON, lambda: square_layers(WIDTH), None), (CLIPPED_LATE, layers, "v5e")],
    ids=["Muon", "clipped late, bfloat16 layers in a scan, on a TPU"],
)
def test_steps_need_no_more_memory_than_by_hand(
    optimizer: optax.GradientTransformation, make: Any, chip: str | None
):
    if chip and CHIPS[chip].missing():
        pytest.skip("needs libtpu, to compile")
    device = CHIPS[chip].devices()[0] if chip else jax.devices()[0]
    where = jax.sharding.SingleDeviceSharding(device)

    def shapes(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
        )

    workload = make()
    params, window = shapes(workload.params), shapes(window_of(workload, 4))

    def peak(way: str) -> int:
        loop = WAYS[way].build(workload, optimizer, 4)
        state = shapes(jax.eval_shape(loop.init, params))
        return max(x.peak() for x in loop.lower(state, window).values())

    assert peak("window step") <= 1.01 * peak("scan by hand")
    assert peak("train step") <= 1.01 * peak("pair by hand")


@pytest.mark.parametrize(
    ("make", "optimizer", "dtype"),
    [
        helpers.slow(in_threes, MUON, jnp.float32),
        (in_threes, CLIPPED, jnp.bfloat16),
        helpers.slow(make_window_step, optax.apply_if_finite(ADAMW, 3), jnp.float32),
    ],
    ids=["Muon", "clipped, bfloat16", "if finite, window"],
)
def test_updates_that_overwrite_the_sums_are_those_of_the_transformation(
    make: Any, optimizer: optax.GradientTransformation, dtype: Any
):
    """Also after a window without tokens, which changes nothing."""
    problem = problems.PROBLEMS["layered"]
    stacked_loss = problems.loss_fn(problem)

    def loss(params: Any, batch: Any) -> Any:
        return stacked_loss(params | {"layers": jnp.stack(params["layers"])}, batch)

    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), problem.params)
    params["layers"] = [*params["layers"]]  # matrices, for Muon
    transformation = token_accumulation(optimizer, K)
    update = helpers.micro_step(transformation, loss)
    step, expected = make(loss, optimizer), (params, transformation.init(params))
    state = step.init(params)
    for window in problems.windows_of(problem)[:3]:
        for batch in window:
            expected = update(*expected, batch)
        calls = [helpers.stack(window)] if make is make_window_step else window
        state, _ = helpers.run_step(step, state, calls)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    chex.assert_trees_all_close(
        state.params, expected[0], rtol=tolerance, atol=tolerance
    )


def test_lower_takes_shapes_and_accumulate_leaves_the_inner_optimizer_out():
    step = make_train_step(loss_fn, ADAMW, 4)
    state = jax.eval_shape(step.init, new_params())
    batch = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)
    assert "sqrt" not in step.accumulate.lower(state, batch).as_text()
    assert "sqrt" in step.close_window.lower(state).as_text()


@pytest.mark.parametrize(
    "way", ["two programs", "one program", "window", *nnx_ways.WAYS]
)
def test_what_is_compiled_ahead_is_called_with_what_was_lowered(way: str):
    """From shapes; then it trains as the step does."""
    options = {"mesh": None, "data_axes": None, "loss_fn": loss_fn, "k": 2}
    steps = [meshes.make_step(way, ADAMW, **options) for _ in range(2)]
    states = [step.init(new_params()) for step in steps]
    batch = np.stack([BATCH] * 2) if "window" in way else BATCH
    shape = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    compiled = steps[0].lower(states[0], shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes > 0
    for _ in range(2):
        states[0], metrics = compiled(states[0], batch)
        states[1], expected = steps[1](states[1], batch)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
    assert metrics.updated
    if "window" not in way:
        halves = [steps[0].accumulate.lower(states[0], shape).compile()]
        halves += [steps[0].close_window.lower(states[0]).compile()]
        states[0], _ = halves[0](states[0], batch)
        states[0], metrics = halves[1](states[0])
        assert metrics.updated and metrics.gradient_step == 2


def test_a_used_step_goes_through_cloudpickle():
    """For workers in other processes; standard pickle does not support functions."""
    step = make_train_step(loss_fn, ADAMW, 2)
    state, _ = step(step.init(new_params()), BATCH)
    state = jax.device_get(state)
    again = cloudpickle.loads(cloudpickle.dumps(step))
    got, expected = (each(state, 2 * BATCH) for each in (again, step))
    chex.assert_trees_all_equal(got, expected)
    assert got[1].updated


def test_a_micro_batch_passes_few_functions_on_its_way_to_the_loss():
    """Few enough to be read."""
    ways, package = [], Path(backward.__file__).parents[1]

    def seen(params: Any, batch: Any) -> Any:
        frames = [x for x in inspect.stack(0) if package in Path(x.filename).parents]
        names = [x.function for x in frames]
        ways.append(names[: 1 + names.index("body")])
        return loss_fn(params, batch)

    step = make_train_step(seen, ADAMW, 2)
    step.accumulate.lower(step.init(new_params()), BATCH)
    assert 3 < max(map(len, ways)) <= 9, ways
