"""The same loop with the full batch, with a mean of means and with the exact mean."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import Batch
from methods import NAIVE, REFERENCE

from optax_tokenaccum import token_accumulation

EXACT = "token_accumulation"
# At this learning rate, the parameters are negligible next to the update of SGD, from
# which the gradient is read. Dividing by a power of two is exact.
READABLE = 2.0**20

LossFn = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


def make_optimizer(method: str, k: int, learning_rate: Any) -> Any:
    """SGD on windows of k micro-batches, or on the full batch."""
    inner = optax.sgd(learning_rate)
    if method == REFERENCE:
        return inner
    if method == NAIVE:
        return optax.MultiSteps(inner, every_k_schedule=k)
    return token_accumulation(inner, every_k_schedule=k)


@partial(jax.jit, static_argnames="loss_fn")
def value_and_grad(loss_fn: LossFn, params: Any, batch: Batch, mean: bool) -> Any:
    """`((loss, num_tokens), gradient)` of the summed loss or of its mean."""

    def loss_and_count(params: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, num_tokens = loss_fn(params, batch)
        return loss_sum / jnp.where(mean, num_tokens, 1), num_tokens

    return jax.value_and_grad(loss_and_count, has_aux=True)(params)


@partial(jax.jit, static_argnames=("method", "k"))
def apply(
    method: str, k: int, rate: Any, params: Any, opt_state: Any, grads: Any, n: Any
) -> tuple[Any, Any]:
    """Calls the optimizer once and applies its updates."""
    count = {"num_tokens": n} if method == EXACT else {}
    optimizer = make_optimizer(method, k, rate)
    updates, opt_state = optimizer.update(grads, opt_state, params, **count)
    return optax.apply_updates(params, updates), opt_state


def train(
    method: str,
    loss_fn: LossFn,
    params: Any,
    batches: Iterable[Batch],
    k: int,
    rate: float,
) -> tuple[np.ndarray, list[float]]:
    """Makes an update per batch, cut into k; returns the parameters and the losses."""
    opt_state, mean = make_optimizer(method, k, rate).init(params), method != EXACT
    logged = []
    for batch in batches:
        losses, counts = [], []
        for start in range(0, len(batch.mask), len(batch.mask) // k):
            rows = slice(start, start + len(batch.mask) // k)
            micro_batch = Batch(*(part[rows] for part in batch))
            (loss, n), grads = value_and_grad(loss_fn, params, micro_batch, mean)
            params, opt_state = apply(method, k, rate, params, opt_state, grads, n)
            losses.append(loss)
            counts.append(1 if mean else n)
        logged.append(float(sum(losses) / sum(counts)))
    return flat(params), logged


def gradient(
    method: str, loss_fn: LossFn, params: Any, batch: Batch, k: int = 1
) -> np.ndarray:
    """The gradient that the optimizer receives when the window closes."""
    after, _ = train(method, loss_fn, params, [batch], k, READABLE)
    return (flat(params) - after) / READABLE


def flat(tree: Any) -> np.ndarray:
    """All leaves in one float64 vector."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


def compare(full: np.ndarray, got: np.ndarray) -> dict[str, float]:
    """Measures how far a vector is from the full batch's vector."""
    norm, full_norm = np.linalg.norm(got), np.linalg.norm(full)
    return {
        "norm ratio": float(norm / full_norm),
        "relative L2": float(np.linalg.norm(got - full) / full_norm),
        "cosine": float(got @ full / (norm * full_norm)),
    }
