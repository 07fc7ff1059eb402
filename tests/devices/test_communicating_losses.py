"""Devices that send each other values in a backward pass all take part in it."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from window_gradients import BATCHES, loss_through, params_of, squares, through_layers

from optax_tokenaccum import (
    _backward,
    make_train_step,
    whole_gradients,
    window_value_and_grad,
)

# Of the 8 devices with one row each, some have tokens.
WINDOW, PARAMS = stack(BATCHES), params_of()
ROWS = {"x": P(None, "data"), "mask": P(None, "data")}


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
        in_specs=(P(), ROWS),
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
        gradients("in a call")(PARAMS, WINDOW)
    for name in ("only backward", "not"):
        got = jax.jit(gradients(name))(PARAMS, WINDOW)
        expected = jax.jit(gradients(name, by_hand))(PARAMS, WINDOW)
        chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_communication_that_the_compiler_inserts():
    """Tensor parallelism left to the compiler, which permutes to roll an axis."""
    mesh = make_mesh((4, 2))
    split = NamedSharding(mesh, P(None, "model"))

    def layer(x: Any, w: Any) -> Any:
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), split)
        return jnp.roll(y, 3, axis=1), None

    def loss_fn(params: Any, batch: Any) -> Any:
        return squares(jax.lax.scan(layer, batch["x"], params)[0], batch)

    w = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32) / 4
    w = jax.device_put(w, NamedSharding(mesh, P(None, None, "model")))
    batch = {
        "x": np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32),
        "mask": np.float32(np.arange(16) >= 4),  # none of the first two devices
    }
    step = make_train_step(loss_fn, optax.sgd(1.0), 1, mesh=mesh, data_axes="data")
    with jax.set_mesh(mesh):
        state, metrics = step(step.init(w), batch)
    gradient = jax.jit(jax.grad(lambda w: loss_fn(w, batch)[0]))
    total = gradient(jax.device_get(w))
    assert metrics.num_tokens == 12
    np.testing.assert_allclose(w - state.params, total / 12, rtol=1e-4, atol=1e-5)


def experts(mesh: Any) -> Any:
    """A loss whose layers send every row to the device of an expert, and back."""

    def of_device(w: Any, x: Any) -> Any:
        x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(x @ w[0]), "data", 0, 0, tiled=True)

    apply = jax.shard_map(
        of_device, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )

    def loss_fn(params: Any, batch: Any) -> Any:
        y, _ = jax.lax.scan(lambda x, w: (x + apply(w, x), None), batch["x"], params)
        return squares(y, batch)

    return loss_fn


@pytest.mark.slow
@pytest.mark.skipif(not _backward.CAN_ADD_IN_PLACE, reason="everything is whole")
def test_experts_on_all_devices_take_the_same_branch():
    """Outside of a `shard_map`, no device skips a backward pass that others run."""
    mesh, rng = make_mesh((8,)), np.random.default_rng(0)
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": "micro_batch"}
    w = np.float32(rng.normal(size=(3, 8, 4, 4)))
    params = jax.device_put(w, NamedSharding(mesh, P(None, "data")))
    window = {
        "x": np.float32(rng.normal(size=(3, 64, 4))),
        "mask": np.float32(np.arange(192).reshape(3, 64) < 70),  # none in the third
    }
    step = make_train_step(experts(mesh), optax.sgd(1.0), 3, **options)
    state = step.init(params)
    first, *_ = batches = [{k: x[i] for k, x in window.items()} for i in range(3)]
    assert whole_gradients(step, state, first) == {}
    for batch in batches:
        state, metrics = step(
            state, jax.device_put(batch, NamedSharding(mesh, P("data")))
        )
    loss_fn = experts(mesh)
    gradient = jax.jit(jax.grad(lambda w, b: loss_fn(w, b)[0]))
    total = sum(gradient(params, b) for b in batches)
    assert metrics.num_tokens == 70
    np.testing.assert_allclose(w - state.params, total / 70, rtol=1e-4, atol=1e-5)
