"""What the train step compiles to: number of programs, memory, no blocking."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    token_accumulation,
    window_value_and_grad,
)

WIDTH, DEPTH = 128, 4


def loss_fn(params: Any, batch: Any) -> Any:
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.sum(batch**2), batch.shape[0]


def new_params() -> list[jax.Array]:
    key = jax.random.key(0)
    return [
        jax.random.normal(jax.random.fold_in(key, i), (WIDTH, WIDTH)) / WIDTH**0.5
        for i in range(DEPTH)
    ]


GRADIENT_BYTES = 4 * DEPTH * WIDTH**2
BATCH = np.ones((2, WIDTH), np.float32)

KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "int k": ({"every_k_schedule": 3}, 2),
    "numpy k": ({"every_k_schedule": np.int64(3)}, 2),
    "k of 1": ({"every_k_schedule": 1}, 2),
    "function of gradient_step": ({"every_k_schedule": lambda step: 3 + step * 0}, 1),
    "token budget": ({"every_n_tokens": 6}, 1),
    "skip function": (
        {"every_k_schedule": 3, "should_skip_update_fn": optax.skip_not_finite},
        1,
    ),
}


@pytest.mark.parametrize("place", ["default", "committed"])
@pytest.mark.parametrize(("schedule", "programs"), KINDS.values(), ids=KINDS.keys())
def test_compilations_over_20_windows(schedule: Any, programs: int, place: str):
    step = make_train_step(loss_fn, optax.adamw(1e-3), **schedule)
    params = new_params()
    if place == "committed":
        params = jax.device_put(params, jax.devices()[0])
    state = step.init(params)
    with helpers.count_compilations() as compilations:
        for _ in range(60):
            state, metrics = step(state, BATCH)
    assert int(metrics.gradient_step) >= 20
    assert len(compilations) == programs


def test_halves_are_two_programs_and_another_shape_is_one_more():
    step = make_train_step(loss_fn, optax.adamw(1e-3))
    state = step.init(new_params())
    with helpers.count_compilations() as compilations:
        for rows in (2, 2, 5, 2):
            for _ in range(3):
                state, _ = step.accumulate(state, np.ones((rows, WIDTH), np.float32))
            state, _ = step.close_window(state)
    assert len(compilations) == 3


def test_loss_is_traced_once():
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(loss_fn, n=1)
    step = make_train_step(traced_once, optax.adamw(1e-3), 3)
    state = step.init(new_params())
    for _ in range(9):
        state, _ = step(state, BATCH)


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


@pytest.mark.parametrize(("schedule", "programs"), KINDS.values(), ids=KINDS.keys())
def test_step_never_waits_for_the_device(
    schedule: Any, programs: int, reads: list[int]
):
    step = make_train_step(loss_fn, optax.adamw(1e-3), **schedule)
    state = step.init(new_params())
    for _ in range(60):
        state, _ = step(state, BATCH)
    assert reads == []


def test_restored_state_is_read_once(reads: list[int]):
    step = make_train_step(loss_fn, optax.adamw(1e-3), 4)
    state, _ = step(step.init(new_params()), BATCH)
    restored = jax.tree.map(jnp.copy, state)
    updated = []
    for _ in range(8):
        restored, metrics = step(restored, BATCH)
        updated.append(metrics.updated)
    assert len(reads) == 1
    assert [bool(u) for u in updated] == [False, False, True, False] * 2


def _net_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _gradients_alone() -> Any:
    gradients = jax.jit(jax.grad(loss_fn, has_aux=True))
    return gradients.lower(new_params(), BATCH).compile()


def _optimizer_alone(inner: Any) -> Any:
    """Compile a donating optimizer step on given sums, without a window around it."""

    def apply(params: Any, inner_opt_state: Any, sums: Any, n: Any) -> Any:
        norm = optax.tree.norm(sums) / n
        gradient = jax.tree.map(lambda x: x / n, sums)
        updates, inner_opt_state = inner.update(gradient, inner_opt_state, params)
        return optax.apply_updates(params, updates), inner_opt_state, norm

    params = new_params()
    jitted = jax.jit(apply, donate_argnums=(0, 1))
    return jitted.lower(params, inner.init(params), params, 1.0).compile()


def test_accumulate_needs_no_gradient_sized_temporary():
    step = make_train_step(loss_fn, optax.adamw(1e-3), 4)
    accumulate = step.accumulate.lower(step.init(new_params()), BATCH).compile()
    assert _net_bytes(accumulate) <= _net_bytes(_gradients_alone())
    assert _net_bytes(accumulate) < GRADIENT_BYTES


def test_transformation_needs_no_more_memory_than_the_train_step():
    """Zeros are created where they are read, and updates reuse the sums' buffers."""
    optimizer = token_accumulation(optax.adamw(1e-3), 4)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        gradient, n = jax.grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    params = new_params()
    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(params, optimizer.init(params), BATCH).compile()
    # The train step applies updates inside the conditional, so they never leave it.
    train_step = make_train_step(loss_fn, optax.adamw(1e-3), every_n_tokens=8)
    outer = jax.jit(train_step, donate_argnums=0)
    other = outer.lower(train_step.init(params), BATCH).compile()
    assert _net_bytes(compiled) <= _net_bytes(other) + 4096


