"""Devices that wait for each other in a backward pass all take part in it.

A device without tokens runs no backward pass of its own. Where the devices communicate
in it, the others would wait forever.
"""

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
from window_gradients import BATCHES, params_of, through_layers

from optax_tokenaccum import make_train_step, window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass

# Of the 8 devices with one row each, some have tokens.
WINDOW, PARAMS = stack(BATCHES), params_of()
ROWS = {"x": P(None, "data"), "mask": P(None, "data")}


@jax.custom_vjp
def summed_backward(x: jax.Array) -> jax.Array:
    return x


# As tensor parallelism is written by hand: only the backward pass communicates.
summed_backward.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "data"),))
AROUND = [(i, (i + 1) % 8) for i in range(8)]
COMMUNICATE = {
    "psum": lambda y: y + jax.lax.psum(y, "data"),
    "ppermute": lambda y: y + jax.lax.ppermute(y, "data", AROUND),
    "only backward": summed_backward,
    "not": lambda y: y,
}


def gradients(name: str) -> Any:
    """A function of parameters and a window: a gradient for each device."""

    def loss_fn(params: Any, batch: Any) -> Any:
        y = COMMUNICATE[name](through_layers(params, batch["x"]) + params["out"])
        losses = jnp.sum(y**2, -1) * batch["mask"]
        return jnp.sum(losses), jnp.sum(batch["mask"])

    def of_device(params: Any, window: Any) -> Any:
        _, gradient = window_value_and_grad(loss_fn)(params, window)
        return jax.tree.map(lambda x: x[None], gradient)

    return jax.shard_map(
        of_device,
        mesh=make_mesh((8,)),
        in_specs=(P(), ROWS),
        out_specs=P("data"),
        check_vma=False,  # with it, a count that varies is an error in every way
    )


def adds_within(f: Any, *args: Any) -> bool:
    """Whether a program makes mutable arrays."""
    return "Ref{" in str(jax.make_jaxpr(f)(*args))


@pytest.mark.parametrize("name", COMMUNICATE)
def test_a_loss_that_communicates_or_not(name: str, monkeypatch: pytest.MonkeyPatch):
    f = gradients(name)
    # Not run if it could wait forever.
    adds = name == "not" and BackwardPass.is_supported
    assert adds_within(f, PARAMS, WINDOW) == adds
    got = jax.jit(f)(PARAMS, WINDOW)
    monkeypatch.setattr(BackwardPass, "is_supported", False)
    expected = jax.jit(gradients(name))(PARAMS, WINDOW)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_communication_that_the_compiler_inserts():
    """Tensor parallelism left to the compiler, which permutes to roll an axis."""
    mesh = make_mesh((4, 2))

    def layer(x: Any, w: Any) -> Any:
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, "model"))
        return jnp.roll(y, 3, axis=1), None

    def loss_fn(params: Any, batch: Any) -> Any:
        y, _ = jax.lax.scan(layer, batch["x"], params)
        losses = jnp.sum(y**2, -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    w = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32) / 4
    w = jax.device_put(w, NamedSharding(mesh, P(None, None, "model")))
    batch = {
        "x": np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32),
        "mask": np.float32(np.arange(16) >= 4),  # none of the first two devices
    }
    step = make_train_step(loss_fn, optax.sgd(1.0), 2, mesh=mesh, data_axes="data")
    with jax.set_mesh(mesh):
        assert not adds_within(step.accumulate, step.init(w), batch)
