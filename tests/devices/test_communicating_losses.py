"""Devices that send each other values in a backward pass all take part in it."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import problems
import pytest
from helpers import run_step, stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from problems import BATCHES, FEW, KEEPS, loss_through, through_layers

from optax_tokenaccum import make_train_step, window_value_and_grad
from optax_tokenaccum._core import backward
from optax_tokenaccum.debug._whole_gradients import whole_gradients

# Of the 8 devices with one row each, some have tokens.
WINDOW = stack(BATCHES)


@jax.custom_vjp
def summed_backward(x: jax.Array) -> jax.Array:
    return x


# As tensor parallelism is written by hand: only the backward pass communicates.
summed_backward.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "data"),))
COMMUNICATE = {
    "in a call": jax.jit(lambda y: y + jax.lax.psum(y, "data")),
    "only backward": summed_backward,
    "not": lambda y: y,
}


def gradients(name: str, value_and_grad: Any = window_value_and_grad) -> Any:
    """A function of parameters and a window: a gradient for each device."""

    loss_fn = loss_through(lambda p, x: COMMUNICATE[name](through_layers(p, x)))

    def of_device(params: Any, window: Any) -> Any:
        _, gradient = value_and_grad(loss_fn)(params, window)
        return jax.tree.map(lambda x: x[None], gradient)

    return jax.shard_map(
        of_device,
        mesh=make_mesh((8,)),
        in_specs=(P(), P(None, "data")),
        out_specs=P("data"),
        check_vma=False,  # with it, a count that varies is an error in every way
    )


def by_hand(loss_fn: Any) -> Any:
    def value_and_grad(params: Any, window: Any) -> Any:
        rows = [jax.tree.map(lambda x, i=i: x[i], window) for i in range(len(BATCHES))]
        found = [jax.grad(loss_fn, has_aux=True)(params, x) for x in rows]
        sums, n = jax.tree.map(lambda *xs: sum(xs), *found)
        return None, jax.tree.map(lambda x: x / jnp.maximum(n, 1), sums)

    return value_and_grad


def test_a_loss_that_communicates_or_not():
    # Without types, nothing tells whose gradient this is.
    with pytest.raises(ValueError, match="needs check_vma=True"):
        gradients("in a call")(FEW, WINDOW)
    for name in ("only backward", "not"):
        got = jax.jit(gradients(name))(FEW, WINDOW)
        expected = jax.jit(gradients(name, by_hand))(FEW, WINDOW)
        chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def experts(mesh: Any) -> Any:
    """A network whose layers send every row to the device of an expert, and back."""

    def of_device(w: Any, x: Any) -> Any:
        x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(x @ w[0]), "data", 0, 0, tiled=True)

    apply = jax.shard_map(
        of_device, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )

    def network(params: Any, x: Any) -> Any:
        layers = params["layers"]
        return jax.lax.scan(lambda x, w: (x + apply(w, x), None), x, layers)[0]

    return network


@pytest.mark.slow
@pytest.mark.skipif(not backward.CAN_ADD_IN_PLACE, reason="everything is whole")
def test_layers_of_experts_on_all_devices():
    """In a `shard_map` of the loss; the last micro-batch has no tokens."""
    options = meshes.over("8, each")
    mesh = options["mesh"]
    loss_fn = loss_through(experts(mesh))
    width = problems.FEATURES
    layers = problems.normal(0, 3, 8, width, width) / 3
    spread = NamedSharding(mesh, P(None, "data"))
    params = {"layers": jax.device_put(layers, spread), "out": FEW["out"]}
    counts = 64, 6, 0
    batches = [problems.batch_of(i, jnp.arange(64) < n) for i, n in enumerate(counts)]
    batches = jax.device_put(batches, NamedSharding(mesh, P("data")))
    step = make_train_step(loss_fn, KEEPS, 3, **options)
    state = step.init(params)
    assert "['layers']" not in whole_gradients(step, state, batches[0])
    state, metrics = run_step(step, state, batches)
    assert metrics.num_tokens == sum(counts)
    expected = problems.by_hand(loss_fn, params, batches)
    got = state.opt_state.inner_opt_state
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
