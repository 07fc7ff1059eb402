"""Devices that wait for each other in a backward pass all take part in it.

A device without tokens runs no backward pass of its own. Where the devices communicate
in it, the others would wait forever.
"""

import os
import subprocess
import sys
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
from meshes import make_mesh, make_step
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
    "all_gather": lambda y: y + jnp.sum(jax.lax.all_gather(y, "data"), 0),
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


@pytest.mark.parametrize(
    ("way", "kind", "derivative", "reduce"),
    [
        ("two programs", "auto", "custom_vjp", jax.lax.psum),
        ("one program", "explicit", "custom_vjp", jax.lax.pmean),
        ("window", "auto", "custom_jvp", jax.lax.all_gather),
        ("nnx two programs", "explicit", "custom_jvp", jax.lax.psum),
    ],
)
def test_a_step_refuses_gradients_that_are_reduced_in_the_backward_pass(
    way: str, kind: str, derivative: str, reduce: Any
):
    """With psum the update was 8 times as large, with pmean wrong without tokens."""

    def reduced(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.atleast_1d(reduce(x, "data"))) * jnp.ones_like(x)

    if derivative == "custom_vjp":
        identity = jax.custom_vjp(lambda x: x)
        identity.defvjp(lambda x: (x, None), lambda _, g: (reduced(g),))
    else:
        identity = jax.custom_jvp(lambda x: x)
        identity.defjvp(lambda x, t: (*x, reduced(*t)))

    def loss_fn(params: Any, batch: Any) -> Any:
        losses = jnp.sum(identity(params["w"]) * batch["x"], -1) * batch["mask"]
        return jnp.sum(losses), jnp.sum(batch["mask"])

    step = make_step(way, optax.sgd(1.0), make_mesh((8,), kind), loss_fn=loss_fn)
    state = step.init({"w": jnp.zeros(2)})
    batch = {"x": jnp.ones((16, 2)), "mask": jnp.ones(16)}
    if way == "window":
        batch = stack([batch])
    with pytest.raises(ValueError, match=r"over \['data'\] in its backward pass"):
        step(state, batch)


def rolled_step() -> tuple[Any, Any, Any]:
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
        return step, step.init(w), batch


def test_communication_that_the_compiler_inserts():
    step, state, batch = rolled_step()
    with jax.set_mesh(state.params.sharding.mesh):
        assert not adds_within(step.accumulate, state, batch)


SCRIPT = """
import jax, test_communicating_losses as t
from optax_tokenaccum._core.backward import BackwardPass
step, state, batch = t.rolled_step()
with jax.set_mesh(state.params.sharding.mesh):
    for _ in range(2):
        state, metrics = step(state, batch)
print("ended", float(metrics.num_tokens))
"""


@pytest.mark.slow
def test_communication_that_the_compiler_inserts_comes_to_an_end():
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "ended 24.0" in done.stdout, done.stderr[-2000:]
