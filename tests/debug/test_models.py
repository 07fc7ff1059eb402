"""`audit` and `check_loss_fn` of NNX models and Equinox modules."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx
from problems import squares

import optax_tokenaccum.nnx
from optax_tokenaccum import token_accumulation
from optax_tokenaccum.debug._audit import audit
from optax_tokenaccum.debug._check_loss_fn import check_loss_fn
from optax_tokenaccum.debug._report import Verdict

MICRO_BATCHES = [
    problems.batch_of(i, np.arange(8) < n) for i, n in enumerate((1, 8, 3))
]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))[..., 0]


def nnx_loss(model: Any, batch: Any) -> Any:
    return squares(model(batch["x"]), batch)


def by_step(tx: Any, model: Any, micro_batches: Any) -> Any:
    tx = token_accumulation(tx, every_k_schedule=len(micro_batches))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = optax_tokenaccum.nnx.make_train_step(nnx_loss)
    for batch in micro_batches:
        step(model, optimizer, batch)
    return model


def test_nnx_models():
    model = Net(nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
    report = audit(by_step, nnx_loss, model, MICRO_BATCHES)
    report.assert_exact()
    assert any("['first']['kernel']" in p.path for p in report.parameters)
    assert not any("norm']['mean" in p.path for p in report.parameters)
    assert check_loss_fn(nnx_loss, model, MICRO_BATCHES, mask="weights").passed
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, nnx.Param))


def loop_of(loss_fn: Any) -> Any:
    """A loop that a user of NNX writes, which may assign parameters."""

    def run(tx: Any, model: Any, micro_batches: Any) -> Any:
        tx = token_accumulation(tx, every_k_schedule=len(micro_batches))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def update(model: Any, optimizer: Any, batch: Any) -> None:
            grads, n = nnx.grad(loss_fn, has_aux=True)(model, batch)
            optimizer.update(model, grads, num_tokens=n)

        for batch in micro_batches:
            update(model, optimizer, batch)
        return model

    return run


@pytest.mark.parametrize("layer", [nnx.SpectralNorm, nnx.WeightNorm])
def test_a_layer_that_overwrites_its_weight_is_named(layer: Any):
    model = Net(nnx.Rngs(0))
    model.first = layer(model.first, rngs=nnx.Rngs(1))
    report = audit(loop_of(nnx_loss), nnx_loss, model, MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert layer.__name__ in report.explanation

    def of_a_copy(model: Any, batch: Any) -> Any:
        return nnx_loss(nnx.clone(model), batch)

    assert "call a copy, nnx.clone(model)" in report.explanation
    audit(loop_of(of_a_copy), of_a_copy, model, MICRO_BATCHES).assert_exact()


def test_dropout_is_suspected():
    model = Net(nnx.Rngs(0))
    model.dropout.deterministic = False
    report = audit(by_step, nnx_loss, model, MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert "Is dropout on (model.eval(), deterministic=True)" in report.explanation
    model.eval()
    audit(by_step, nnx_loss, model, MICRO_BATCHES).assert_exact()


@pytest.mark.slow
def test_batch_norm_in_training_mode_couples_rows():
    model = Net(nnx.Rngs(0))
    model.norm.use_running_average = False
    report = audit(by_step, nnx_loss, model, MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert "loss_fn couples rows" in report.explanation
    report = check_loss_fn(nnx_loss, model, MICRO_BATCHES, mask="weights")
    assert "depends on the other rows" in report.findings[0]


@pytest.mark.slow
def test_equinox_modules():
    def loss_fn(model: Any, batch: Any) -> Any:
        return squares(jax.vmap(model)(batch["x"]), batch)

    @eqx.filter_jit
    def gradient(model: Any, batch: Any) -> Any:
        return eqx.filter_grad(loss_fn, has_aux=True)(model, batch)

    def run(tx: Any, model: Any, micro_batches: Any) -> Any:
        tx = token_accumulation(tx, len(micro_batches))
        state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        for batch in micro_batches:
            params = eqx.filter(model, eqx.is_inexact_array)
            grads, n = gradient(model, batch)
            updates, state = jax.jit(tx.update)(grads, state, params, num_tokens=n)
            model = eqx.apply_updates(model, updates)
        return model

    keys, dropout = jax.random.split(jax.random.key(0)), eqx.nn.Dropout(0.5, True)
    first, last = (
        eqx.nn.Linear(8, n, key=k) for n, k in zip((8, "scalar"), keys, strict=True)
    )
    model = eqx.nn.Sequential([first, eqx.nn.Lambda(jax.nn.tanh), dropout, last])
    audit(run, loss_fn, model, MICRO_BATCHES).assert_exact()
    assert check_loss_fn(loss_fn, model, MICRO_BATCHES, mask="weights").passed
