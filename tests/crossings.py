"""What crossings with other libraries are compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
from helpers import relative_error


def whole(batches: Any) -> Any:
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def exact_and_naive(loss_fn: Any, params: Any, batches: Any) -> Any:
    """By plain JAX, the gradients of the mean over all rows, and of a mean of means."""

    def mean(params: Any, batch: Any) -> Any:
        return jnp.divide(*loss_fn(params, batch))

    def of_means(params: Any) -> Any:
        return sum(mean(params, batch) for batch in batches) / len(batches)

    exact = jax.jit(jax.grad(mean))(params, whole(batches))
    return exact, jax.jit(jax.grad(of_means))(params)


def compare(got: Any, loss_fn: Any, params: Any, batches: Any) -> None:
    exact, naive = exact_and_naive(loss_fn, params, batches)
    assert relative_error(jax.device_get(got), exact) < 1e-5
    assert relative_error(naive, exact) > 0.02


def layered(multiply: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(multiply(x, w)), None

    return problems.loss_through(lambda p, x: jax.lax.scan(layer, x, p["layers"])[0])
