"""What other projects summed or divided wrongly: their answer, and every way in."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ways_in import (
    PARAMS,
    SGD,
    WAYS,
    Batch,
    batch_of,
    exact,
    loss_fn,
    optax_multi_steps,
    program,
)

RTOL = helpers.RTOL["float32"]

FOUR, NONE = [1.0] * 4, [0.0] * 4
SHORT, LONG, EMPTY = (
    batch_of(1, [1.0, 0.0, 0.0, 0.0]),
    batch_of(2, FOUR),
    batch_of(4, NONE),
)
FRACTIONS = [batch_of(1, [0.125, 0.0, 0.0, 0.0]), batch_of(2, [0.0625] * 4)]
NAN = batch_of(3, FOUR) | {"y": np.full(4, np.nan, np.float32)}
# An applied NaN stays in the parameters; this optimizer blocks all NaN updates.
GUARDED = optax.apply_if_finite(SGD, 100)


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


def error_of(before: Any, after: Any, *batches: Batch) -> float:
    """The error of the gradient that was applied."""
    applied = helpers.difference(before, after)
    return helpers.relative_error(applied, exact(before, *batches))


def test_windows_with_little_in_them(way: Any):
    """A mean of means, levanter's NaN, MaxText's `max(count, 1)`."""
    run, theirs = program(way), optax_multi_steps()
    for window in ([SHORT, LONG], [EMPTY, LONG], [LONG, EMPTY], FRACTIONS):
        assert error_of(PARAMS, *run(PARAMS, [window]), *window) < RTOL
        naive = error_of(PARAMS, *theirs(PARAMS, [window]), *window)
        assert (
            np.isnan(naive) if any(batch is EMPTY for batch in window) else naive > 0.01
        )
    (unchanged,) = run(PARAMS, [[EMPTY, EMPTY]])
    chex.assert_trees_all_equal(unchanged, PARAMS)


def test_one_nan_micro_batch_poisoned_every_later_update(way: Any):
    """optax 0.2.8 resets the sums by multiplying them by 0."""
    windows = [[NAN, LONG], [SHORT, LONG], [LONG, SHORT]]
    theirs = optax_multi_steps(GUARDED)(PARAMS, windows)
    chex.assert_trees_all_equal(theirs[-1], PARAMS)
    first, second, third = way(loss_fn, GUARDED, 2)(PARAMS, windows)
    chex.assert_trees_all_equal(first, PARAMS)
    assert error_of(first, second, SHORT, LONG) < RTOL
    assert error_of(second, third, LONG, SHORT) < RTOL
    (unguarded,) = program(way)(PARAMS, [[NAN, LONG]])
    assert np.isnan(unguarded["w"]).all()  # without a guard, the NaN shows


def test_dropped_micro_batch_stayed_in_the_denominator(way: Any):
    """prime-rl drops a non-finite gradient but counts its tokens."""
    (ours,) = program(way, **helpers.SKIPS)(PARAMS, [[SHORT, NAN, LONG]])
    assert error_of(PARAMS, ours, SHORT, LONG) < RTOL


def test_the_inner_optimizer_knows_the_tokens_of_a_window(way: Any):
    """A mean times its tokens is the sum; optax's class tells an optimizer nothing."""

    def scale(updates: Any, state: Any, _: Any, *, num_tokens: Any, **__: Any) -> Any:
        return jax.tree.map(lambda u: u * num_tokens, updates), state + num_tokens

    def init(_: Any) -> Any:
        return jnp.zeros(())

    by_tokens = optax.GradientTransformationExtraArgs(init, scale)
    inner = optax.chain(by_tokens, optax.sgd(2.0**-5))
    windows = [[SHORT, LONG], [EMPTY, LONG]]
    before = PARAMS
    after = way(loss_fn, inner, 2)(PARAMS, windows)
    for window, tokens, params in zip(windows, (5, 4), after, strict=True):
        moved = helpers.difference(before, params)
        expected = jax.tree.map(lambda g, n=tokens: g * n / 32, exact(before, *window))
        assert helpers.relative_error(moved, expected) < 4 * RTOL
        before = params


def test_weight_decay_and_schedules_ran_per_micro_batch(way: Any):
    """Keras on JAX runs the whole optimizer on every micro-step and masks gradients."""
    decay, rates = 0.125, np.array([0.25, 0.0625, 1.0, 1.0])
    inner = optax.chain(
        optax.add_decayed_weights(decay),
        optax.sgd(lambda step: jnp.asarray(rates, jnp.float32)[step]),
    )
    windows = [[SHORT, LONG], [LONG, SHORT]]
    theirs, state = PARAMS, inner.init(PARAMS)
    expected = jax.tree.map(lambda w: np.asarray(w, np.float64), PARAMS)
    for rate, window in zip(rates, windows, strict=False):
        for gradient in ({"w": np.zeros(4)}, exact(theirs, *window)):
            gradient = jax.tree.map(jnp.float32, gradient)
            updates, state = inner.update(gradient, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
        gradient = exact(expected, *window)["w"] + decay * expected["w"]
        expected = {"w": expected["w"] - rate * gradient}
    assert helpers.relative_error(theirs, expected) > 0.01
    ours = way(loss_fn, inner, 2)(PARAMS, windows)[-1]
    assert helpers.relative_error(ours, expected) < RTOL
