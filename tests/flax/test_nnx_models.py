"""NNX models as large ones are written: scanned layers, tied, sharded, in any mesh."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from test_nnx import (
    MESH,
    MICRO_BATCHES,
    ON_MESH,
    RTOL,
    SGD,
    SLOW,
    K,
    Run,
    full_gradient,
    loss_fn,
)

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


def check(model: Scanned, way: str, loss_fn: Any = loss_fn, **options: Any) -> None:
    """Train for two windows; the first gradient is that of the full batch."""
    expected = full_gradient(Scanned())
    run = Run(way, loss_fn, model=model, **options)
    run.step.init(model, run.optimizer)
    with helpers.count_compilations() as compilations:
        *_, metrics = run.window(MICRO_BATCHES)
        given = run.given()
        run.window(MICRO_BATCHES)
    assert metrics.updated and len(compilations) == (1 if way == "window" else 2)
    assert helpers.relative_error(given, expected) < RTOL


@pytest.mark.parametrize(
    ("way", "mesh", "reduce_every"),
    [
        ("two programs", None, "window"),
        ("window", None, "window"),
        pytest.param("window", MESH, "micro_batch", marks=SLOW),
        pytest.param("two programs", EXPLICIT, "window", marks=SLOW),
    ],
)
def test_scanned_layers_and_a_tied_embedding(way: str, mesh: Any, reduce_every: str):
    if mesh is None:
        check(Scanned(), way)
        return
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": reduce_every}
    with jax.set_mesh(mesh):
        check(Scanned(), way, **options)


@pytest.mark.parametrize("way", ["two programs", pytest.param("window", marks=SLOW)])
def test_parameters_that_were_made_on_a_mesh_stay_there(way: str):
    with jax.set_mesh(MESH):
        model = Scanned(P("data"))
        check(model, way, mesh=MESH, data_axes="data")
    sharding = model.embed.embedding.get_raw_value().sharding
    assert sharding.is_equivalent_to(jax.NamedSharding(MESH, P("data")), 2)


@pytest.mark.parametrize(
    ("way", "wrap", "remat", "options"),
    [
        ("two programs", nnx.remat, False, {}),
        ("two programs", nnx.jit, True, {}),
        pytest.param("window", nnx.remat, True, ON_MESH, marks=SLOW),
    ],
)
def test_transformations_that_write_parameters_back(
    way: str, wrap: Any, remat: bool, options: Any
):
    check(Scanned(remat=remat), way, wrap(loss_fn), **options)


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


class Product(nnx.Module):
    def __init__(self, kind: type[nnx.Variable]):
        self.a = self.b = kind(jnp.arange(1.0, 4.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self.a[...] * self.b[...] * x, -1)


@pytest.mark.parametrize("kind", [nnx.Param, nnx.LoRAParam])
def test_the_core_takes_the_trained_variables_of_a_model(kind: Any):
    graphdef, params = nnx.split(Product(kind), kind)

    def loss_fn(params: Any, x: jax.Array) -> tuple[jax.Array, int]:
        return jnp.sum(nnx.merge(graphdef, params)(x)), len(x)

    batches = [jnp.ones((1, 3)), jnp.full((3, 3), 2.0)]  # their mean is 7 / 4
    step = core_train_step(loss_fn, optax.sgd(0.1), len(batches))
    state, _ = helpers.run_step(step, step.init(params), batches)
    right = jnp.arange(1.0, 4.0) * (1 - 0.1 * 2 * 7 / 4)
    chex.assert_trees_all_close(state.params["a"][...], right, rtol=1e-6)
