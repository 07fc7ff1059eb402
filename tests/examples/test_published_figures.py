"""Figures that other projects published, and those of `docs/why.md`.

The model is a small Llama with PyTorch's random numbers, so it reproduces the figures
of Soup to six digits.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
import pytest
from data import Batch
from helpers import RTOL

from optax_tokenaccum import (
    make_window_step,
    softmax_cross_entropy_sum,
    token_accumulation,
)

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
FULL, NAIVE, EXACT = "full batch", "optax.MultiSteps", "token_accumulation"
# At this learning rate, the parameters are negligible next to the update of SGD, from
# which the gradient is read. Dividing by a power of two is exact.
READABLE = 2.0**20
SEEDS = 9


@partial(jax.jit, static_argnames="loss_fn")
def value_and_grad(loss_fn: Any, params: Any, batch: Batch, mean: bool) -> Any:
    def loss_and_count(params: Any) -> Any:
        loss_sum, num_tokens = loss_fn(params, batch)
        return loss_sum / jnp.where(mean, num_tokens, 1), num_tokens

    return jax.value_and_grad(loss_and_count, has_aux=True)(params)


def optimizer_of(way: str, k: int, rate: Any) -> Any:
    wrap = {FULL: lambda inner, k: inner, NAIVE: optax.MultiSteps}
    return wrap.get(way, token_accumulation)(optax.sgd(rate), k)


@partial(jax.jit, static_argnames=("way", "k"))
def apply(way: str, k: int, rate: Any, params: Any, state: Any, grads: Any, n: Any):
    count = {"num_tokens": n} if way == EXACT else {}
    updates, state = optimizer_of(way, k, rate).update(grads, state, params, **count)
    return optax.apply_updates(params, updates), state


def train(
    way: str, loss_fn: Any, params: Any, batches: list[Batch], k: int, rate: float
) -> tuple[np.ndarray, list[float]]:
    """Make an update per batch, cut into k; return the parameters and the losses."""
    state, mean = optimizer_of(way, k, rate).init(params), way != EXACT
    logged = []
    for batch in batches:
        parts = zip(*(np.split(part, k) for part in batch), strict=True)
        losses, counts = [], []
        for part in parts:
            (loss, n), grads = value_and_grad(loss_fn, params, Batch(*part), mean)
            params, state = apply(way, k, rate, params, state, grads, n)
            losses.append(loss)
            counts.append(1 if mean else n)
        logged.append(float(sum(losses) / sum(counts)))
    leaves = jax.tree.leaves(params)
    flat = [np.asarray(leaf, np.float64).ravel() for leaf in leaves]
    return np.concatenate(flat), logged


def gradient(way: str, loss_fn: Any, params: Any, batch: Batch, k: int = 1) -> Any:
    after, _ = train(way, loss_fn, params, [batch], k, READABLE)
    before, _ = train(way, loss_fn, params, [], k, READABLE)
    return (before - after) / READABLE


def compare(full: np.ndarray, got: np.ndarray) -> dict[str, float]:
    norm, full_norm = np.linalg.norm(got), np.linalg.norm(full)
    return {
        "norm ratio": float(norm / full_norm),
        "relative L2": float(np.linalg.norm(got - full) / full_norm),
        "cosine": float(got @ full / (norm * full_norm)),
    }


def cells_of(header: str) -> list[list[str]]:
    """Return the rows of the page's table with that header."""
    lines = PAGE.splitlines()
    rows = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# One gradient.


def errors(k: int, low: int, high: int) -> dict[str, list[dict[str, float]]]:
    """Compare one gradient with the full batch's, for each model and batch."""
    found: dict[str, Any] = {NAIVE: [], EXACT: []}
    for seed in range(SEEDS):
        params, rows = (
            llama.init(seed, width=32, layers=2),
            llama.make_rows(seed, low, high),
        )
        full = gradient(FULL, llama.loss_fn, params, rows)
        for way, list_ in found.items():
            got = gradient(way, llama.loss_fn, params, rows, k)
            list_.append(compare(full, got))
    return found


@pytest.mark.parametrize(
    "cells", cells_of("| k | naive, median | least to most | cosine | exact |")
)
def test_one_gradient(cells: list[str]):
    k, median, spread, cosine, _ = cells
    found = errors(int(k), 2, 64)
    assert max(row["relative L2"] for row in found[EXACT]) < RTOL["float32"]
    naive = np.array([row["relative L2"] for row in found[NAIVE]])
    shown = [float(median), *map(float, spread.split(" to "))]
    np.testing.assert_allclose(
        [np.median(naive), naive.min(), naive.max()], shown, rtol=0.06
    )
    cosines = np.median([row["cosine"] for row in found[NAIVE]])
    assert cosines == pytest.approx(float(cosine), abs=0.006)


def test_equal_lengths_make_no_error():
    for rows in errors(32, 33, 33).values():
        assert max(row["relative L2"] for row in rows) < RTOL["float32"]


# What others published.


