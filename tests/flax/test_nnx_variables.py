"""How the NNX step treats the variables of a model.

This covers their values, rollback of rejected micro-batches, placement and aliasing.
"""

import contextlib
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import softmax_cross_entropy_sum, token_accumulation
from optax_tokenaccum.nnx import make_train_step, make_window_step

K = 4
SGD = optax.sgd(1.0)
BATCH = helpers.ragged_batch(0)
MICRO_BATCHES = helpers.cut(BATCH, K)
# Newer versions of flax have modes in which modules are plain pytrees.
MODES = {"graph": contextlib.nullcontext}
if hasattr(nnx, "set_graph_mode"):
    MODES["tree"] = lambda: nnx.set_graph_mode(False)
    MODES["no updates"] = lambda: nnx.set_graph_updates(False)


@pytest.fixture(params=MODES)
def _mode(request: pytest.FixtureRequest) -> Any:
    with MODES[request.param]():
        yield


class Model(nnx.Module):
    """A model with statistics, random streams, a count and a key."""

    def __init__(self, rngs: nnx.Rngs):
        size, width = helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.key = nnx.Variable(jax.random.key(1))
        self.out = nnx.Linear(width, size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] += 1
        self.key[...], key = jax.random.split(self.key[...])
        x = self.norm(self.hidden(self.embed(tokens)))
        x += 0.1 * jax.random.normal(key, x.shape)
        return self.out(self.dropout(nnx.tanh(x)))


