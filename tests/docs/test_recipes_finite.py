"""Micro-batches that are not finite, as in `docs/recipes/apply_if_finite.md`."""

import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from wrapped_optimizers import (
    BATCHES,
    MICRO_BATCHES,
    PARAMS,
    RTOL,
    SGD,
    K,
    exactly,
    run,
)

from optax_tokenaccum import has_updated, make_train_step

pytestmark = pytest.mark.slow


def loss_fn_of_marked(params: Any, batch: Any) -> Any:
    """Return NaN for a micro-batch that is marked as bad."""
    loss_sum, n = helpers.loss_sum_fn(params, batch)
    return loss_sum * jnp.where(batch["bad"], jnp.nan, 1.0), n


# Nine micro-batches, of which the second is NaN; GOOD has the rows of the other eight.
MARKED = [m | {"bad": i == 1} for i, m in enumerate(MICRO_BATCHES[: K + 1])]
GOOD = {
    name: np.concatenate([m[name] for m in MARKED if not m["bad"]])
    for name in BATCHES[0]
}
# Large, so that the parameters after one step are mostly the update.
ONE_STEP = optax.sgd(100.0)


@functools.cache
def moved_by_the_good() -> Any:
    gradient = helpers.float64_gradient(PARAMS, GOOD)
    return jax.tree.map(lambda p, g: p - 100.0 * g, PARAMS, gradient)


def test_skip_not_finite_drops_a_micro_batch():
    step = make_train_step(
        loss_fn_of_marked, ONE_STEP, K, should_skip_update_fn=optax.skip_not_finite
    )
    state = step.init(PARAMS)
    for batch in MARKED:
        state, metrics = step(state, batch)
        assert bool(metrics.skipped) == batch["bad"]
    assert metrics.updated
    assert helpers.relative_error(state.params, moved_by_the_good()) < RTOL
    theirs = optax.MultiSteps(ONE_STEP, K, should_skip_update_fn=optax.skip_not_finite)
    naive, _ = run(
        theirs, naive=True, micro_batches=MARKED, loss_sum_fn=loss_fn_of_marked
    )
    assert helpers.relative_error(naive, moved_by_the_good()) > 0.01


def test_apply_if_finite_inside_drops_a_window():
    step = make_train_step(loss_fn_of_marked, optax.apply_if_finite(ONE_STEP, 3), K)
    state = step.init(PARAMS)
    for batch in MARKED[:K]:
        state, metrics = step(state, batch)
    chex.assert_trees_all_equal(state.params, PARAMS)
    assert metrics.updated and metrics.gradient_step == 1
    assert state.opt_state.inner_opt_state.total_notfinite == 1
    for batch in [m for m in MARKED if not m["bad"]]:
        state, metrics = step(state, batch)
    assert metrics.gradient_step == 2
    assert helpers.relative_error(state.params, moved_by_the_good()) < RTOL


def test_apply_if_finite_inside_gives_up_after_windows():
    step = make_train_step(loss_fn_of_marked, optax.apply_if_finite(SGD, 2), 2)
    state = step.init(PARAMS)
    for window in range(3):
        chex.assert_trees_all_equal(state.params, PARAMS)
        for batch in MARKED[1], MARKED[2]:
            state, metrics = step(state, batch)
        assert metrics.gradient_step == window + 1
    assert np.isnan(state.params["out"]).all()


def test_apply_if_finite_around_is_not_heard_by_the_accumulation():
    optimizer = optax.apply_if_finite(exactly(SGD, 1), 3)
    gradient = jax.tree.map(jnp.ones_like, PARAMS)
    nans = jax.tree.map(lambda g: g * jnp.nan, gradient)
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(gradient, state, PARAMS, num_tokens=1)
    assert has_updated(state)
    updates, state = optimizer.update(nans, state, PARAMS, num_tokens=1)
    assert not any(map(np.any, updates.values()))
    assert has_updated(state)
    _, state = optimizer.update(nans, state, PARAMS, num_tokens=0)
    assert state.total_notfinite == 2
    inside = exactly(SGD, 1)
    _, state = inside.update(nans, inside.init(PARAMS), PARAMS, num_tokens=0)
    assert not has_updated(state)