def test_close_works_in_place():
    """Parameters and moments have one shape; a wrong pairing would copy them all."""
    inner = optax.adamw(1e-3)
    step = make_train_step(loss_fn, inner, 4)
    compiled = step.close_window.lower(step.init(new_params())).compile()
    assert _net_bytes(compiled) <= _net_bytes(_optimizer_alone(inner)) + 1024
    matrix = f"f32[{WIDTH},{WIDTH}]"
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if matrix in line]


def test_one_program_works_in_place():
    inner = optax.adamw(1e-3)
    step = make_train_step(loss_fn, inner, every_n_tokens=8)
    outer = jax.jit(step, donate_argnums=0)
    compiled = outer.lower(step.init(new_params()), BATCH).compile()
    alone = _net_bytes(_gradients_alone()) + _net_bytes(_optimizer_alone(inner))
    assert _net_bytes(compiled) <= alone + 4096


def test_lower_takes_shapes():
    step = make_train_step(loss_fn, optax.adamw(1e-3), 4)
    state = jax.eval_shape(step.init, new_params())
    batch = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)
    for lowered in (
        step.accumulate.lower(state, batch),
        step.close_window.lower(state),
    ):
        assert lowered.compile().memory_analysis().temp_size_in_bytes >= 0


def test_inner_optimizer_is_not_in_the_accumulate_program():
    step = make_train_step(loss_fn, optax.adamw(1e-3), 4)
    state = step.init(new_params())
    assert "sqrt" not in step.accumulate.lower(state, BATCH).as_text()
    assert "sqrt" in step.close_window.lower(state).as_text()


def test_window_needs_no_more_memory_than_a_scan_written_by_hand():
    def by_hand(params: Any, micro_batches: Any) -> Any:
        def body(sums: Any, batch: Any) -> Any:
            value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
            (loss_sum, n), grads = value_and_grad(params, batch)
            return jax.tree.map(jnp.add, sums, (loss_sum, n, grads)), None

        start = (0.0, 0, jax.tree.map(jnp.zeros_like, params))
        (loss_sum, n, grads), _ = jax.lax.scan(body, start, micro_batches)
        return (loss_sum / n, n), jax.tree.map(lambda g: g / n, grads)

    micro_batches = np.ones((8, *BATCH.shape), np.float32)
    ours, theirs = (
        jax.jit(f).lower(new_params(), micro_batches).compile()
        for f in (window_value_and_grad(loss_fn), by_hand)
    )
    counters = 2048  # scalars of the window, and of the conditional in it
    assert _net_bytes(ours) <= _net_bytes(theirs) + counters


def test_window_step_works_in_place():
    inner = optax.adamw(1e-3)
    step = make_window_step(loss_fn, inner)
    micro_batches = np.ones((8, *BATCH.shape), np.float32)
    compiled = step.lower(step.init(new_params()), micro_batches).compile()
    alone = _net_bytes(_gradients_alone()) + _net_bytes(_optimizer_alone(inner))
    assert _net_bytes(compiled) <= alone + 4096
