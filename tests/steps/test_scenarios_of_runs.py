"""Mistakes of other projects over a run; `test_scenarios.py` has the index."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from ways_in import PARAMS, SGD, batch_of, exact, loss_fn, mean_of

from optax_tokenaccum import (
    MultiSteps,
    make_train_step,
)

RTOL = helpers.RTOL["float32"]

# The first micro-batch is much shorter than the others.
STREAM = [
    batch_of(seed, [1.0] * n + [0.0] * (4 - n)) for seed, n in enumerate([1, 4, 3, 2])
]
GRADS = {"w": jnp.ones(4)}
NAN_GRADS = {"w": jnp.full(4, jnp.nan)}
RATE = 0.0625  # a power of two, and small: parameters do not diverge
INNER = optax.sgd(RATE)


def sgd_over(windows: Any) -> Any:
    """Return float64 parameters after one exact SGD step per window."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), PARAMS)
    for window in windows:
        gradient = exact(params, *window)
        params = jax.tree.map(lambda w, g: w - RATE * g, params, gradient)
    return params


def is_exact(params: Any, expected: Any) -> bool:
    return helpers.relative_error(params, expected) < RTOL


def test_has_updated_was_true_after_a_skip_at_the_start_of_a_window():
    """optax 0.2.8 only checks that `mini_step` is 0 and `gradient_step` is not."""

    def told(optimizer: Any, **count: Any) -> Any:
        update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
        answers = []
        for gradient in (None, GRADS, NAN_GRADS):
            if gradient is not None:
                _, state = update(gradient, state, PARAMS, **count)
            answers.append(bool(optimizer.has_updated(state)))
        return answers, int(state.skip_state["num_not_finite"])

    skips = {"should_skip_update_fn": optax.skip_not_finite}
    assert told(optax.MultiSteps(SGD, 1, **skips)) == ([False, True, True], 4)
    assert told(MultiSteps(SGD, 1, **skips), num_tokens=1) == ([False, True, False], 4)


def masks_of(params: Any, batch: Any, *, rng: Any) -> Any:
    """A loss whose gradient is finite where `batch["y"]` is; `aux` is its mask."""
    loss_sum, n = loss_fn(params, batch)
    return loss_sum, (n, jax.random.bernoulli(rng, 0.5, (64,)))


@pytest.mark.parametrize(
    "key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"]
)
def test_every_micro_batch_drew_the_same_dropout_mask(kind: str, key: Any):
    """t5x reuses the step's key; here even an empty micro-batch gets a new key."""
    step = helpers.new_train_step(kind, masks_of, SGD, 2, has_aux=True)
    state, ours, theirs = step.init(PARAMS), [], []
    empty = batch_of(0, [0.0] * 4)
    for batch in [empty, *STREAM, *STREAM[:3]]:
        state, metrics = step(state, batch, rng=key(0))
        ours.append(tuple(np.asarray(metrics.aux)))
        theirs.append(tuple(np.asarray(masks_of(PARAMS, batch, rng=key(0))[1][1])))
    assert (len(set(ours)), len(set(theirs))) == (8, 1)


def test_mask_was_another_after_a_rejection():
    """A key folded with the call number depends on rejected micro-batches."""
    skips = {"should_skip_update_fn": optax.skip_not_finite}
    step = make_train_step(masks_of, SGD, 9, has_aux=True, **skips)
    bad = STREAM[0] | {"y": np.full(4, np.nan, np.float32)}
    ours, theirs, key = [], [], jax.random.key(0)
    for stream in ([STREAM[0], bad, STREAM[1]], STREAM[:2]):
        state = step.init(PARAMS)
        for batch in stream:
            state, metrics = step(state, batch, rng=key)
        ours.append(metrics.aux)
        of_call = jax.random.fold_in(key, len(stream))
        theirs.append(masks_of(PARAMS, batch, rng=of_call)[1][1])
    assert np.array_equal(*ours) and not np.array_equal(*theirs)


def test_window_ran_across_an_epoch_boundary(kind: str):
    """OpenRLHF 1337: the counter continues over epochs of 3 with windows of 2."""
    first, second = STREAM[:3], STREAM[:0:-1]
    across = [first[:2], [first[2], second[0]], second[1:]]
    within = [first[:2], first[2:], second[:2], second[2:]]
    step = helpers.new_train_step(kind, loss_fn, INNER, 2)
    after = {}
    for closes in (False, True):
        state = step.init(PARAMS)
        for epoch in (first, second):
            for batch in epoch:
                state, metrics = step(state, batch)
            if closes:
                state, metrics = step.close_window(state)
        after[closes] = state.params
    assert int(metrics.gradient_step) == 4
    assert is_exact(after[False], sgd_over(across))
    assert not is_exact(after[False], sgd_over(within))
    assert is_exact(after[True], sgd_over(within))


def test_resume_in_mid_window_lost_micro_batches(kind: str):
    """OneTrainer 1465 saves parameters and optimizer, but not the open window."""
    step = helpers.new_train_step(kind, loss_fn, INNER, 4)
    state = step.init(PARAMS)
    for batch in STREAM[:2]:
        state, _ = step(state, batch)
    saved = jax.tree.map(np.array, state)
    resumed = helpers.new_train_step(kind, loss_fn, INNER, 4)
    target = jax.eval_shape(resumed.init, PARAMS)
    restored = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), saved, target)
    theirs = resumed.init(saved.params)
    for batch in STREAM[2:]:
        state, metrics = step(state, batch)
        restored, resumed_metrics = resumed(restored, batch)
        theirs, _ = resumed(theirs, batch)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal(resumed_metrics, metrics)
    assert metrics.updated
    theirs, _ = resumed.close_window(theirs)
    assert is_exact(restored.params, sgd_over([STREAM]))
    assert not is_exact(theirs.params, sgd_over([STREAM]))


def test_counters_counted_micro_steps(kind: str):
    """EasyLM 108, MaxText 812: schedules and logs use the step of a TrainState."""
    theirs = TrainState.create(
        apply_fn=None, params=PARAMS, tx=optax.MultiSteps(INNER, 2)
    )
    gradient = jax.jit(jax.grad(mean_of(loss_fn), has_aux=True))
    step = helpers.new_train_step(kind, loss_fn, INNER, 2)
    state = step.init(PARAMS)
    for batch in STREAM:
        theirs = theirs.apply_gradients(grads=gradient(theirs.params, batch)[0])
        state, metrics = step(state, batch)
    assert (int(theirs.step), int(metrics.gradient_step)) == (4, 2)
