"""The Linen `TrainState` gives the full batch exactly, with statistics and dropout."""

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
    softmax_cross_entropy_sum,
    token_accumulation,
)
from optax_tokenaccum.linen import TrainState

K = 4
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0)


class Model(nn.Module):
    """Embedding, hidden layer, logits; optional dropout and batch statistics."""

    dropout: float = 0.0
    batch_norm: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(helpers.VOCABULARY, helpers.WIDTH)(tokens)
        x = nn.Dense(helpers.WIDTH)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(self.dropout, deterministic=not self.dropout)(nn.tanh(x))
        return nn.Dense(helpers.VOCABULARY)(x)


class StateWithStatistics(TrainState):
    batch_stats: Any = None


def new(tx: Any, kind: Any = TrainState, **options: Any) -> Any:
    model = Model(**options)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 4), int))
    rest = {name: tree for name, tree in variables.items() if name != "params"}
    return kind.create(apply_fn=model.apply, params=variables["params"], tx=tx, **rest)


def loss_fn(params: Any, state: Any, batch: Any, **rngs: Any) -> Any:
    collections = ["batch_stats"] if hasattr(state, "batch_stats") else []
    logits, changed = state.apply_fn(
        {"params": params, **{name: getattr(state, name) for name in collections}},
        batch["tokens"],
        rngs=rngs,
        mutable=collections,
    )
    loss_sum, n = softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])
    return loss_sum, (n, changed)


@jax.jit
def train_step(state: Any, batch: Any) -> Any:
    grads, (n, changed) = jax.grad(loss_fn, has_aux=True)(state.params, state, batch)
    return state.apply_gradients(grads=grads, num_tokens=n, **changed)


