"""The class that replaces `optax.MultiSteps`, and checkpoints of optax's class."""

from typing import Any

import chex
import helpers
import jax
import numpy as np
import optax
import pytest
from helpers import PARAMS, grads

from optax_tokenaccum import (
    MultiSteps,
    close_window,
    from_multi_steps_state,
    has_updated,
)


@pytest.mark.parametrize(
    ("use_grad_mean", "in_a_chain"), [(True, True), (False, False)]
)
def test_counts_of_1_give_what_optax_gives_and_its_checkpoints_go_on(
    use_grad_mean: bool, in_a_chain: bool
):
    def make(kind: Any) -> Any:
        made = kind(optax.sgd(0.1, 0.9), 3, use_grad_mean).gradient_transformation()
        return optax.chain(optax.clip(9.0), made) if in_a_chain else made

    ours, theirs = map(make, (MultiSteps, optax.MultiSteps))
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    state, their_state = ours.init(PARAMS), theirs.init(PARAMS)
    signatures = helpers.signatures(state)
    for i in range(9):
        if i == 6:  # at the boundary of a window
            found = their_state, jax.device_get(their_state)
            state, other = (from_multi_steps_state(ours, x, PARAMS) for x in found)
            chex.assert_trees_all_equal(other, state)
            for taken in (state, other):
                assert helpers.signatures(taken) == signatures
        updates, state = update(grads(i - 3.0), state, PARAMS, num_tokens=1)
        expected, their_state = their_update(grads(i - 3.0), their_state, PARAMS)
        chex.assert_trees_all_close(updates, expected, rtol=helpers.RTOL["float32"])
        for name in ("mini_step", "gradient_step"):
            assert optax.tree.get(state, name) == optax.tree.get(their_state, name)
        assert has_updated(state) == (i % 3 == 2)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_plain_sum_of_what_was_given(gradients: Any):
    inner = optax.with_extra_args_support(optax.sgd(1.0))
    optimizer = MultiSteps(inner, 8, use_grad_mean=False, gradients=gradients)
    assert optimizer.inner_opt is inner
    state = optimizer.init(PARAMS)
    for scale, n in [(2.0, 5), (10.0, 9), (np.nan, 0)]:
        _, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=n)
    updates, state = close_window(optimizer, state, PARAMS)
    chex.assert_trees_all_equal(updates, grads(-12.0))
    assert optimizer.has_updated(state)
