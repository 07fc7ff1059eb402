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
from helpers import PARAMS, SKIPS, grads

from optax_tokenaccum import (
    has_updated,
    make_train_step,
    token_accumulation,
)

SCALES = jnp.asarray([2.0, 90.0, 5.0, 7.0, -3.0, 1.0])
COUNTS = jnp.asarray([1.0, 9.0, 2.0, 0.0, 3.0, 4.0])

SCHEDULES: dict[str, dict[str, Any]] = {
    "k": {"every_k_schedule": 2},
    "tokens": {"every_n_tokens": 10},
    "skip": {"every_k_schedule": 2} | SKIPS,
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_trace_and_in_place_and_through_scan(schedule: Any):
    optimizer = token_accumulation(optax.adam(0.1), **schedule)
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=0)
    @chex.assert_max_traces(n=1)
    def step(carry: Any, x: Any) -> Any:
        (params, state), (scale, n) = carry, x
        updates, state = optimizer.update(grads(scale), state, params, num_tokens=n)
        return (optax.apply_updates(params, updates), state), has_updated(state)

    state = optimizer.init(PARAMS)
    before = helpers.signatures(state)
    assert helpers.signatures(jax.jit(optimizer.init)(PARAMS)) == before
    shapes = jax.eval_shape(optimizer.init, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)

    carry = jax.tree.map(jnp.copy, (PARAMS, state))
    micro_batches = list(zip(SCALES, COUNTS, strict=True))
    with helpers.count_compilations() as compilations:
        for x in micro_batches:
            old = carry
            carry, _ = step(carry, x)
            assert old[1].grad_sums["w"].is_deleted()
            assert helpers.signatures(carry[1]) == before
    assert len(compilations) == 1
    ((scanned, after), updated) = jax.lax.scan(step, (PARAMS, state), (SCALES, COUNTS))
    assert helpers.relative_error(scanned, carry[0]) < helpers.RTOL["float32"]
    updates = int(carry[1].gradient_step)
    assert int(updated.sum()) == int(after.gradient_step) == updates > 0


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


def test_vmap_with_counts_of_its_own_in_every_lane():
    optimizer = token_accumulation(optax.adam(0.1), every_n_tokens=10)
    scales = jnp.stack([SCALES, SCALES[::-1], 0 * SCALES])
    counts = jnp.stack([COUNTS, COUNTS[::-1], 0 * COUNTS])

    def micro_batch(carry: Any, x: Any) -> Any:
        (state, params), (scale, n) = carry, x
        updates, state = optimizer.update(grads(scale), state, params, num_tokens=n)
        return (state, optax.apply_updates(params, updates)), None

    def run(scales: Any, counts: Any) -> Any:
        start = optimizer.init(PARAMS), PARAMS
        return jax.lax.scan(micro_batch, start, (scales, counts))[0]

    state, params = jax.jit(jax.vmap(run))(scales, counts)
    alone = jax.jit(run)
    for lane in range(3):
        _, expected = alone(scales[lane], counts[lane])
        got = jax.tree.map(operator.itemgetter(lane), params)
        assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]
    assert state.gradient_step.tolist() == [1, 1, 0]
    chex.assert_tree_all_finite(params)


def test_debug_nans_finds_none_in_windows_without_tokens():
    optimizer = token_accumulation(optax.adam(0.1), 2, **SKIPS)
    with jax.debug_nans(True):
        state = optimizer.init(PARAMS)
        for _ in range(4):  # not in a jit, which shows its results alone
            _, state = optimizer.update(
                grads(0.0), state, PARAMS, num_tokens=0, value=0.0
            )


# Values that are known inside a trace: captured arrays, constant counts.
K, N, TWICE_N = jnp.int32(2), jnp.float32(4), jnp.float32(8)


@pytest.mark.parametrize(
    "schedule",
    [{"every_k_schedule": lambda _: K}, {"every_n_tokens": lambda _: TWICE_N}],
    ids=["k", "tokens"],
)
def test_a_schedule_that_returns_an_array_closed_over(schedule: Any):
    step = make_train_step(
        lambda params, batch: (jnp.sum(params["w"] * batch), N),
        optax.sgd(1.0),
        **schedule,
    )
    state, first = step(step.init(PARAMS), jnp.ones(3))
    _, second = step(state, jnp.ones(3))
    assert (bool(first.updated), bool(second.updated)) == (False, True)


def test_a_count_that_is_known_inside_a_trace_is_checked():
    tx = token_accumulation(optax.sgd(1.0), 2)
    state = tx.init(PARAMS)
    for bad in map(jnp.float32, (-1.0, np.inf, np.nan)):
        update = functools.partial(tx.update, PARAMS, num_tokens=bad)
        with pytest.raises(ValueError, match="num_tokens must be finite"):
            jax.eval_shape(update, state, PARAMS)
