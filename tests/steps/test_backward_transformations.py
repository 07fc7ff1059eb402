"""Windows under JAX's transformations, next to the same around plain gradients."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import stack
from window_gradients import BATCHES, loss_fn, params_of, window_of

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass

WINDOW, PARAMS = stack(BATCHES), params_of()
slow = pytest.mark.slow


def many(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 3]), tree)


def ours(params: Any, window: Any, loss_fn: Any = loss_fn, **kwargs: Any) -> Any:
    (loss, _), gradient = window_value_and_grad(loss_fn)(params, window, **kwargs)
    return loss, gradient


def plainly(params: Any, window: Any, loss_fn: Any = loss_fn, **kwargs: Any) -> Any:
    """The same in a loop of Python."""
    loss, tokens, sums = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
    for i in range(len(BATCHES)):
        batch = jax.tree.map(lambda x: x[i], window)  # noqa: B023
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss_sum, n), new = value_and_grad(params, batch, **kwargs)
        loss, tokens = loss + loss_sum, tokens + n
        sums = jax.tree.map(jnp.add, sums, new)
    return loss / tokens, jax.tree.map(lambda x: x / tokens, sums)


def closing_over(f: Any, scale: Any) -> Any:
    return f(PARAMS, WINDOW, lambda params, batch: loss_fn(params, batch, scale))


# What a transformation is with regard to, and one value of it.
OF: dict[str, Any] = {
    "params": (lambda f, p: f(p, WINDOW), PARAMS),
    "window": (lambda f, w: f(PARAMS, w), WINDOW),
    "closed over": (closing_over, jnp.float32(2)),
}
# As many tokens would hide windows that are swapped.
WINDOWS = stack([stack(window_of(*n)) for n in ((8, 0, 3), (0, 8, 1), (1, 2, 3))])


def mapped(f: Any, x: Any) -> Any:
    return jax.vmap(f)(WINDOWS if x is WINDOW else many(x))


def forward(f: Any, x: Any) -> Any:
    return jax.jvp(f, (x,), (jax.tree.map(jnp.ones_like, x),))


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        *[(mapped, name) for name in ("params", "window", "closed over")],
        *[(forward, name) for name in ("params", "closed over")],
    ],
)
def test_transformed(transform: Any, name: str):
    of, x = OF[name]
    got, expected = (
        jax.jit(functools.partial(transform, functools.partial(of, f)))(x)
        for f in (ours, plainly)
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda f: lambda p: f(p, WINDOW)[0],
        lambda f: lambda p: optax.tree.norm(f(p, WINDOW)[1]),
    ],
    ids=["loss", "gradient"],
)
def test_reverse_mode_is_right_or_an_error(loss_of: Any):
    if BackwardPass.is_supported:
        with pytest.raises(ValueError, match="Linearization failed"):
            jax.grad(loss_of(ours))(PARAMS)
        return
    got, expected = (jax.grad(loss_of(f))(PARAMS) for f in (ours, plainly))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["train step", "window step"])
def test_a_step_is_mapped(way: str):
    train = make_train_step(loss_fn, optax.sgd(1.0), lambda _: len(BATCHES))
    window = make_window_step(loss_fn, optax.sgd(1.0))

    def step(params: Any, batches: Any, scale: Any) -> Any:
        if way == "window step":
            return window(window.init(params), batches, scale=scale)[0].params
        state = train.init(params)
        for i in range(len(BATCHES)):
            batch = jax.tree.map(lambda x: x[i], batches)  # noqa: B023
            state, _ = train(state, batch, scale=scale)
        return state.params

    def alone(params: Any, batches: Any, scale: Any) -> Any:
        _, gradient = plainly(params, batches, scale=scale)
        return jax.tree.map(lambda p, g: p - g, params, gradient)

    given = many(PARAMS), WINDOWS, jnp.arange(1.0, 4.0)
    got, expected = (jax.jit(jax.vmap(f))(*given) for f in (step, alone))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(*jax.tree.leaves(got["out"])[0][:2])
