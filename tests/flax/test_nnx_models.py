"""NNX models as large ones are written: scanned layers, tied, sharded, in any mesh."""

import contextlib
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from test_nnx import (
    BATCH,
    MESH,
    MICRO_BATCHES,
    ON_MESH,
    ONE_DEVICE,
    RTOL,
    SGD,
    K,
    Run,
    full_gradient,
    loss_fn,
)

from optax_tokenaccum import make_train_step as core_train_step
from optax_tokenaccum import token_accumulation
from optax_tokenaccum.nnx import make_train_step, window_value_and_grad

LAYERS, EXPLICIT = 3, make_mesh((8,), "explicit")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        width = helpers.WIDTH
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.norm(x)  # moves its statistics
        return x + self.dropout(nnx.tanh(self.linear(x)))


class Scanned(nnx.Module):
    """Stacked layers in a scan between the ends of one embedding."""

    def __init__(self, spec: P | None = None, remat: bool = False):
        self.remat = remat
        rngs, init = nnx.Rngs(0), nnx.initializers.normal(0.3)
        if spec is not None:
            init = nnx.with_partitioning(init, spec)
        size, width = helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs, embedding_init=init)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = stacked(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def call(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        body = nnx.remat(call) if self.remat else call
        run = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(run(self.embed(tokens), self.blocks))


@pytest.mark.parametrize(
    ("way", "loss_fn", "mesh", "spec"),
    [
        ("two programs", nnx.jit(loss_fn), None, None),
        helpers.slow("window", nnx.remat(loss_fn), MESH, None),
        helpers.slow("two programs", loss_fn, EXPLICIT, None),
        helpers.slow("two programs", loss_fn, MESH, P("data")),
    ],
)
def test_scanned_layers_and_a_tied_embedding(
    way: str, loss_fn: Any, mesh: Any, spec: P | None
):
    """Transformations write parameters back; those of a mesh stay where they are."""
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": "window"}
    options = options if mesh else {}
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        expected = full_gradient(Scanned())
        run = Run(way, loss_fn, model=Scanned(spec, remat=spec is None), **options)
        run.step.init(run.model, run.optimizer)
        with helpers.count_compilations() as compilations:
            *_, metrics = run.window(MICRO_BATCHES)
            given = run.given()
            run.window(MICRO_BATCHES)
    assert metrics.updated and len(compilations) == (1 if way == "window" else 2)
    assert helpers.relative_error(given, expected) < RTOL
    if spec is not None:
        sharding = run.model.embed.embedding.get_raw_value().sharding
        assert sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)


@pytest.mark.slow
def test_inside_of_nnx_jit_and_between_evaluations():
    model, step = Scanned(), make_train_step(loss_fn)
    optimizer = nnx.Optimizer(model, token_accumulation(SGD, K), wrt=nnx.Param)
    evaluate = nnx.jit(loss_fn)

    @nnx.jit
    def outer(model: Scanned, optimizer: nnx.Optimizer, batch: Any) -> Any:
        return step(model, optimizer, batch)

    for i, batch in enumerate(MICRO_BATCHES):
        model.eval()
        evaluate(model, batch)
        model.train()
        metrics = (outer if i % 2 else step)(model, optimizer, batch)
    assert metrics.updated and optimizer.step[...] == K
    given = jax.tree.leaves(optimizer.opt_state.inner_opt_state[0].trace)
    assert helpers.relative_error(given, full_gradient(Scanned())) < RTOL


def test_the_core_takes_the_trained_variables_of_a_model():
    graphdef, params, others = nnx.split(Scanned(), nnx.Param, ...)

    def split_loss_fn(params: Any, batch: Any, others: Any) -> Any:
        return loss_fn(nnx.merge(graphdef, params, others, copy=True), batch)

    step = core_train_step(split_loss_fn, SGD, K)
    state, _ = helpers.run_step(step, step.init(params), MICRO_BATCHES, others=others)
    given = jax.tree.leaves(state.opt_state.inner_opt_state[0].trace)
    assert helpers.relative_error(given, full_gradient(Scanned())) < RTOL


class Trees(nnx.Module):
    """A model whose variables hold trees of arrays."""

    def __init__(self, hold: Any):
        self.names = sorted(helpers.init_params(0))
        self.weights = nnx.Param(hold(helpers.init_params(0)))
        self.stats = nnx.BatchStat(hold({"calls": jnp.zeros(()), "sum": jnp.zeros(2)}))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        stats = self.stats.get_raw_value()
        self.stats.set_raw_value(jax.tree.map(lambda x: x + 1, stats))
        weights = jax.tree.leaves(self.weights.get_raw_value())
        return helpers.logits_of(dict(zip(self.names, weights, strict=True)), tokens)


def pair(tree: Any) -> Any:
    first, *rest = jax.tree.leaves(tree)
    return first, tuple(rest)


@pytest.mark.parametrize("hold", [dict, pair])
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("two programs", ONE_DEVICE),
        ("window", ONE_DEVICE),
        helpers.slow("two programs", ON_MESH),
        helpers.slow("window", ON_MESH),
        ("gradient alone", ONE_DEVICE),
    ],
)
def test_variables_that_hold_trees(way: str, options: Any, hold: Any):
    """In 0.3.0, steps destroyed dictionaries, and lost what tuples hold."""
    model, expected = (
        Trees(hold),
        helpers.float64_gradient(helpers.init_params(0), BATCH),
    )
    if way == "gradient alone":
        f = nnx.jit(window_value_and_grad(loss_fn))
        _, gradient = f(model, helpers.stack(MICRO_BATCHES))
        chex.assert_trees_all_equal_structs(gradient, nnx.state(model, nnx.Param))
        given = jax.tree.leaves(gradient)
    else:
        run = Run(way, model=model, **options)
        before = run.held(nnx.Param)
        run.window(MICRO_BATCHES)
        given = run.given()
        after = jax.tree.map(lambda x, g: x - g, before, given)
        chex.assert_trees_all_equal(run.held(nnx.Param), after)
        run.window(MICRO_BATCHES)
    assert helpers.relative_error(given, jax.tree.leaves(expected)) < RTOL
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(
        nnx.state(Trees(hold))
    )
    calls, total = jax.tree.leaves(model.stats.get_raw_value())
    assert calls == total[0] == (K if way == "gradient alone" else 2 * K)
