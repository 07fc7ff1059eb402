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
    train_step,
    transformation,
    window_step,
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


def error_of(before: Any, after: Any, *batches: Batch) -> float:
    """The error of the gradient that was applied."""
    applied = helpers.difference(before, after)
    return helpers.relative_error(applied, exact(before, *batches))


@pytest.mark.parametrize("way", WAYS)
def test_windows_with_little_in_them(way: Any):
    """A mean of means, levanter's NaN, MaxText's `max(count, 1)`.

    A window that begins without tokens finds the sums of the last one.
    """
    windows = [SHORT, LONG], [EMPTY, LONG], [LONG, EMPTY], FRACTIONS, [EMPTY, EMPTY]
    before, theirs = PARAMS, program(optax_multi_steps)
    *after, unchanged = program(way)(PARAMS, [*windows])
    for window, params in zip(windows, after, strict=False):
        assert error_of(before, params, *window) < RTOL
        naive = error_of(before, *theirs(before, [window]), *window)
        has_empty = any(batch is EMPTY for batch in window)
        assert np.isnan(naive) if has_empty else naive > 0.01
        before = params
    chex.assert_trees_all_equal(unchanged, before)
    (nan,) = program(way)(PARAMS, [[NAN, LONG]])
    assert np.isnan(nan["w"]).all()  # without a guard, the NaN shows


DECAY, RATES = 0.125, [0.25, 0.125]


def by_tokens(updates: Any, state: Any, _: Any, *, num_tokens: Any, **__: Any) -> Any:
    return jax.tree.map(lambda u: u * num_tokens / 8, updates), state


INNER = optax.apply_if_finite(
    optax.chain(
        optax.GradientTransformationExtraArgs(optax.init_empty_state, by_tokens),
        optax.add_decayed_weights(DECAY),
        optax.sgd(lambda step: jnp.asarray(RATES, jnp.float32)[step]),
    ),
    100,
)


@pytest.mark.parametrize("way", [transformation, train_step, window_step])
def test_an_optimizer_runs_once_a_window_and_knows_its_tokens(way: Any):
    """Weight decay and schedules ran once a micro-batch, in Keras on JAX.

    One NaN poisoned every later update: optax 0.2.8 resets the sums by multiplying them
    by 0. And its class tells an optimizer nothing of tokens.
    """
    windows = [[NAN, LONG], [SHORT, LONG], [EMPTY, LONG]]
    poisoned = optax_multi_steps(loss_fn, GUARDED, 2)(PARAMS, windows[:2])
    chex.assert_trees_all_equal(poisoned[-1], PARAMS)
    unchanged, *after = way(loss_fn, INNER, 2)(PARAMS, windows)
    chex.assert_trees_all_equal(unchanged, PARAMS)
    expected = np.asarray(PARAMS["w"], np.float64)
    for i, (window, got) in enumerate(zip(windows[1:], after, strict=True)):

        def moved(w: Any, gradient: Any, rate: float = RATES[i]) -> Any:
            return w - rate * (gradient + DECAY * w)

        gradient = exact({"w": expected}, *window)["w"] * (5, 4)[i] / 8
        twice = moved(moved(expected, 0), gradient)
        expected = moved(expected, gradient)
        assert helpers.relative_error(got, {"w": expected}) < RTOL
        assert helpers.relative_error(twice, expected) > 0.01
