"""NNX models as large ones are written: scanned layers, tied, sharded, in any mesh."""

import contextlib
from typing import Any

import helpers
import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from test_nnx import MESH, MICRO_BATCHES, RTOL, SGD, K, Run, full_gradient, loss_fn

from optax_tokenaccum import make_train_step as core_train_step
from optax_tokenaccum import token_accumulation
from optax_tokenaccum.nnx import make_train_step

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
