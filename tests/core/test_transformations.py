"""The transformation in place, under scan and vmap, with states that never retrace."""

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

from optax_tokenaccum import has_updated, token_accumulation

SCALES = jnp.asarray([2.0, 90.0, 5.0, 7.0, -3.0, 1.0])
COUNTS = jnp.asarray([1.0, 9.0, 2.0, 0.0, 3.0, 4.0])
ADAM = optax.adam(0.1)
SCHEDULES: dict[str, dict[str, Any]] = {
    "k": {"every_k_schedule": 2},
    "tokens": {"every_n_tokens": 10},
    "skip": {"every_k_schedule": 2} | SKIPS,
}


def micro_step(optimizer: Any, carry: Any, x: Any) -> Any:
    (params, state), (scale, n) = carry, x
    updates, state = optimizer.update(grads(scale), state, params, num_tokens=n)
    return (optax.apply_updates(params, updates), state), has_updated(state)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_compilation_in_place_and_through_scan(schedule: Any):
    optimizer = token_accumulation(ADAM, **schedule)
    step = functools.partial(micro_step, optimizer)
    jitted = jax.jit(step, donate_argnums=0)
    state = optimizer.init(PARAMS)
    before = helpers.signatures(state)
    assert helpers.signatures(jax.jit(optimizer.init)(PARAMS)) == before
    carry = jax.tree.map(jnp.copy, (PARAMS, state))
    micro_batches = [*zip(SCALES, COUNTS, strict=True)]
    with helpers.count_compilations() as compilations:
        for x in micro_batches:
            old = carry
            carry, _ = jitted(carry, x)
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
    optimizer = token_accumulation(ADAM, every_n_tokens=10)

    def run(*micro_batches: Any) -> Any:
        start = PARAMS, optimizer.init(PARAMS)
        step = functools.partial(micro_step, optimizer)
        return jax.lax.scan(step, start, micro_batches)[0]

    lanes = [jnp.stack([x, x[::-1], 0 * x]) for x in (SCALES, COUNTS)]
    params, state = jax.jit(jax.vmap(run))(*lanes)
    alone = jax.jit(run)
    for lane in range(3):
        expected, _ = alone(*(x[lane] for x in lanes))
        got = jax.tree.map(operator.itemgetter(lane), params)
        assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]
    assert state.gradient_step.tolist() == [1, 1, 0]
    chex.assert_tree_all_finite(params)


def test_debug_nans_finds_none_in_windows_without_tokens():
    optimizer = token_accumulation(ADAM, 2, **SKIPS)
    with jax.debug_nans(True):
        state = optimizer.init(PARAMS)
        for _ in range(4):  # not in a jit, which shows its results alone
            _, state = optimizer.update(
                grads(0.0), state, PARAMS, num_tokens=0, value=0.0
            )
