"""The NNX train step gives the full batch exactly, for models with state."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_tokenaccum import (
    MultiSteps,
    softmax_cross_entropy_sum,
    token_accumulation,
)
from optax_tokenaccum.nnx import make_train_step

K = 4
SGD = optax.sgd(1.0, momentum=0.0)


class Model(nnx.Module):
    """Embedding, hidden layer, logits; optional dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0, batch_norm: bool = False):
        size, width = helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs) if batch_norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(width, size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.hidden(self.embed(tokens))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.dropout(nnx.tanh(x)))


def loss_fn(model: Model, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["tokens"])
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def mean_loss_fn(model: Model, batch: Any) -> jax.Array:
    loss_sum, num_tokens = loss_fn(model, batch)
    return loss_sum / num_tokens


def params_of(model: Model, wrt: Any = nnx.Param) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, wrt)))


def applied(optimizer: nnx.Optimizer) -> Any:
    """Return the last gradient given to SGD; parameter differences are rounded."""
    trace = optimizer.opt_state.inner_opt_state[0].trace
    return jax.tree.map(np.asarray, nnx.to_pure_dict(trace))


def full_batch_gradient(model: Model, batch: Any, wrt: Any = nnx.Param) -> Any:
    grads = nnx.grad(mean_loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(grads)))


def new(tx: Any, wrt: Any = nnx.Param, **options: Any) -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, tx, wrt=wrt)


BATCH = helpers.ragged_batch(0)


def test_two_windows_are_the_full_batches_and_optax_multi_steps_is_not():
    model, optimizer = new(token_accumulation(SGD, K))
    step = make_train_step(loss_fn)
    for seed in (0, 1):
        batch = helpers.ragged_batch(seed)
        before, expected = params_of(model), full_batch_gradient(model, batch)
        for i, micro_batch in enumerate(helpers.cut(batch, K)):
            metrics = step(model, optimizer, micro_batch)
            assert bool(metrics.updated) == (i == K - 1)
            if i < K - 1:
                chex.assert_trees_all_equal(params_of(model), before)
        gradient = applied(optimizer)
        assert helpers.relative_error(gradient, expected) < helpers.RTOL["float32"]
        moved = jax.tree.map(np.subtract, before, gradient)
        chex.assert_trees_all_equal(params_of(model), moved)
        assert metrics.num_tokens == batch["mask"].sum()
        norm = np.float32(optax.tree.norm(expected))
        np.testing.assert_allclose(metrics.grad_norm, norm, helpers.RTOL["float32"])
        assert metrics.gradient_step == seed + 1
    assert optimizer.step[...] == 2 * K

    naive, optimizer = new(optax.MultiSteps(SGD, K).gradient_transformation())
    before, expected = params_of(naive), full_batch_gradient(naive, BATCH)
    for micro_batch in helpers.cut(BATCH, K):
        optimizer.update(naive, nnx.grad(mean_loss_fn)(naive, micro_batch))
    assert (
        helpers.relative_error(helpers.difference(before, params_of(naive)), expected)
        > 0.02
    )


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_plain_update_with_num_tokens(gradients: str):
    tx = token_accumulation(SGD, K, gradients=gradients)
    model, optimizer = new(tx)
    expected = full_batch_gradient(model, BATCH)

    def loss_of_form(model: Model, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, n = loss_fn(model, batch)
        return (loss_sum / n if gradients == "mean" else loss_sum), n

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, batch: Any) -> None:
        grads, n = nnx.grad(loss_of_form, has_aux=True)(model, batch)
        optimizer.update(model, grads, num_tokens=n)

    for micro_batch in helpers.cut(BATCH, K):
        step(model, optimizer, micro_batch)
    error = helpers.relative_error(applied(optimizer), expected)
    assert error < helpers.RTOL["float32"]


def test_a_partial_window_closes_with_its_own_denominator():
    model, optimizer = new(token_accumulation(SGD, 99))
    step = make_train_step(loss_fn)
    metrics = step.close_window(model, optimizer)
    assert not metrics.updated
    expected = full_batch_gradient(model, BATCH)
    for micro_batch in helpers.cut(BATCH, K):
        step(model, optimizer, micro_batch)
    metrics = step.close_window(model, optimizer)
    assert metrics.updated and metrics.gradient_step == 1
    assert metrics.num_tokens == BATCH["mask"].sum()
    error = helpers.relative_error(applied(optimizer), expected)
    assert error < helpers.RTOL["float32"]


