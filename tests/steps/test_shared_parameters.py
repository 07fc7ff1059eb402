"""Parameters that a loop is given whole add their gradients to the sums in the loop."""

import random
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from helpers import RTOL, relative_error
from problems import (
    BATCHES,
    FEW,
    WAYS,
    by_hand,
    check_gradient,
    layer,
    loss_through,
    train_step,
    window_step,
)

from optax_tokenaccum import window_value_and_grad
from optax_tokenaccum._core import perturbations

MANY = [*range(3), *map(helpers.slow, range(3, 25))]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(perturbations, "LARGE", 0)


def cell(params: Any, x: Any) -> Any:
    w = params["layers"]
    return jax.lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ w[0] + x @ w[1].T), x)


def shared_over_depth(params: Any, x: Any) -> Any:
    def again(x: Any, _: Any) -> Any:
        return jax.lax.scan(layer, x, params["layers"])[0], x

    return jax.lax.scan(jax.checkpoint(again), x, None, length=3)[0]


def whole_and_by_layer(params: Any, x: Any) -> Any:
    def both(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w + x @ params["layers"][1]), None

    return jax.lax.scan(both, x, params["layers"])[0]


def in_two_loops(params: Any, x: Any) -> Any:
    return cell(params, jax.lax.fori_loop(0, 2, lambda _, x: cell(params, x), x))


def whole_and_by_layer_in_a_loop(params: Any, x: Any) -> Any:
    f = jax.checkpoint(lambda _, x: whole_and_by_layer(params, x))
    return shared_over_depth(params, jax.lax.fori_loop(0, 2, f, x))


def by_clamped_index(params: Any, x: Any) -> Any:
    def read(x: Any, i: Any) -> Any:
        return x + params["layers"][i, i], None

    return jax.lax.scan(read, x, jnp.array([-9, -1, 0, 7]))[0]


NETWORKS = [cell, shared_over_depth, whole_and_by_layer, in_two_loops]
NETWORKS += [whole_and_by_layer_in_a_loop, by_clamped_index]


@pytest.mark.parametrize(("network", "way"), [*zip(NETWORKS, WAYS * 2, strict=True)])
def test_every_contribution_arrives(network: Any, way: Any):
    check_gradient(way, loss_through(network))


@pytest.mark.parametrize("seed", MANY)
def test_random_loops_in_loops(seed: int):
    rng = random.Random(seed)
    chosen = [rng.choice(NETWORKS) for _ in range(3)]
    changes = [rng.choice([lambda f: f, jax.checkpoint, jax.jit]) for _ in chosen]
    trips = [rng.randint(1, 3) for _ in chosen]

    def network(params: Any, x: Any) -> Any:
        for f, change, n in zip(chosen, changes, trips, strict=True):
            run = change(lambda x, f=f: f(params, x))
            x = jax.lax.fori_loop(0, n, lambda _, x, run=run: run(x), x)
        return x

    test_every_contribution_arrives(network, rng.choice(WAYS))


def test_bfloat16_is_summed_in_float32_over_iterations():
    """Equal gradients of many steps: a sum in bfloat16 stops growing."""

    def loss_fn(params: Any, x: Any) -> Any:
        total = jax.lax.fori_loop(
            0, 1000, lambda _, y: y + jnp.float32(jnp.sum(params * x)), jnp.float32(0)
        )
        return total, 1

    w, xs = jnp.ones(2, jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)
    _, gradient = jax.jit(window_value_and_grad(loss_fn))(w, xs)
    np.testing.assert_allclose(gradient, 1000)
    naive, _ = jax.jit(jax.grad(loss_fn, has_aux=True))(w, xs[0])
    assert np.float32(naive).max() < 500


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        (window_step, "8"),
        (train_step, "8, explicit"),
        (train_step, "8, each"),
        (train_step, "8, each, spread"),
        (window_step, "4 x 2"),
    ],
)
def test_on_a_mesh(way: Any, layout: str):
    mesh, axis, options = problems.over(layout)
    params = problems.placed(jax.device_get(FEW), mesh, axis)
    loss_fn = loss_through(whole_and_by_layer_in_a_loop)
    got = way(loss_fn, params, BATCHES, **options)
    assert relative_error(got, by_hand(loss_fn, FEW, BATCHES)) < RTOL["float32"]
