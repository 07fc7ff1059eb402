"""Values that are known inside a trace: captured arrays, constant counts."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ways_in

from optax_tokenaccum import close_window, make_train_step, token_accumulation

K, N, TWICE_N = jnp.int32(2), jnp.float32(4), jnp.float32(8)
WINDOWS = [[ways_in.batch_of(i, [1, 1, 1, 1]) for i in range(2)]]
SCHEDULES = {
    "k": {"every_k_schedule": lambda _: jnp.int32(2)},
    "k, made before": {"every_k_schedule": lambda _: K},
    "tokens": {"every_n_tokens": lambda _: TWICE_N},
}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return ways_in.loss_fn(params, batch)[0], N


@pytest.mark.parametrize("way", ways_in.WAYS)
def test_a_count_that_is_an_array_closed_over(way: Any):
    got = way(loss_fn, ways_in.SGD, 2)(ways_in.PARAMS, WINDOWS)
    traced = way(ways_in.loss_fn, ways_in.SGD, 2)(ways_in.PARAMS, WINDOWS)
    chex.assert_trees_all_equal(got, traced)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_that_returns_an_array_closed_over(schedule: Any):
    step = make_train_step(loss_fn, ways_in.SGD, **schedule)
    state, updated = step.init(ways_in.PARAMS), []
    for batch in WINDOWS[0]:
        state, metrics = step(state, batch)
        updated.append(bool(metrics.updated))
    assert updated == [False, True]


def test_apply_if_finite_outside_of_jit():
    tx = optax.apply_if_finite(token_accumulation(optax.sgd(1.0), 1), 3)
    gradient = {"w": jnp.full(4, 8.0)}
    state = tx.init(ways_in.PARAMS)
    updates, _ = tx.update(gradient, state, ways_in.PARAMS, num_tokens=N)
    chex.assert_trees_all_equal(updates, {"w": jnp.full(4, -2.0)})


@pytest.mark.parametrize("count", [-1.0, np.inf, np.nan])
def test_a_bad_count_that_is_known_raises_in_a_trace(count: float):
    tx, bad = token_accumulation(optax.sgd(1.0), 2), jnp.float32(count)

    @jax.jit
    def update(state: Any) -> Any:
        return tx.update(ways_in.PARAMS, state, ways_in.PARAMS, num_tokens=bad)

    with pytest.raises(ValueError, match="num_tokens must be finite"):
        update(tx.init(ways_in.PARAMS))


def test_everything_known_and_still_traced():
    tx = token_accumulation(optax.sgd(1.0), 2)
    state = tx.init(ways_in.PARAMS)
    gradient = {"w": jnp.full(4, 8.0)}

    @jax.jit
    def window() -> Any:
        arguments = gradient, state, ways_in.PARAMS
        _, opened = tx.update(*arguments, num_tokens=N, value=N)
        return close_window(tx, opened, ways_in.PARAMS)[0]

    chex.assert_trees_all_equal(window(), {"w": jnp.full(4, -2.0)})
