"""Layers whose rules of jax 0.12 add to accumulators, or return logs, train right."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from helpers import relative_error
from problems import BATCHES, FEW, WAYS, by_hand, loss_through


def product(kind: str) -> Any:
    """`x @ w` with a backward rule of this kind, which doubles the gradient of `w`."""

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def forward(x: jax.Array, w: jax.Array) -> Any:
        return x @ w, (x, w)

    def backward(given: Any, g: jax.Array) -> Any:
        x, w = given
        return g @ w.T, 2 * jnp.einsum("ri,ro->io", x, g)

    def with_logs(given: Any, g: jax.Array) -> Any:
        return backward(given, g), {}

    def with_accums(given: Any, g: jax.Array, *accums: Any) -> None:
        for accum, cotangent in zip(accums, backward(given, g), strict=True):
            accum.accum(cotangent)

    rules = {"defvjp": backward, "defvjp_with_logs": with_logs}
    rules["defvjp_with_accums"] = with_accums
    getattr(product, kind)(forward, rules[kind])
    return product


def by_jax(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ (2 * w - jax.lax.stop_gradient(w))


def network(multiply: Any, is_scanned: bool) -> Any:
    def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(multiply(y, w)), None

    def network(params: Any, x: jax.Array) -> jax.Array:
        if is_scanned:
            return jax.lax.scan(layer, x, params["layers"])[0]
        for w in params["layers"]:
            x, _ = layer(x, w)
        return x

    return loss_through(network)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("kind", ["defvjp", "defvjp_with_logs", "defvjp_with_accums"])
def test_the_gradient_is_that_of_the_rule(way: Any, is_scanned: bool, kind: str):
    if not hasattr(jax.custom_vjp, kind):
        pytest.skip(f"jax {jax.__version__} has no {kind}")
    got = way(network(product(kind), is_scanned), FEW, BATCHES)
    expected = by_hand(network(by_jax, is_scanned), FEW, BATCHES)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
    without = by_hand(network(jnp.matmul, is_scanned), FEW, BATCHES)
    assert relative_error(got["layers"], without["layers"]) > 0.1