class Cyclic(nnx.Module):
    """Has a cycle, which flax allows but jax does not, and arrays in no variable."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = Model(rngs)
        self.inner.parent = self
        self.plain = nnx.data(jnp.ones(3))
        self.constants = nnx.data((jnp.ones(3), nnx.Variable(jnp.ones(3))))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.plain = self.plain * 2
        self.constants[1][...] *= 2
        return self.inner(tokens)


class Deterministic(Model):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(self.embed(tokens))))


def loss_fn(model: Model, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["tokens"])
    loss, n = softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])
    return loss * batch.get("scale", 1.0), n


def optimizer_of(model: Any, inner: Any = SGD, **options: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, token_accumulation(inner, K, **options), wrt=nnx.Param)


def held(node: Any, kind: Any = ...) -> list[np.ndarray]:
    """Return copies of the variables' values, with keys as numbers."""

    def read(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return [read(x) for x in jax.tree.leaves(nnx.state(node, kind))]


class Scaled(nnx.Param):
    """Reads as a tenth of its stored value, like a parameter with a scale."""

    def get_value(self, **index: Any) -> Any:
        return super().get_value(**index) / 10


class Stored(Scaled):
    """Reads like `Scaled`, and its setter undoes the scale."""

    def set_value(self, value: Any, **index: Any) -> None:
        super().set_value(value * 10, **index)


@pytest.mark.usefixtures("_mode")
def test_variables_that_read_as_something_else_keep_what_they_hold():
    model = Deterministic(nnx.Rngs(0))
    for layer, kind in ((model.hidden, Scaled), (model.out, Stored)):
        layer.kernel = kind(10 * layer.kernel[...])
        naive = layer.kernel[...]
        assert np.abs(naive - layer.kernel.get_raw_value()).max() > 0.1
    optimizer, step = optimizer_of(model), make_train_step(loss_fn)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def mean_loss(params: Any) -> jax.Array:
        loss_sum, n = loss_fn(nnx.merge(graphdef, params, rest), BATCH)
        return loss_sum / n

    expected = [np.array(g) for g in jax.tree.leaves(jax.grad(mean_loss)(params))]
    before = held(model, nnx.Param)
    for micro_batch in MICRO_BATCHES:
        chex.assert_trees_all_equal(held(model, nnx.Param), before)
        step(model, optimizer, micro_batch)
    got = helpers.difference(before, held(model, nnx.Param))
    # Parameters are 10,000 times the gradient, so their difference is rounded.
    assert helpers.relative_error(got, expected) < 1e-3


@pytest.mark.usefixtures("_mode")
def test_a_rejected_micro_batch_leaves_the_model_as_it_was():
    good = [batch | {"scale": np.float32(1)} for batch in MICRO_BATCHES]
    bad = good[0] | {"scale": np.float32(np.nan)}

    def poisoning_loss_fn(model: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(model, batch)
        model.norm.mean[...] *= batch["scale"]
        return loss_sum, n

    step = make_train_step(poisoning_loss_fn)

    def run(batches: Any, tx: Any) -> Any:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        skipped = [bool(step(model, optimizer, batch).skipped) for batch in batches]
        return model, optimizer, skipped

    skipping = token_accumulation(SGD, K, should_skip_update_fn=optax.skip_not_finite)
    model, optimizer, skipped = run([bad, good[0], bad, *good[1:], bad], skipping)
    assert skipped == [True, False, True, False, False, False, True]
    expected, expected_optimizer, _ = run(good, skipping)
    chex.assert_trees_all_equal(held(model), held(expected))
    chex.assert_trees_all_equal(
        held(optimizer.opt_state.inner_opt_state),
        held(expected_optimizer.opt_state.inner_opt_state),
    )
    chex.assert_tree_all_finite(held(model))

    naive, _, _ = run([bad, *good], token_accumulation(SGD, K))
    assert np.isnan(held(naive, nnx.BatchStat)).any()


def test_modules_that_hold_each_other_and_arrays_in_no_variable():
    tx = token_accumulation(SGD, K, should_skip_update_fn=optax.skip_not_finite)
    model = Cyclic(nnx.Rngs(0))
    optimizer, step = nnx.Optimizer(model, tx, wrt=nnx.Param), make_train_step(loss_fn)
    skipped = [
        bool(step(model, optimizer, MICRO_BATCHES[0] | {"scale": scale}).skipped)
        for scale in np.asarray([1, np.nan, 1], np.float32)
    ]
    assert skipped == [False, True, False]
    assert model.inner.calls[...] == 2
    for doubled in (model.plain, model.constants[1][...]):
        chex.assert_trees_all_equal(doubled, jnp.full(3, 4.0))


def test_a_micro_batch_without_tokens_moves_statistics_as_its_rows_are_real():
    model = Model(nnx.Rngs(0))
    optimizer = optimizer_of(model, should_skip_update_fn=optax.skip_not_finite)
    step, before = make_train_step(loss_fn), held(model, nnx.BatchStat)
    empty = MICRO_BATCHES[0] | {"mask": np.zeros_like(MICRO_BATCHES[0]["mask"])}
    metrics = step(model, optimizer, empty | {"scale": np.float32(np.nan)})
    assert not metrics.skipped and metrics.mini_step == 1
    plain = Model(nnx.Rngs(0))
    loss_fn(plain, empty)
    got, expected = held(model, nnx.BatchStat), held(plain, nnx.BatchStat)
    assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]
    assert helpers.relative_error(before, expected) > 100 * helpers.RTOL["float32"]
    assert model.calls[...] == 1


@pytest.mark.usefixtures("_mode")
def test_clones_outlive_a_step_that_does_not_donate_or_copies_of_their_own():
    def trained(step: Any) -> Any:
        model = Model(nnx.Rngs(0))
        optimizer, shared = optimizer_of(model), nnx.clone(model)
        graphdef, state = nnx.split(model)
        copied = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
        for micro_batch in MICRO_BATCHES:
            step(model, optimizer, micro_batch)
        step.close_window(model, optimizer)
        return model, shared, copied

    fresh = held(Model(nnx.Rngs(0)))
    kept, shared, copied = trained(make_train_step(loss_fn, donate=False))
    chex.assert_trees_all_equal(held(shared), fresh)
    donated, shared, copied = trained(make_train_step(loss_fn))
    chex.assert_trees_all_equal(held(copied), fresh)
    chex.assert_trees_all_equal(held(donated), held(kept))
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        held(shared)


@pytest.mark.parametrize("where", ["model", "optimizer", "batch"])
def test_an_array_that_stands_twice_is_donated_once(where: str):
    def trained(donate: bool) -> Any:
        model = Deterministic(nnx.Rngs(0))
        model.hidden.bias.set_raw_value(model.norm.bias.get_raw_value())
        optimizer = optimizer_of(model, optax.adam(0.1))
        batch, loss = MICRO_BATCHES[0], loss_fn
        if where == "optimizer":
            trace = optimizer.opt_state.acc_grads.hidden.kernel
            trace.set_raw_value(model.hidden.kernel.get_raw_value())
        if where == "batch":
            batch = {"reference": nnx.clone(model), "inner": batch}

            def loss(model: Any, batch: Any) -> Any:
                loss_sum, n = loss_fn(model, batch["inner"])
                return loss_sum + loss_fn(batch["reference"], batch["inner"])[0], n

        step, losses = make_train_step(loss, donate=donate), []
        for _ in range(2 * K):
            losses.append(step(model, optimizer, batch).loss)
        return held(model), losses

    chex.assert_trees_all_equal(trained(True), trained(False))


@pytest.mark.parametrize("way", ["micro-batch", "window"])
def test_keywords_may_be_arrays_of_the_model_and_its_optimizer(way: str):
    def scaled(model: Any, batch: Any, *, bias: Any, step: Any) -> Any:
        loss_sum, n = loss_fn(model, batch)
        return (loss_sum + jnp.sum(bias)) / (1 + step), n

    def trained(donate: bool) -> Any:
        model = Deterministic(nnx.Rngs(0))
        if way == "window":
            step: Any = make_window_step(scaled, donate=donate)
            optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
            batch = helpers.stack(MICRO_BATCHES)
        else:
            step, batch = make_train_step(scaled, donate=donate), MICRO_BATCHES[0]
            optimizer = optimizer_of(model, optax.adam(0.1))
        losses = []
        for _ in range(2):
            bias, number = model.hidden.bias[...], optimizer.step[...]
            losses.append(step(model, optimizer, batch, bias=bias, step=number).loss)
        return held(model), losses

    chex.assert_trees_all_equal(trained(True), trained(False))


MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def spread(model: Any, spec: P) -> None:
    for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        x = param.get_raw_value()
        param.set_raw_value(jax.device_put(x, NamedSharding(MESH, spec)))


@pytest.mark.parametrize(
    ("spec", "inner", "late"),
    [
        (P(), optax.adam(0.1), False),
        (P("data"), optax.adafactor(0.1), False),
        (P("data"), optax.adam(0.1), True),
    ],
    ids=["replicated", "fsdp", "fsdp, optimizer first"],
)
def test_on_a_mesh_each_program_is_compiled_once(spec: P, inner: Any, late: bool):
    model = Model(nnx.Rngs(0))
    optimizer = optimizer_of(model, inner) if late else None
    spread(model, spec)
    optimizer = optimizer or optimizer_of(model, inner)
    rows = NamedSharding(MESH, P("data"))
    micro_batch = jax.device_put(MICRO_BATCHES[0], rows)
    step = make_train_step(loss_fn)
    step.init(model, optimizer)
    with helpers.count_compilations() as compilations:
        for _ in range(2 * K):
            step(model, optimizer, micro_batch)
        step(model, optimizer, micro_batch)
        for _ in range(2):
            metrics = step.close_window(model, optimizer)
    assert metrics.gradient_step == 3
    assert len(compilations) == 2
    kernel = model.hidden.kernel.get_raw_value()
    sums = optimizer.opt_state.acc_grads.hidden.kernel.get_raw_value()
    for x in (kernel, sums):
        assert x.sharding.is_equivalent_to(NamedSharding(MESH, spec), x.ndim)