def mean_gradient(state: Any, batch: Any) -> Any:
    (_, (n, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        state.params, state, batch
    )
    return jax.tree.map(lambda g: g / n, grads)


def applied(state: Any) -> Any:
    """Return the last gradient given to SGD; parameter differences are rounded."""
    return state.opt_state.inner_opt_state[0].trace


def test_windows_are_the_full_batches_and_the_naive_loop_is_not():
    state = new(token_accumulation(SGD, K))
    for seed in (0, 1):
        batch = helpers.ragged_batch(seed)
        before, expected = state.params, mean_gradient(state, batch)
        for micro_batch in helpers.cut(batch, K):
            chex.assert_trees_all_equal(state.params, before)
            assert state.step == seed
            state = train_step(state, micro_batch)
        error = helpers.relative_error(applied(state), expected)
        assert error < helpers.RTOL["float32"]
        moved = jax.tree.map(np.subtract, before, applied(state))
        chex.assert_trees_all_equal(state.params, moved)
        assert state.step == seed + 1

    tx = optax.MultiSteps(SGD, K).gradient_transformation()
    naive = new(tx, train_state.TrainState)
    before, expected = naive.params, mean_gradient(naive, BATCH)
    for micro_batch in helpers.cut(BATCH, K):
        naive = naive.apply_gradients(grads=mean_gradient(naive, micro_batch))
    got = helpers.difference(before, naive.params)
    assert helpers.relative_error(got, expected) > 0.02
    assert naive.step == K


def test_a_partial_window_closes_with_its_own_denominator():
    state = new(token_accumulation(SGD, 99))
    untouched = state.close_window()
    chex.assert_trees_all_equal(untouched.params, state.params)
    assert untouched.step == 0
    expected = mean_gradient(state, BATCH)
    for micro_batch in helpers.cut(BATCH, K):
        state = train_step(state, micro_batch)
    state = jax.jit(TrainState.close_window)(state)
    assert state.step == 1
    error = helpers.relative_error(applied(state), expected)
    assert error < helpers.RTOL["float32"]


def test_close_window_in_a_call():
    state = new(token_accumulation(SGD))
    expected = mean_gradient(state, BATCH)
    for i, micro_batch in enumerate(helpers.cut(BATCH, K)):
        (loss_sum, (n, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params, state, micro_batch
        )
        state = state.apply_gradients(
            grads=grads, num_tokens=n, value=loss_sum, close_window=i == K - 1
        )
    assert state.step == 1
    error = helpers.relative_error(applied(state), expected)
    assert error < helpers.RTOL["float32"]


def test_batch_statistics_move_in_every_micro_batch_as_without_accumulation():
    state = new(token_accumulation(SGD, K), StateWithStatistics, batch_norm=True)
    plain = state
    for micro_batch in helpers.cut(BATCH, K):
        state = train_step(state, micro_batch)
        _, (_, changed) = loss_fn(plain.params, plain, micro_batch)
        plain = plain.replace(**changed)
        error = helpers.relative_error(state.batch_stats, plain.batch_stats)
        assert error < helpers.RTOL["float32"]


def test_dropout_with_a_key_of_both_counters():
    """`step` does not change within a window, so masks made from it would be equal."""
    state = new(token_accumulation(SGD, K), dropout=0.5)
    micro_batch = helpers.cut(BATCH, K)[0]

    @jax.jit
    def step(state: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(1), state.step)
        key = jax.random.fold_in(key, state.opt_state.mini_step)
        (loss, (n, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params, state, micro_batch, dropout=key
        )
        return state.apply_gradients(grads=grads, num_tokens=n), loss

    losses = []
    for _ in range(K):
        state, loss = step(state)
        losses.append(float(loss))
    assert len(set(losses)) == K


def test_one_compilation_over_many_windows_with_donation():
    state = new(token_accumulation(optax.adamw(0.1), 3))
    micro_batch = helpers.cut(BATCH, K)[0]
    donating = jax.jit(train_step.__wrapped__, donate_argnums=0)
    with helpers.count_compilations() as compilations:
        for _ in range(10):
            state = donating(state, micro_batch)
    assert state.step == 3
    assert len(compilations) == 1


class StateWithAnotherField(TrainState):
    batch_stats: Any


@pytest.mark.parametrize("kind", [TrainState, StateWithAnotherField])
def test_scales_of_8_bit_floats_are_overwritten_when_the_window_closes(kind: Any):
    """Flax keeps scales in the parameters and their successors in the gradients."""
    params = {
        "params": {"w": jnp.zeros(2)},
        OVERWRITE_WITH_GRADIENT: {"s": jnp.ones(1)},
    }
    more = {} if kind is TrainState else {"batch_stats": jnp.zeros(1)}
    tx = token_accumulation(SGD, 3, should_skip_update_fn=optax.skip_not_finite)
    state = kind.create(apply_fn=None, params=params, tx=tx, **more)
    structure = jax.tree.structure(state)

    @jax.jit
    def apply(state: Any, w: Any, s: Any, n: Any, close_window: Any = False) -> Any:
        grads = {
            "params": {"w": jnp.full(2, w)},
            OVERWRITE_WITH_GRADIENT: {"s": jnp.full(1, s)},
        }
        return state.apply_gradients(
            grads=grads, num_tokens=n, close_window=close_window
        )

    def scale(state: Any) -> float:
        return float(state.params[OVERWRITE_WITH_GRADIENT]["s"][0])

    nan = float("nan")
    for w, s, n in [(nan, nan, 2), (4.0, 5.0, 2), (nan, 9.0, 3), (4.0, 3.0, 2)]:
        state = apply(state, w, s, n)
        assert scale(state) == 1
    opened = apply(state, nan, nan, 0)  # the third, without tokens
    assert scale(opened) == 5 and opened.step == 1
    chex.assert_trees_all_equal(opened.params["params"], {"w": jnp.full(2, -2.0)})
    assert scale(apply(state, 1.0, 7.0, 1)) == 7
    assert scale(apply(state, 1.0, 2.0, 1)) == 5
    assert scale(apply(state, nan, 7.0, 1, close_window=True)) == 5
    closed = jax.jit(kind.close_window)(state)
    assert scale(closed) == 5 and closed.step == 1
    # The maximum starts over in each window, so smaller values count again.
    state = closed
    for s in (0.5, 0.25, 0.125):
        state = apply(state, 1.0, s, 1)
    assert scale(state) == 0.5
    assert jax.tree.structure(state) == structure
    assert state.close_window().step == 2


def test_scales_in_a_state_of_before():
    """A checkpoint of version 0.1.0 lacks the maximum of its open window."""
    params = {"params": {"w": jnp.zeros(2)}, OVERWRITE_WITH_GRADIENT: jnp.ones(1)}
    state = TrainState.create(
        apply_fn=None, params=params, tx=token_accumulation(SGD, 2)
    )
    state = state.replace(opt_state=state.opt_state.opt_state)
    for scale in (3.0, 2.0):
        grads = {
            "params": params["params"],
            OVERWRITE_WITH_GRADIENT: jnp.full(1, scale),
        }
        state = state.apply_gradients(grads=grads, num_tokens=1)
    assert state.params[OVERWRITE_WITH_GRADIENT] == 3


ACCUMULATING = token_accumulation(SGD, 2)
AS_CLASS = MultiSteps(SGD, 2, gradients="sum")
AS_TRANSFORMATION = AS_CLASS.gradient_transformation()
PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(())}
LABELS = {"w": "all", "b": "all"}


@pytest.mark.parametrize(
    "tx",
    [
        ACCUMULATING,
        AS_CLASS,
        AS_TRANSFORMATION,
        optax.chain(optax.identity(), AS_TRANSFORMATION),
        optax.named_chain(("accumulation", ACCUMULATING)),
        optax.partition({"all": AS_TRANSFORMATION}, LABELS),
        optax.masked(ACCUMULATING, jax.tree.map(bool, LABELS)),
        optax.apply_if_finite(AS_TRANSFORMATION, 3),
        optax.inject_hyperparams(lambda rate: token_accumulation(optax.sgd(rate), 2))(
            1.0
        ),
    ],
    ids=[
        "token_accumulation",
        "MultiSteps",
        "gradient_transformation",
        "chain",
        "named_chain",
        "partition",
        "masked",
        "apply_if_finite",
        "inject_hyperparams",
    ],
)
@pytest.mark.parametrize("last", ["by schedule", "partial"])
def test_the_count_reaches_every_form_of_tx(tx: Any, last: str):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    counts = [(8.0, 1), (4.0, 3)] if last == "by schedule" else [(8.0, 4)]
    for grad, n in counts:
        grads = jax.tree.map(lambda p, g=grad: jnp.full_like(p, g), PARAMS)
        state = state.apply_gradients(grads=grads, num_tokens=n)
    if last == "partial":
        assert state.step == 0
        state = state.close_window()
    mean = -3.0 if last == "by schedule" else -2.0  # a mean of means would be -14/3
    chex.assert_trees_all_equal(
        state.params, jax.tree.map(lambda p: jnp.full_like(p, mean), PARAMS)
    )
    assert state.step == 1
