"""The gradient of a window in every way that differentiates a loss, and by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import run_step, stack

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad

ROWS, WIDTH, LAYERS = 8, 4, 3


def batch_of(seed: int, tokens: int, rows: int = ROWS, width: int = WIDTH) -> Any:
    x = np.random.default_rng(seed).normal(size=(rows, width))
    return {"x": np.float32(x), "mask": np.float32(np.arange(rows) < tokens)}


def window_of(*tokens: int) -> list[Any]:
    return [batch_of(seed, n) for seed, n in enumerate(tokens)]


BATCHES = window_of(8, 0, 3)


def params_of(dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(9)
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "out": (WIDTH,)}
    return {k: jnp.asarray(rng.normal(size=s) / 2, dtype) for k, s in shapes.items()}


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w), None


def through_layers(params: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x.astype(params["layers"].dtype), params["layers"])[0]


def squares(y: Any, batch: Any, scale: Any = 1.0) -> Any:
    """A loss of the activations, and the number of tokens."""
    losses = jnp.sum(y.astype(jnp.float32) ** 2, -1) * scale
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def loss_through(network: Any) -> Any:
    """A loss of `network(params, x)`, which is given the activations."""

    def loss_fn(params: Any, batch: Any, scale: Any = 1.0) -> Any:
        return squares(network(params, batch["x"]) + params["out"], batch, scale)

    return loss_fn


loss_fn = loss_through(through_layers)

# An optimizer whose state is the last gradient that it was given.
KEEPS = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradient, state, params: (jax.tree.map(jnp.zeros_like, params), gradient),
)


def value_and_grad(loss_fn: Any, params: Any, batches: Any, **options: Any) -> Any:
    f = jax.jit(window_value_and_grad(loss_fn, **options))
    return f(params, stack(batches))[1]


def train_step(loss_fn: Any, params: Any, batches: Any, **options: Any) -> Any:
    step = make_train_step(loss_fn, KEEPS, len(batches), **options)
    return run_step(step, step.init(params), batches)[0].opt_state.inner_opt_state


def window_step(loss_fn: Any, params: Any, batches: Any, **options: Any) -> Any:
    step = make_window_step(loss_fn, KEEPS, **options)
    return step(step.init(params), stack(batches))[0].opt_state.inner_opt_state


WAYS = [value_and_grad, train_step, window_step]


def by_hand(loss_fn: Any, params: Any, batches: Any) -> Any:
    """The gradient, of gradients that are added by NumPy, in float64."""

    def wide(gradient: Any, param: Any) -> Any:
        if not jnp.issubdtype(param.dtype, jnp.inexact):
            return np.zeros(param.shape)
        kind = np.complex128 if jnp.iscomplexobj(param) else np.float64
        return np.asarray(gradient).astype(kind)

    f = jax.jit(jax.grad(loss_fn, has_aux=True, allow_int=True))
    tokens, sums = 0.0, jax.tree.map(lambda p: wide(0 * p, p), params)
    for batch in batches:
        new, n = f(params, batch)
        if np.isfinite(n) and n > 0:
            new = jax.tree.map(lambda p, g: wide(g, p), params, new)
            tokens, sums = tokens + float(n), jax.tree.map(np.add, sums, new)
    return jax.tree.map(lambda x, p: (x / (tokens or 1)).astype(p.dtype), sums, params)
