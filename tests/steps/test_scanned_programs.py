"""Gradients of random programs with scans are those of `jax.grad` in float64."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ways_in
from helpers import relative_error, stack

from optax_tokenaccum import window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass

SIZE = 3  # of every axis, so that gradients that are swapped have the right shapes
RNG = np.random.default_rng(0)
PARAMS = {name: np.float32(RNG.normal(size=(SIZE,) * 3)) for name in "abc"}
# The rows of a third of the window have no tokens.
BATCHES = [
    {"x": np.float32(RNG.normal(size=(8, SIZE))), "mask": np.float32(np.arange(8) < n)}
    for n in (8, 0, 3)
]
Take = Callable[[Any], Any]


def random_leaf(choose: random.Random, is_layer: bool) -> Take:
    """Take a parameter, change it in some way, and take one of its layers or all."""
    name = choose.choice("abc")
    change = choose.choice(
        [lambda p: p, lambda p: 3.0 * p, jnp.sin, lambda p: jnp.swapaxes(p, 0, 1)]
    )
    part = choose.choice([0, -1]) if is_layer else slice(None)
    return lambda params: change(params[name])[part]


def random_scan(choose: random.Random) -> Callable[[Any, Any], Any]:
    """Scan over parameters, with others as constants, and maybe one that is carried."""
    scanned = [random_leaf(choose, False) for _ in range(choose.randint(1, 3))]
    constant = [random_leaf(choose, True) for _ in range(choose.randint(0, 2))]
    carried = random_leaf(choose, True) if choose.random() < 0.5 else None
    remat, nested, reverse = (choose.random() < 0.5 for _ in range(3))
    unroll = choose.choice([1, 2])

    def run(params: Any, x: Any) -> Any:
        constants = [take(params) for take in constant]

        def layer(carry: Any, weights: Any) -> Any:
            x, w_carried = carry
            for i, w in enumerate([*weights, *constants], start=2):
                x = jnp.tanh(x @ w / i + 1 / i)
            if w_carried is not None:
                x, w_carried = x + jnp.sin(x @ w_carried), 0.5 * w_carried + 0.1
            return (x, w_carried), None

        def layers(carry: Any, weights: Any) -> Any:
            return jax.lax.scan(lambda carry, _: layer(carry, weights), carry, length=2)

        body = layers if nested else layer
        start = x, None if carried is None else carried(params)
        weights = [take(params) for take in scanned]
        body = jax.checkpoint(body) if remat else body
        end, _ = jax.lax.scan(body, start, weights, reverse=reverse, unroll=unroll)
        return end[0]

    return run


def random_loss(seed: int) -> Any:
    """A loss of one or two scans, and maybe of a parameter outside of them."""
    choose = random.Random(seed)
    scans = [random_scan(choose) for _ in range(choose.randint(1, 2))]
    outside = random_leaf(choose, True) if choose.random() < 0.5 else None

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"].astype(params["a"].dtype)
        for scan in scans:
            x = scan(params, x)
        if outside is not None:
            x = x + jnp.sin(x @ outside(params))
        return jnp.sum(x**2 * batch["mask"][:, None]), jnp.sum(batch["mask"])

    return loss_fn


def exact(loss_fn: Any) -> Any:
    """The gradient of the window's token mean, in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, PARAMS)
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *BATCHES)
        gradient, tokens = jax.jit(jax.grad(loss_fn, has_aux=True))(wide, whole)
        return jax.tree.map(lambda g: np.asarray(g / tokens), gradient)


@pytest.mark.parametrize(
    "seed",
    [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 24))],
)
def test_any_program(seed: int):
    loss_fn = random_loss(seed)
    traced = jax.jit(window_value_and_grad(loss_fn)).trace(PARAMS, stack(BATCHES))
    # Without this, the test could pass on whole gradients alone.
    assert ("Ref{" in str(traced.jaxpr)) == BackwardPass.is_supported
    _, gradient = traced.lower().compile()(PARAMS, stack(BATCHES))
    assert relative_error(gradient, exact(loss_fn)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 32))
@pytest.mark.parametrize(
    "way", [ways_in.train_step, ways_in.in_one_program, ways_in.window_step]
)
def test_any_program_in_every_way(way: Any, seed: int):
    loss_fn, rate = random_loss(seed), 2.0**10
    [after] = way(loss_fn, optax.sgd(rate), len(BATCHES))(PARAMS, [BATCHES])
    gradient = jax.tree.map(lambda a, b: (a - np.asarray(b)) / rate, PARAMS, after)
    assert relative_error(gradient, exact(loss_fn)) < 1e-4
