"""The transformation under jit, scan, vmap, grad and donation, with traces counted."""

import functools
import operator
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from constant_gradients import PARAMS, grads

from optax_tokenaccum import has_updated, token_accumulation

SCALES = jnp.asarray([2.0, 90.0, 5.0, 7.0, -3.0, 1.0])
COUNTS = jnp.asarray([1.0, 9.0, 2.0, 0.0, 3.0, 4.0])

SCHEDULES: dict[str, dict[str, Any]] = {
    "k": {"every_k_schedule": 2},
    "k_function": {"every_k_schedule": lambda step: jnp.where(step < 1, 2, 4)},
    "tokens": {"every_n_tokens": 10},
    "skip": {"every_k_schedule": 2, "should_skip_update_fn": optax.skip_not_finite},
}


@pytest.fixture(params=SCHEDULES.values(), ids=SCHEDULES.keys())
def optimizer(request: pytest.FixtureRequest) -> Any:
    return token_accumulation(optax.adam(0.1), **request.param)


def test_state_goes_through_scan(optimizer: Any):
    def body(carry: Any, x: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(grads(x[0]), state, params, num_tokens=x[1])
        return (optax.apply_updates(params, updates), state), has_updated(state)

    start = (PARAMS, optimizer.init(PARAMS))
    (params, state), updated = jax.jit(lambda carry, xs: jax.lax.scan(body, carry, xs))(
        start, (SCALES, COUNTS)
    )
    expected = helpers.run_window(
        optimizer.update,
        start[1],
        PARAMS,
        [(grads(s), n) for s, n in zip(SCALES, COUNTS, strict=True)],
    )
    assert helpers.relative_error(params, expected[0]) < helpers.RTOL["float32"]
    assert int(state.gradient_step) == int(updated.sum()) > 0


def test_one_trace_and_in_place_over_many_windows(optimizer: Any):
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @chex.assert_max_traces(n=1)
    def step(params: Any, state: Any, scale: Any, n: Any) -> Any:
        updates, state = optimizer.update(grads(scale), state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.copy, PARAMS), optimizer.init(PARAMS)
    before = helpers.signatures(state)
    with helpers.count_compilations() as compilations:
        for i in range(20):
            old = state
            params, state = step(params, state, float(i), i % 5)
            assert old.acc_grads["w"].is_deleted()
    assert helpers.signatures(state) == before
    assert len(compilations) == 1
    assert int(state.gradient_step) > 2


def test_init_is_stable_for_numbers_weak_types_and_numpy():
    inner = optax.GradientTransformation(
        lambda _: {"number": 1, "weak": jnp.asarray(2.0), "numpy": np.zeros(2)},
        lambda updates, state, params=None: (
            updates,
            {"number": state["number"] + 1.0, "weak": 2.0, "numpy": state["numpy"] + 1},
        ),
    )
    optimizer = token_accumulation(inner, 2)
    params = {"w": np.ones(3, np.float32), "b": 1.0}
    state = optimizer.init(params)
    before = helpers.signatures(state)
    assert not any(weak for _, _, weak in before)
    update = jax.jit(optimizer.update)
    for _ in range(4):
        _, state = update(params, state, params, num_tokens=1)
        assert helpers.signatures(state) == before


@pytest.mark.parametrize(
    "inner",
    [optax.contrib.mechanize(optax.sgd(0.1)), optax.contrib.prodigy(0.1)],
    ids=["mechanize", "prodigy"],
)
def test_state_can_be_donated_with_parameters_that_inner_keeps(inner: Any):
    optimizer = token_accumulation(inner, 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads(1.0), state, params, num_tokens=1)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = optimizer.init(params)
    for _ in range(4):
        params, state = step(params, state)
    assert int(state.gradient_step) == 2


def test_vmap_with_counts_of_its_own_in_every_lane():
    optimizer = token_accumulation(optax.adam(0.1), every_n_tokens=10)
    scales = jnp.stack([SCALES, SCALES[::-1], 0 * SCALES])
    counts = jnp.stack([COUNTS, COUNTS[::-1], 0 * COUNTS])

    def run(scales: Any, counts: Any) -> Any:
        params, state = PARAMS, optimizer.init(PARAMS)
        for scale, n in zip(scales, counts, strict=True):
            updates, state = optimizer.update(grads(scale), state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        return params, state.gradient_step

    params, steps = jax.jit(jax.vmap(run))(scales, counts)
    for lane in range(3):
        expected, expected_steps = run(scales[lane], counts[lane])
        got = jax.tree.map(operator.itemgetter(lane), params)
        assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]
        assert int(steps[lane]) == int(expected_steps)
    assert steps.tolist() == [1, 1, 0]
    chex.assert_tree_all_finite(params)


def test_reverse_mode_goes_through_a_window():
    optimizer = token_accumulation(optax.sgd(1.0), 2)

    @jax.jit
    @jax.grad
    def sensitivity(scale: Any) -> Any:
        params, _ = helpers.run_window(
            optimizer.update,
            optimizer.init(PARAMS),
            PARAMS,
            [(grads(scale), 1), (grads(2 * scale), 3)],
        )
        return params["b"]

    np.testing.assert_allclose(sensitivity(1.0), -(1 + 2) / 4, rtol=1e-6)


def test_init_can_be_traced_and_shaped(optimizer: Any):
    state = optimizer.init(PARAMS)
    assert helpers.signatures(jax.jit(optimizer.init)(PARAMS)) == helpers.signatures(
        state
    )
    shapes = jax.eval_shape(optimizer.init, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)


def test_debug_nans_finds_none_in_windows_without_tokens():
    optimizer = token_accumulation(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    )
    with jax.debug_nans(True):
        for update in (optimizer.update, jax.jit(optimizer.update)):
            state = optimizer.init(PARAMS)
            for _ in range(4):
                _, state = update(grads(0.0), state, PARAMS, num_tokens=0, value=0.0)
