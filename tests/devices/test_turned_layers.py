"""Layers along another axis than the first, whose sums are turned during a window."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative_error, run_step, slow, stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from window_gradients import KEEPS, batch_of, by_hand, loss_through
from window_gradients import loss_fn as layered_loss_fn

from optax_tokenaccum import (
    _backward,
    make_train_step,
    make_window_step,
    whole_gradients,
)

LAYERS, WIDTH, ROWS = 3, 8, 16
NEW_JAX = _backward.CAN_ADD_IN_PLACE
RNG = np.random.default_rng(0)
PARAMS = {
    "w": np.float32(RNG.normal(size=(WIDTH, LAYERS, WIDTH)) / 2),
    "scale": np.float32(RNG.normal(size=(WIDTH, LAYERS))),
    "out": np.float32(RNG.normal(size=WIDTH)),
}
BATCHES = [batch_of(i, n, ROWS, WIDTH) for i, n in enumerate((ROWS, 0, 3))]


@loss_through
def loss_fn(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w["w"]) * w["scale"], None

    layers = {k: jnp.moveaxis(params[k], 1, 0) for k in ("w", "scale")}
    return jax.lax.scan(layer, x, layers)[0]


def with_aux(params: Any, batch: Any) -> Any:
    """The same; its gradients are NaN without tokens."""
    loss_sum, n = loss_fn(params, batch)
    return loss_sum / n * n, (n, {"loss_sum": loss_sum})


@pytest.mark.parametrize(
    ("kind", "spec", "reduce_every"),
    [
        ("auto", P(), "micro_batch"),  # ZeRO-2
        slow("explicit", P("data"), "micro_batch"),  # FSDP
        slow("auto", P(), "window"),  # a sum on each
    ],
    ids=str,
)
def test_over_devices(kind: str, spec: P, reduce_every: str):
    mesh = make_mesh((8,), kind)
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": reduce_every}
    step = make_window_step(with_aux, KEEPS, has_aux=True, **options)
    placed = {"w": spec, "scale": P(*spec[:2]), "out": P()}
    shardings = {k: NamedSharding(mesh, spec) for k, spec in placed.items()}
    params = jax.device_put(PARAMS, shardings)
    state, window = step.init(params), stack(BATCHES)
    assert not NEW_JAX or [*whole_gradients(step, state, window)] == ["['out']"]
    before = jax.tree.map(lambda x: x.sharding, state)
    state, _ = step(state, window)
    got = state.opt_state.inner_opt_state
    assert relative_error(got, by_hand(loss_fn, PARAMS, BATCHES)) < 1e-6
    assert jax.tree.map(lambda x: x.sharding, state) == before


@pytest.mark.skipif(not NEW_JAX, reason="everything is whole")
def test_a_scan_over_layers_that_are_spread_would_gather_their_sum():
    mesh = make_mesh((8,))
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": "micro_batch"}
    step = make_train_step(layered_loss_fn, KEEPS, 2, **options)
    layers = jax.device_put(
        np.zeros((8, WIDTH, WIDTH), np.float32), NamedSharding(mesh, P("data"))
    )
    state = step.init({"layers": layers, "out": PARAMS["out"]})
    found = whole_gradients(step, state, BATCHES[0])
    # What the step knows; "..., spread another axis" would be found by looking.
    assert found["['layers']"] == "its first axis is spread"


@loss_through
def of_two_stacks(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w[0]) * w[1], None

    return jax.lax.scan(layer, x, (params["w"], params["scale"]))[0]


def test_layers_that_are_spread_are_added_next_to_layers_that_are_not():
    mesh, specs = (
        make_mesh((8,)),
        {"w": P("data"), "scale": P(None, "data"), "out": P()},
    )
    shapes = {"w": (8, WIDTH, WIDTH), "scale": (8, WIDTH), "out": (WIDTH,)}
    params = {k: np.float32(RNG.normal(size=x) / 2) for k, x in shapes.items()}
    options = {"mesh": mesh, "data_axes": "data", "reduce_every": "micro_batch"}
    step = make_train_step(of_two_stacks, KEEPS, len(BATCHES), **options)
    placed = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    state = step.init(jax.device_put(params, placed))
    found = whole_gradients(step, state, BATCHES[0])
    assert not NEW_JAX or {*found} == {"['w']", "['out']"}
    state, _ = run_step(step, state, BATCHES)
    got = state.opt_state.inner_opt_state
    assert relative_error(got, by_hand(of_two_stacks, params, BATCHES)) < 1e-6


def test_a_skip_function_is_shown_gradients_as_they_are():
    def skip(gradients: Any, *_: Any) -> Any:
        chex.assert_trees_all_equal_shapes(gradients, PARAMS)
        return jnp.asarray(False), ()

    step = make_window_step(loss_fn, KEEPS, should_skip_update_fn=skip)
    jax.eval_shape(step, step.init(PARAMS), stack(BATCHES))