def weighted_sum(params: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """A loss that equals its gradient at parameter 1."""
    return params * jnp.sum(batch.inputs), jnp.sum(batch.mask)


def sums_and_counts(*pairs: tuple[float, int]) -> Batch:
    """Make one row per micro-batch, from pairs `(loss_sum, num_tokens)`."""
    mask = np.arange(max(n for _, n in pairs)) < np.array([[n] for _, n in pairs])
    values = np.zeros(mask.shape, np.float32)
    values[:, 0] = [loss_sum for loss_sum, _ in pairs]
    return Batch(values, values, mask)


def torchtitan() -> list[Any]:
    """The loss of pull request 4167, from sums and tokens (2, 1) and (90, 9)."""
    batch, one = sums_and_counts((2, 1), (90, 9)), jnp.ones(())
    _, [naive] = train(NAIVE, weighted_sum, one, [batch], 2, 0.0)
    step = make_window_step(weighted_sum, optax.sgd(0.0))
    _, metrics = step(step.init(one), Batch(*(part[:, None] for part in batch)))
    return [(float(metrics.loss), naive)]


def megatron() -> list[Any]:
    """The gradients of Megatron-LM's issue 7452, from sums and tokens chosen here."""
    batch = sums_and_counts((4, 2), (4, 1), (8, 1))
    run = weighted_sum, jnp.zeros(()), batch, 3
    return [(gradient(EXACT, *run)[0], gradient(NAIVE, *run)[0])]


def accelerate() -> list[Any]:
    """The guide's `Linear(1, 2)`, which tells odd from even in rows of 1 to 16 numbers.

    The guide's two devices alternate every 4 rows, so they get 10 + 42 = 52 and
    26 + 58 = 84 tokens.
    """

    def linear(params: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits = batch.inputs[..., None] * params
        return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)

    mask = np.tri(16, dtype=bool)
    numbers = np.broadcast_to(np.arange(1, 17, dtype=np.int32), mask.shape)
    batch = Batch(numbers, numbers % 2, mask)
    weights = jnp.asarray(2 * llama.TorchRandom(0).uniform(2) - 1, jnp.float32)
    found = (train(way, linear, weights, [batch], 4, 0.08)[0] for way in (EXACT, NAIVE))
    return list(zip(*found, strict=True))


def soup() -> list[Any]:
    """Pull request 943: rows of 2, 2, 2, 2, 16, 16, 16 and 16 tokens, cut in two."""
    ids = llama.TorchRandom(1).integers(1, llama.VOCABULARY, 8, 16)
    lengths = np.repeat([2, 16], 4)[:, None]
    batch = Batch(ids[:, :-1], ids[:, 1:], np.arange(1, 16) < lengths)
    run = llama.loss_fn, llama.init(0, width=16, layers=1), batch
    full = gradient(FULL, *run)
    found = (compare(full, gradient(way, *run, 2)).values() for way in (EXACT, NAIVE))
    return list(zip(*found, strict=True))


def logged_losses() -> list[Any]:
    """Bounds on the losses of 8 rows, from the tests of transformers and torchtune."""
    rows = [llama.make_rows(i, 1, 15) for i in range(5)]
    batches = [Batch(*(part[:8, :15] for part in batch)) for batch in rows]
    run = llama.loss_fn, llama.init(0, width=16, layers=1), batches
    full = train(FULL, *run, 1, 0.5)[1]

    def farthest(way: str, k: int) -> float:
        return float(np.max(np.abs(np.subtract(train(way, *run, k, 0.5)[1], full))))

    exact, naive = ([farthest(way, k) for k in (2, 4, 8)] for way in (EXACT, NAIVE))
    return [(exact[0], naive[0]), (max(exact), max(naive))]


def holds(published: str, value: float) -> bool:
    """Whether a value matches the published one, to four decimals or within a bound."""
    sign, number = re.fullmatch(r"([<>]?) ?(\S+)", published).groups()
    numerator, _, denominator = number.partition("/")
    expected = float(numerator) / float(denominator or 1)
    if sign:
        return value < expected if sign == "<" else value > expected
    rounded = re.fullmatch(r"\d\.\d{4}", number)
    return abs(value - expected) <= (5e-5 if rounded else RTOL["float32"])


def test_what_others_published():
    measures = torchtitan, megatron, accelerate, soup, logged_losses
    found = [values for measure in measures for values in measure()]
    rows = cells_of("| published by | quantity | right | exact | wrong | naive |")
    assert len(rows) == len(found)
    for (source, _, right, *shown), (exact, naive) in zip(rows, found, strict=True):
        assert holds(right, exact) and not holds(right, naive), source
        shown_exact, wrong, shown_naive = shown
        if wrong != "-" and "transformers" not in source:
            assert holds(wrong, naive), source
        for cell, value in ((shown_exact, exact), (shown_naive, naive)):
            expected = pytest.approx(value, rel=5e-4, abs=RTOL["float32"])
            assert float(cell) == expected, source