def test_no_two_micro_batches_share_a_dropout_mask():
    seen = []

    def aux_loss_fn(model: Model, batch: Any) -> Any:
        loss_sum, n = loss_fn(model, batch)
        return loss_sum, (n, model.dropout(jnp.ones(64)))

    model, optimizer = new(token_accumulation(optax.sgd(0.0), 2), dropout=0.5)
    step = make_train_step(aux_loss_fn, has_aux=True)
    micro_batch = helpers.cut(BATCH, K)[0]
    for _ in range(6):
        seen.append(tuple(step(model, optimizer, micro_batch).aux.tolist()))
    assert len(set(seen)) == 6


def test_batch_statistics_move_in_every_micro_batch_as_without_accumulation():
    model, optimizer = new(token_accumulation(SGD, K), batch_norm=True)
    plain = Model(nnx.Rngs(0), batch_norm=True)
    step = make_train_step(loss_fn)
    for micro_batch in helpers.cut(BATCH, K):
        step(model, optimizer, micro_batch)
        loss_fn(plain, micro_batch)
        got, expected = (params_of(m, nnx.BatchStat) for m in (model, plain))
        assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]


def test_lora_alone_is_trained_and_kept():
    def with_lora() -> Model:
        model = Model(nnx.Rngs(0))
        size = helpers.WIDTH
        model.hidden = nnx.LoRALinear(size, size, lora_rank=2, rngs=nnx.Rngs(1))
        lora = model.hidden.lora.lora_b
        lora[...] = jax.random.normal(jax.random.key(2), lora.shape)
        return model

    model = with_lora()
    tx = token_accumulation(SGD, K)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    rest, before = params_of(model, frozen), params_of(model, nnx.LoRAParam)
    expected = full_batch_gradient(model, BATCH, nnx.LoRAParam)
    step = make_train_step(loss_fn)
    for micro_batch in helpers.cut(BATCH, K):
        step(model, optimizer, micro_batch)
    got = applied(optimizer)
    assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]
    chex.assert_trees_all_equal(params_of(model, frozen), rest)
    sums = optimizer.opt_state.acc_grads
    assert optax.tree.size(sums) == optax.tree.size(before)


def test_rejected_and_empty_micro_batches():
    tx = token_accumulation(SGD, 2, should_skip_update_fn=optax.skip_not_finite)

    def scaled_loss_fn(model: Model, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, n = loss_fn(model, batch)
        return loss_sum * batch["scale"], n

    model, optimizer = new(tx)
    step = make_train_step(scaled_loss_fn)
    expected = full_batch_gradient(model, BATCH)
    good = BATCH | {"scale": np.float32(1)}
    bad = BATCH | {"scale": np.float32(np.nan)}
    empty = BATCH | {"scale": np.float32(np.nan), "mask": np.zeros_like(BATCH["mask"])}
    flags = [
        (bool(m.skipped), int(m.mini_step))
        for m in (step(model, optimizer, batch) for batch in (bad, empty, bad, good))
    ]
    assert flags == [(True, 0), (False, 1), (True, 1), (False, 0)]
    error = helpers.relative_error(applied(optimizer), expected)
    assert error < helpers.RTOL["float32"]


def test_two_compilations_for_step_and_close_over_many_windows():
    model, optimizer = new(token_accumulation(optax.adamw(0.1), 3))
    step = make_train_step(loss_fn)
    micro_batch = helpers.cut(BATCH, K)[0]
    with helpers.count_compilations() as compilations:
        for _ in range(10):
            metrics = step(model, optimizer, micro_batch)
        step.close_window(model, optimizer)
    assert metrics.gradient_step == 3
    assert len(compilations) == 2


@pytest.mark.parametrize("form", ["class", "transformation"])
def test_multi_steps_of_sums_does_what_token_accumulation_does(form: str):
    multi_steps = MultiSteps(SGD, K, gradients="sum")
    forms = {
        "class": multi_steps,
        "transformation": multi_steps.gradient_transformation(),
    }
    step, trained = make_train_step(loss_fn), []
    for tx in (forms[form], token_accumulation(SGD, K)):
        model, optimizer = new(tx)
        for micro_batch in helpers.cut(BATCH, K):
            metrics = step(model, optimizer, micro_batch)
        assert metrics.updated
        trained.append(params_of(model))
    chex.assert_trees_all_equal(*trained)


def test_an_optimizer_without_a_schedule_says_so():
    model, optimizer = new(token_accumulation(SGD))
    with pytest.raises(ValueError, match="rule that closes it"):
        make_train_step(loss_fn)(model, optimizer, BATCH)
    assert params_of(model)


def test_loss_fn_that_does_not_fit():
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        make_train_step(None)
    model, optimizer = new(token_accumulation(SGD, 2))
    with pytest.raises(TypeError, match="must return"):
        make_train_step(mean_loss_fn)(model, optimizer, BATCH)
    assert params_of(model)
