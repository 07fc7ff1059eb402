"""The Linen `TrainState` gives the full batch exactly, with statistics."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from optax_tokenaccum import (
    MultiSteps,
    softmax_cross_entropy_sum,
    token_accumulation,
)
from optax_tokenaccum.linen import TrainState

K = 4
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0)
MICRO_BATCHES = helpers.cut(BATCH, K)
RTOL = helpers.RTOL["float32"]
PARAMS = {"w": jnp.zeros(2)}


class Model(nn.Module):
    """Embedding, statistics, logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(helpers.VOCABULARY, helpers.WIDTH)(tokens)
        nn.BatchNorm(use_running_average=False)(x)  # moves its statistics
        return nn.Dense(helpers.VOCABULARY)(nn.tanh(x))


class StateWithStatistics(TrainState):
    batch_stats: Any


def new() -> Any:
    model, tx = Model(), token_accumulation(SGD, K)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), int))
    return StateWithStatistics.create(apply_fn=model.apply, tx=tx, **variables)


def loss_fn(params: Any, state: Any, batch: Any) -> Any:
    logits, changed = state.apply_fn(
        {"params": params, "batch_stats": state.batch_stats},
        batch["tokens"],
        mutable=["batch_stats"],
    )
    loss_sum, n = softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])
    return loss_sum, (n, changed)


value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)


def train_step(state: Any, batch: Any) -> Any:
    (loss, (n, changed)), grads = value_and_grad(state.params, state, batch)
    return state.apply_gradients(grads=grads, num_tokens=n, value=loss, **changed)


@jax.jit
def mean_gradient(state: Any, batch: Any) -> Any:
    (_, (n, changed)), grads = value_and_grad(state.params, state, batch)
    return jax.tree.map(lambda g: g / n, grads), changed["batch_stats"]


def test_windows_are_the_full_batches_and_the_naive_loop_is_not():
    """One program, which donates its state, and moves statistics as a plain loop."""
    state, step = new(), jax.jit(train_step, donate_argnums=0)
    plain = jax.tree.map(np.array, state.batch_stats)
    for window in range(2):
        (expected, _), means = mean_gradient(state, BATCH), []
        before, compiled = jax.tree.map(np.array, state.params), []
        for i, micro_batch in enumerate(MICRO_BATCHES):
            chex.assert_trees_all_equal(state.params, before)
            assert (state.step, state.opt_state.mini_step) == (window, i)
            mean, plain = mean_gradient(state.replace(batch_stats=plain), micro_batch)
            means.append(mean)
            with helpers.count_compilations() as compilations:
                state = step(state, micro_batch)
            compiled.append(len(compilations))
            assert helpers.relative_error(state.batch_stats, plain) < RTOL
        assert sum(compiled) == (window == 0)
        # Given to SGD; parameter differences are rounded.
        given = state.opt_state.inner_opt_state[0].trace
        assert helpers.relative_error(given, expected) < RTOL
        moved = jax.tree.map(np.subtract, before, given)
        chex.assert_trees_all_equal(state.params, moved)
        assert state.step == window + 1
        naive = jax.tree.map(lambda *xs: sum(xs) / K, *means)
        assert helpers.relative_error(naive, expected) > 0.02


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
        state = TrainState.create(apply_fn=None, params=PARAMS, tx=FORMS[form])
        state = state.close_window()  # one without micro-batches changes nothing
        for grad, n in counts:
            chex.assert_trees_all_equal((state.step, state.params), (0, PARAMS))
            grads = {"w": jnp.full(2, grad)}
            state = state.apply_gradients(grads=grads, num_tokens=n)
        state = state.close_window() if len(counts) == 1 else state
        assert state.step == 1
        chex.assert_trees_all_equal(state.params, {"w": jnp.full(2, mean)})
