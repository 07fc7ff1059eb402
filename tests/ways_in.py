"""Every entry point on one ragged problem, next to optax's class."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import micro_step, run_step, stack

from optax_tokenaccum import (
    MultiSteps,
    accumulate_over_window,
    make_train_step,
    make_window_step,
    token_accumulation,
)

SGD = optax.sgd(1.0)

# A linear regression: each row has 4 features, a target and the weight of its square.
Batch = dict[str, np.ndarray]
PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.5, 3.0], jnp.float32)}


def batch_of(seed: int, weights: Any) -> Batch:
    rng = np.random.default_rng(seed)
    rows = len(weights)
    return {
        "x": rng.normal(size=(rows, 4)).astype(np.float32),
        "y": (seed + rng.normal(size=rows)).astype(np.float32),
        "weights": np.asarray(weights, np.float32),
    }


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def exact(params: Any, *batches: Batch) -> Any:
    """The gradient of the weighted mean over all rows, in float64."""
    x, y, weights = (
        np.concatenate([b[name] for b in batches]).astype(np.float64)
        for name in ("x", "y", "weights")
    )
    w = np.asarray(params["w"], np.float64)
    return {"w": 2 * x.T @ ((x @ w - y) * weights) / weights.sum()}


# From parameters and windows of micro-batches to the parameters after each window.
Run = Callable[[Any, list[list[Batch]]], list[Any]]


def update_loop(optimizer: Any, loss_fn: Any, counted: bool = True) -> Run:
    step = micro_step(optimizer, loss_fn, counted)

    def run(params: Any, windows: list[list[Batch]]) -> list[Any]:
        state, after = optimizer.init(params), []
        for window in windows:
            for batch in window:
                params, state = step(params, state, batch)
            after.append(params)
        return after

    return run


def of_gradients(loss_fn: Any, **options: Any) -> Any:
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    return accumulate_over_window(grad_fn, **options)


def mean_of(loss_fn: Any) -> Any:
    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return loss_sum / n, n

    return mean_fn


def transformation(loss_fn: Any, inner: Any, k: int, **options: Any) -> Run:
    return update_loop(token_accumulation(inner, k, **options), loss_fn)


def multi_steps(loss_fn: Any, inner: Any, k: int, **options: Any) -> Run:
    return update_loop(MultiSteps(inner, k, **options), mean_of(loss_fn))


def optax_multi_steps(loss_fn: Any, inner: Any, k: int) -> Run:
    """optax's class, on the mean loss of each micro-batch."""
    return update_loop(optax.MultiSteps(inner, k), mean_of(loss_fn), counted=False)


def _run_of(step: Any, stacks: bool = False) -> Run:
    def run(params: Any, windows: list[list[Batch]]) -> list[Any]:
        state, after = step.init(params), []
        for window in windows:
            state, _ = run_step(step, state, [stack(window)] if stacks else window)
            after.append(jax.tree.map(np.array, state.params))
        return after

    return run


def train_step(loss_fn: Any, inner: Any, k: Any, **options: Any) -> Run:
    return _run_of(make_train_step(loss_fn, inner, k, **options))


def in_one_program(loss_fn: Any, inner: Any, k: int, **options: Any) -> Run:
    return train_step(loss_fn, inner, lambda _: k, **options)


def window_step(loss_fn: Any, inner: Any, k: int, **options: Any) -> Run:
    return _run_of(make_window_step(loss_fn, inner, **options), stacks=True)


WAYS = [
    transformation,
    multi_steps,
    train_step,
    in_one_program,
    window_step,
]


@functools.cache
def program(way: Any, **options: Any) -> Run:
    """One program for all tests of a way: windows of two micro-batches under SGD."""
    return way(loss_fn, SGD, 2, **options)
