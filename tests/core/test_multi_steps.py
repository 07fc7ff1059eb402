"""The class that replaces `optax.MultiSteps`, and checkpoints of optax's class."""

from typing import Any

import chex
import helpers
import jax
import numpy as np
import optax
import pytest
from helpers import PARAMS, grads

from optax_tokenaccum import MultiSteps, close_window, from_multi_steps_state


@pytest.mark.parametrize("use_grad_mean", [True, False])
def test_count_of_1_gives_what_optax_gives(use_grad_mean: bool):
    theirs = optax.MultiSteps(optax.sgd(0.1, 0.9), 3, use_grad_mean)
    ours = MultiSteps(optax.sgd(0.1, 0.9), 3, use_grad_mean)
    assert [f.__name__ for f in (ours.init, ours.update)] == ["init", "update"]
    state, their_state = ours.init(PARAMS), theirs.init(PARAMS)
    params = their_params = PARAMS
    for i in range(9):
        updates, state = ours.update(grads(i - 3.0), state, params, num_tokens=1)
        params = optax.apply_updates(params, updates)
        updates, their_state = theirs.update(grads(i - 3.0), their_state, their_params)
        their_params = optax.apply_updates(their_params, updates)
        assert bool(ours.has_updated(state)) == bool(theirs.has_updated(their_state))
        assert int(state.mini_step) == int(their_state.mini_step)
        assert helpers.relative_error(params, their_params) < helpers.RTOL["float32"]


def test_means_are_weighted_and_the_mean_of_means_differs():
    for gradients, second in (("mean", 10.0), ("sum", 90.0)):
        optimizer = MultiSteps(optax.sgd(1.0), 2, gradients=gradients)
        state = optimizer.init(PARAMS)
        _, state = optimizer.update(grads(2.0), state, PARAMS, num_tokens=1)
        updates, state = optimizer.update(grads(second), state, PARAMS, num_tokens=9)
        chex.assert_trees_all_equal(updates, grads(-9.2))
    theirs = optax.MultiSteps(optax.sgd(1.0), 2)
    state = theirs.init(PARAMS)
    _, state = theirs.update(grads(2.0), state, PARAMS)
    updates, state = theirs.update(grads(10.0), state, PARAMS)
    chex.assert_trees_all_equal(updates, grads(-6.0))


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_plain_sum_of_what_was_given(gradients: Any):
    optimizer = MultiSteps(optax.sgd(1.0), 3, use_grad_mean=False, gradients=gradients)
    state = optimizer.init(PARAMS)
    for scale, n in [(2.0, 5), (10.0, 9), (np.nan, 0)]:
        updates, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=n)
    chex.assert_trees_all_equal(updates, grads(-12.0))


def test_inner_opt_and_close_window():
    inner = optax.with_extra_args_support(optax.sgd(1.0))
    optimizer = MultiSteps(inner, 8)
    assert optimizer.inner_opt is inner
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(grads(2.0), state, PARAMS, num_tokens=4)
    updates, state = close_window(optimizer, state, PARAMS)
    chex.assert_trees_all_equal(updates, grads(-2.0))
    assert optimizer.has_updated(state)


@pytest.mark.parametrize("form", ["alone", "chain"])
def test_checkpoint_of_optax_goes_on_at_a_window_boundary(form: str):
    def wrap(tx: Any) -> Any:
        return tx if form == "alone" else optax.chain(optax.clip(9.0), tx)

    optimizer, theirs = (
        wrap(kind(optax.sgd(0.1, 0.9), 3).gradient_transformation())
        for kind in (MultiSteps, optax.MultiSteps)
    )
    old = theirs.init(PARAMS)
    for i in range(6):
        _, old = theirs.update(grads(i + 1.0), old, PARAMS)
    from_host = from_multi_steps_state(optimizer, jax.device_get(old), PARAMS)
    state = from_multi_steps_state(optimizer, old, PARAMS)
    chex.assert_trees_all_equal(from_host, state)
    for taken in (state, from_host):
        signatures = helpers.signatures(optimizer.init(PARAMS))
        assert helpers.signatures(taken) == signatures
    assert int(optax.tree.get(state, "gradient_step")) == 2
    for i in range(3):
        updates, state = optimizer.update(grads(i - 1.5), state, PARAMS, num_tokens=1)
        expected, old = theirs.update(grads(i - 1.5), old, PARAMS)
    assert helpers.relative_error(updates, expected) < helpers.RTOL["float32"]
