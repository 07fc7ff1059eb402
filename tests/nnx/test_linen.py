"""The Linen `TrainState` around every form of an optimizer; see test_promises.py."""

from typing import Any

import chex
import jax.numpy as jnp
import optax
import pytest

from optax_tokenaccum import (
    MultiSteps,
    token_accumulation,
)
from optax_tokenaccum.linen import TrainState

SGD = optax.sgd(1.0)
PARAMS = {"w": jnp.zeros(2)}


class StateWithStatistics(TrainState):
    batch_stats: Any


ACCUMULATING = token_accumulation(SGD, 2)
FORMS = {
    "MultiSteps": MultiSteps(SGD, 2, gradients="sum"),
    "chain": optax.chain(optax.identity(), ACCUMULATING),
    "partition": optax.partition({"all": ACCUMULATING}, "all"),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: token_accumulation(optax.sgd(rate), 2)
    )(1.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_count_reaches_every_form_of_tx(form: str):
    for counts, mean in (
        ([(8.0, 1), (4.0, 3)], -3.0),  # a mean of means would be -14/3
        ([(8.0, 4)], -2.0),  # a partial window
    ):
        state = StateWithStatistics.create(
            apply_fn=None, params=PARAMS, tx=FORMS[form], batch_stats=0
        )
        state = state.close_window()  # one without micro-batches changes nothing
        for grad, n in counts:
            chex.assert_trees_all_equal((state.step, state.params), (0, PARAMS))
            grads = {"w": jnp.full(2, grad)}
            state = state.apply_gradients(grads=grads, num_tokens=n, batch_stats=n)
            assert state.batch_stats == n  # whether the window closes or not
        state = state.close_window() if len(counts) == 1 else state
        assert state.step == 1
        chex.assert_trees_all_equal(state.params, {"w": jnp.full(2, mean)})
