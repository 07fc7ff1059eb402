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
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from optax_tokenaccum import (
    MultiSteps,
    make_train_step,
    softmax_cross_entropy_sum,
    token_accumulation,
)
from optax_tokenaccum.linen import TrainState

K = 4
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0)
MICRO_BATCHES = helpers.cut(BATCH, K)
RTOL = helpers.RTOL["float32"]


class Model(nn.Module):
    """Embedding, statistics, logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(helpers.VOCABULARY, helpers.WIDTH)(tokens)
        nn.BatchNorm(use_running_average=False)(x)  # moves its statistics
        return nn.Dense(helpers.VOCABULARY)(nn.tanh(x))


class StateWithStatistics(TrainState):
    batch_stats: Any


class FlaxState(train_state.TrainState):
    batch_stats: Any


def new(tx: Any, kind: Any = StateWithStatistics) -> Any:
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), int))
    return kind.create(apply_fn=model.apply, tx=tx, **variables)


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
    (_, (n, _)), grads = value_and_grad(state.params, state, batch)
    return jax.tree.map(lambda g: g / n, grads)


def applied(state: Any) -> Any:
    """Return the last gradient given to SGD; parameter differences are rounded."""
    return state.opt_state.inner_opt_state[0].trace


def test_windows_are_the_full_batches_and_the_naive_loop_is_not():
    """One program, which donates its state, and moves statistics as a plain loop."""
    state, step = new(token_accumulation(SGD, K)), jax.jit(train_step, donate_argnums=0)
    plain = state.batch_stats
    for seed in (0, 1):
        batch = helpers.ragged_batch(seed)
        expected = mean_gradient(state, batch)
        before, compiled = jax.tree.map(np.array, state.params), []
        for micro_batch in helpers.cut(batch, K):
            chex.assert_trees_all_equal(state.params, before)
            assert (state.step, state.opt_state.mini_step) == (seed, len(compiled))
            stand_in = state.replace(batch_stats=plain)
            _, (_, changed) = loss_fn(state.params, stand_in, micro_batch)
            plain = jax.tree.map(np.array, changed["batch_stats"])
            with helpers.count_compilations() as compilations:
                state = step(state, micro_batch)
            compiled.append(len(compilations))
            assert helpers.relative_error(state.batch_stats, plain) < RTOL
        assert sum(compiled) == (seed == 0)
        assert helpers.relative_error(applied(state), expected) < RTOL
        moved = jax.tree.map(np.subtract, before, applied(state))
        chex.assert_trees_all_equal(state.params, moved)
        assert state.step == seed + 1

    tx = optax.MultiSteps(SGD, K).gradient_transformation()
    naive = new(tx, FlaxState)
    before, expected = naive.params, mean_gradient(naive, BATCH)
    for micro_batch in MICRO_BATCHES:
        naive = naive.apply_gradients(grads=mean_gradient(naive, micro_batch))
    got = helpers.difference(before, naive.params)
    assert helpers.relative_error(got, expected) > 0.02


def fp8_params(w: Any, s: Any) -> Any:
    """Flax keeps scales in the parameters and their successors in the gradients."""
    params = {"w": jnp.full(2, w)}
    return {"params": params, OVERWRITE_WITH_GRADIENT: {"s": jnp.full(1, s)}}


def test_scales_of_8_bit_floats_are_refused():
    """Summed and divided, they would be ruined without an error."""
    params = fp8_params(0.0, 1.0)
    with pytest.raises(ValueError, match=OVERWRITE_WITH_GRADIENT):
        TrainState.create(apply_fn=None, params=params, tx=token_accumulation(SGD, 3))
    with pytest.raises(ValueError, match=OVERWRITE_WITH_GRADIENT):
        make_train_step(lambda params, x: (jnp.sum(x), 1), SGD, 3).init(params)


ACCUMULATING = token_accumulation(SGD, 2)
PARAMS = {"w": jnp.zeros(2)}
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
        chex.assert_trees_all_equal(state.params, PARAMS)
        for grad, n in counts:
            assert state.step == 0
            grads = {"w": jnp.full(2, grad)}
            state = state.apply_gradients(grads=grads, num_tokens=n)
        if len(counts) == 1:
            assert state.step == 0
            state = state.close_window()
        chex.assert_trees_all_equal(state.params, {"w": jnp.full(2, mean)})
        assert state.step == 1
