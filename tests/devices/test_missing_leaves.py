"""`None` in the place of an array is no leaf: on a mesh as on one device."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import nnx_ways
import numpy as np
import optax
import pytest
import ways_in
from flax import nnx
from helpers import count_compilations, relative_error, run_step, stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import TYPES, make_mesh

import optax_tokenaccum.nnx
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation

WAYS = ["two programs", "one program", "window"]
# Rows 0 to 3 of every micro-batch have few tokens: devices differ.
BATCHES = [ways_in.batch_of(i, [1.0] * (4 + i) + [9.0] * (4 - i)) for i in range(3)]
MOMENTUM = optax.sgd(1.0, momentum=0.5)
# What `equinox.partition` makes of a model, and a layer without a bias.
PARAMS = {"w": ways_in.PARAMS["w"], "bias": None, "empty": {}, "rest": (None, None)}


def loss_fn(params: Any, batch: Any) -> Any:
    assert params["bias"] is None and params["rest"] == (None, None)
    assert batch["positions"] is None
    loss_sum, num_tokens = ways_in.loss_fn(params, batch)
    return loss_sum, (num_tokens, {"tokens": num_tokens, "missing": None})


def make_step(way: str, loss_fn: Any, optimizer: Any, **options: Any) -> Any:
    options = {"data_axes": "data", "has_aux": True} | options
    if way in nnx_ways.WAYS:
        return nnx_ways.make_step(way, loss_fn, optimizer, 3, **options)
    if way == "window":
        return make_window_step(loss_fn, optimizer, **options)
    schedule = 3 if way == "two programs" else lambda _: 3
    return make_train_step(loss_fn, optimizer, schedule, **options)


def two_windows(way: str) -> list[Any]:
    given = [batch | {"positions": None} for batch in BATCHES]
    return [stack(given)] * 2 if "window" in way else given * 2


def expected() -> Any:
    """The parameters after two windows of all rows on one device, in float64."""
    params, trace = {"w": np.asarray(PARAMS["w"], np.float64)}, 0.0
    for _ in range(2):
        trace = ways_in.exact(params, *BATCHES)["w"] + 0.5 * trace
        params = {"w": params["w"] - trace}
    return params["w"]


def test_the_mean_of_means_is_another_gradient():
    means = [ways_in.exact(PARAMS, batch)["w"] for batch in BATCHES]
    exact = ways_in.exact(PARAMS, *BATCHES)["w"]
    assert relative_error(np.mean(means, 0), exact) > 1e-3


MASK: Any = {"w": True, "bias": None, "empty": {}, "rest": (None, None)}
# The state of the second, unlike that of the first, has a leaf less than the tree.
OPTIMIZERS = [MOMENTUM, optax.masked(MOMENTUM, MASK)]


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_without_some_leaves(
    way: str, kind: str, reduce_every: Any, donate: bool
):
    optimizer = OPTIMIZERS[donate]
    options = {"mesh": make_mesh((8,), kind), "reduce_every": reduce_every}
    step = make_step(way, loss_fn, optimizer, donate=donate, **options)
    state = first = step.init(PARAMS)
    with count_compilations() as compilations:
        state, metrics = run_step(step, state, two_windows(way))
    assert len(compilations) == (2 if "two programs" in way else 1)
    assert relative_error(state.params["w"], expected()) < 1e-6
    assert jax.tree.structure(state) == jax.tree.structure(first)
    assert first.params["w"].is_deleted() == donate
    assert metrics.aux["missing"] is None and metrics.updated


@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_equinox_partitioned(way: str, kind: str, reduce_every: Any):
    mesh = make_mesh((4, 2), kind)
    layer = eqx.nn.Linear(4, "scalar", use_bias=False, key=jax.random.key(0))
    layer = eqx.tree_at(lambda x: x.weight, layer, ways_in.PARAMS["w"][None])
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    place = NamedSharding(mesh, P(None, "model"))
    params = jax.tree.map(lambda x: jax.device_put(x, place), params)

    def loss_fn(params: Any, batch: Any) -> Any:
        layer = eqx.combine(params, static)
        losses = (jax.vmap(layer)(batch["x"]) - batch["y"]) ** 2
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

    options = {"mesh": mesh, "reduce_every": reduce_every, "has_aux": False}
    step = make_step(way, loss_fn, MOMENTUM, **options)
    state, _ = run_step(step, step.init(params), two_windows(way))
    assert relative_error(state.params.weight[0], expected()) < 1e-6
    assert state.params.weight.sharding.is_equivalent_to(place, 2)


@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("way", ["nnx two programs", "nnx window"])
def test_an_nnx_layer_without_a_bias(way: str, kind: str, reduce_every: Any):
    model = nnx.Linear(4, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = ways_in.PARAMS["w"][:, None]
    options = {"mesh": make_mesh((8,), kind), "data_axes": "data"}
    options |= {"reduce_every": reduce_every, "has_aux": True}
    if way == "nnx window":
        tx = MOMENTUM
        step = optax_tokenaccum.nnx.make_window_step(model_loss_fn, **options)
    else:
        tx = token_accumulation(MOMENTUM, 3)
        step = optax_tokenaccum.nnx.make_train_step(model_loss_fn, **options)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step.init(model, optimizer)
    for batch in two_windows(way):
        metrics = step(model, optimizer, batch)
    assert relative_error(model.kernel[...][:, 0], expected()) < 1e-6
    assert metrics.aux["missing"] is None and metrics.updated


def model_loss_fn(model: nnx.Linear, batch: Any) -> Any:
    losses = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    num_tokens = jnp.sum(batch["weights"])
    aux = {"missing": model.bias, "positions": batch["positions"]}
    return jnp.sum(losses * batch["weights"]), (num_tokens, aux)


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_of_one_device_with_explicit_axes(way: str):
    mesh = jax.make_mesh(
        (1,), ("data",), (TYPES["explicit"],), devices=jax.devices()[:1]
    )
    step = make_step(way, loss_fn, MOMENTUM, mesh=mesh)
    state, _ = run_step(step, step.init(PARAMS), two_windows(way))
    assert relative_error(state.params["w"], expected()) < 1e-6
