"""NNX models as large ones are written: scanned layers, tied, sharded, in any mesh."""

import contextlib
import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

import optax_tokenaccum
from optax_tokenaccum import softmax_cross_entropy_sum, token_accumulation
from optax_tokenaccum.nnx import make_train_step, make_window_step

K, LAYERS = 4, 3
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0, rows=64)
MICRO_BATCHES = helpers.cut(BATCH, K)
RTOL = helpers.RTOL["float32"]
SLOW = pytest.mark.slow


AUTO, EXPLICIT = make_mesh((8,)), make_mesh((8,), "explicit")
ON_MESH = {"mesh": AUTO, "data_axes": "data"}


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

    def __init__(self, spec: P | None = None, remat: bool = False, axis: int = 0):
        self.remat, self.axes = remat, nnx.StateAxes({nnx.Param: axis, ...: 0})
        rngs, init = nnx.Rngs(0), nnx.initializers.normal(0.3)
        if spec is not None:
            init = nnx.with_partitioning(init, spec)
        size, width = helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs, embedding_init=init)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=self.axes)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = stacked(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def call(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        body = nnx.remat(call) if self.remat else call
        run = nnx.scan(body, in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)
        return self.embed.attend(run(self.embed(tokens), self.blocks))


def loss_fn(model: Scanned, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["tokens"])
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def mean_loss_fn(model: Scanned) -> jax.Array:
    loss_sum, num_tokens = loss_fn(model, BATCH)
    return loss_sum / num_tokens


@functools.cache
def expected(wrt: Any = nnx.Param, axis: int = 0) -> Any:
    gradient = nnx.grad(mean_loss_fn, argnums=nnx.DiffState(0, wrt))
    return jax.tree.leaves(nnx.state(nnx.jit(gradient)(Scanned(axis=axis))))


def given(optimizer: nnx.Optimizer) -> Any:
    """The last gradient given to SGD; parameter differences are rounded."""
    state = optimizer.opt_state
    return jax.tree.leaves(getattr(state, "inner_opt_state", state)[0].trace)


def check(
    model: Scanned,
    way: str,
    loss_fn: Any = loss_fn,
    right: Any = None,
    wrt: Any = nnx.Param,
    **options: Any,
) -> None:
    """Train for two windows; the first gradient is that of the full batch."""
    if way == "window":
        tx, batches = SGD, [helpers.stack(MICRO_BATCHES)]
        step: Any = make_window_step(loss_fn, **options)
    else:
        tx, batches = token_accumulation(SGD, K), MICRO_BATCHES
        step = make_train_step(loss_fn, **options)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    step.init(model, optimizer)
    with helpers.count_compilations() as compilations:
        for batch in batches:
            metrics = step(model, optimizer, batch)
        first = [np.asarray(x) for x in given(optimizer)]
        for batch in batches:
            step(model, optimizer, batch)
    assert metrics.updated and len(compilations) == (1 if way == "window" else 2)
    assert helpers.relative_error(first, right or expected()) < RTOL


@pytest.mark.parametrize(
    ("way", "mesh", "reduce_every"),
    [
        ("train", None, "window"),
        ("window", None, "window"),
        pytest.param("train", AUTO, "micro_batch", marks=SLOW),
        pytest.param("window", EXPLICIT, "micro_batch", marks=SLOW),
        pytest.param("train", EXPLICIT, "window", marks=SLOW),
        pytest.param("window", make_mesh((4, 2)), "window", marks=SLOW),
    ],
)
def test_scanned_layers_and_a_tied_embedding(way: str, mesh: Any, reduce_every: str):
    if mesh is None:
        check(Scanned(), way)
        return
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": reduce_every}
    is_set = mesh is EXPLICIT and way == "train"
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        check(Scanned(), way, **options)


@pytest.mark.parametrize("way", ["train", pytest.param("window", marks=SLOW)])
def test_parameters_that_were_made_on_a_mesh_stay_there(way: str):
    with jax.set_mesh(AUTO):
        model = Scanned(P("data"))
        check(model, way, mesh=AUTO, data_axes="data")
    sharding = model.embed.embedding.get_raw_value().sharding
    assert sharding.is_equivalent_to(jax.NamedSharding(AUTO, P("data")), 2)


@pytest.mark.parametrize(
    ("way", "wrap", "remat", "options"),
    [
        ("train", nnx.remat, False, {}),
        ("train", nnx.jit, True, {}),
        pytest.param("window", nnx.remat, True, {}, marks=SLOW),
        pytest.param("window", nnx.jit, False, ON_MESH, marks=SLOW),
        pytest.param("train", nnx.remat, True, ON_MESH, marks=SLOW),
    ],
)
def test_transformations_that_write_parameters_back(
    way: str, wrap: Any, remat: bool, options: Any
):
    check(Scanned(remat=remat), way, wrap(loss_fn), **options)


def test_a_part_of_the_parameters_that_are_stacked_along_another_axis():
    wrt = nnx.All(nnx.Param, nnx.PathContains("blocks"))
    check(Scanned(axis=1, remat=True), "train", right=expected(wrt, 1), wrt=wrt)


class Pair(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.ones(3))

    def swap(self) -> None:
        a, b = self.a[...], self.b[...]
        self.a.set_value(b)
        self.b.set_value(a)


def swap_in_remat(pair: Pair, batch: Any) -> None:
    nnx.remat(Pair.swap)(pair)


def swap_in_a_scan(pair: Pair, batch: Any) -> None:
    def body(pair: Pair, _: Any) -> tuple[Pair, Any]:
        pair.swap()
        return pair, 0.0

    nnx.scan(body)(pair, batch)


def swap_in_remat_of_a_scan(pair: Pair, batch: Any) -> None:
    nnx.remat(swap_in_a_scan)(pair, batch)


@pytest.mark.parametrize(
    "swap", [swap_in_remat, swap_in_a_scan, swap_in_remat_of_a_scan]
)
def test_parameters_that_change_places_are_refused(swap: Any):
    def swapping_loss_fn(pair: Pair, batch: Any) -> Any:
        swap(pair, batch)
        return jnp.sum(pair.a[...] * batch), len(batch)

    model, step = Pair(), make_train_step(swapping_loss_fn)
    optimizer = nnx.Optimizer(model, token_accumulation(SGD, K), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"must not assign .* a, b"):
        step(model, optimizer, jnp.ones((3, 3)))


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
    assert helpers.relative_error(given(optimizer), expected()) < RTOL


class Weight(nnx.Variable):
    """A type that a user chose to train, with `wrt=Weight`."""


class TiedWeight(nnx.Module):
    def __init__(self, kind: type[nnx.Variable] = nnx.Param, tied: bool = True):
        self.a = kind(jnp.arange(1.0, 4.0))
        self.b = self.a if tied else kind(jnp.arange(1.0, 4.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self.a[...] * self.b[...] * x, -1)


@pytest.mark.parametrize("kind", [nnx.Param, nnx.LoRAParam, Weight])
def test_the_core_takes_the_trained_variables_of_a_model(kind: Any):
    graphdef, params = nnx.split(TiedWeight(kind), kind)

    def state_loss_fn(params: nnx.State, x: jax.Array) -> tuple[jax.Array, int]:
        return jnp.sum(nnx.merge(graphdef, params)(x)), len(x)

    batches, expected = [jnp.ones((1, 3)), jnp.full((3, 3), 2.0)], 2 * 7 / 4
    step = optax_tokenaccum.make_train_step(state_loss_fn, optax.sgd(0.1), 2)
    state = step.init(params)
    for x in batches:
        state, _ = step(state, x)
    right = jnp.arange(1.0, 4.0) * (1 - 0.1 * expected)
    chex.assert_trees_all_close(state.params["a"][...], right, rtol=1e-6)

    # As a tree of arrays, the two places of the model go ways of their own.
    grads = jax.grad(lambda model: sum(jnp.sum(model(x)) for x in batches) / 4)(
        TiedWeight(kind)
    )
    assert grads.a is not grads.b
    chex.assert_trees_all_close(grads.a[...], expected / 2 * jnp.arange(1.0, 4.0))


def test_the_core_takes_a_model_of_parameters_alone():
    def loss_fn(model: TiedWeight, x: jax.Array) -> tuple[jax.Array, int]:
        return jnp.sum(model(x)), len(x)

    step = optax_tokenaccum.make_train_step(loss_fn, optax.sgd(0.1), 1)
    state, _ = step(step.init(TiedWeight(tied=False)), jnp.ones((1, 3)))
    chex.assert_trees_all_close(state.params.b[...], 0.9 * jnp.arange(1.0, 4.0))
