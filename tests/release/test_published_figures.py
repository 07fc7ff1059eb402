"""Figures that other projects published, and those of `docs/swap.md`."""

import functools
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import token_accumulation
from optax_tokenaccum.losses import softmax_cross_entropy_sum

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "swap.md").read_text(encoding="utf-8")
NAIVE, EXACT = optax.MultiSteps, token_accumulation
SEEDS = 9
# At this learning rate, the parameters are negligible next to the update of SGD, from
# which the gradient is read. Dividing by a power of two is exact.
READABLE = 2.0**20


@functools.cache
def compiled(way: Any, loss_fn: Any, k: int) -> tuple[Any, Any]:
    """Return an optimizer of windows of `k`, and its compiled step."""

    def mean(params: Any, batch: Any) -> Any:
        loss_sum, num_tokens = loss_fn(params, batch)
        return loss_sum / num_tokens, num_tokens

    optimizer, is_exact = way(optax.sgd(READABLE), k), way is EXACT
    given = loss_fn if is_exact else mean
    return optimizer, helpers.micro_step(optimizer, given, is_exact)


def gradient(way: Any, loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    """Return the gradient that SGD applies for a window."""
    optimizer, step = compiled(way, loss_fn, len(micro_batches))
    after, state = params, optimizer.init(params)
    for batch in micro_batches:
        after, state = step(after, state, batch)
    return jax.tree.map(lambda g: g / READABLE, helpers.difference(params, after))


def cells_of(header: str) -> list[list[str]]:
    """Return the rows of the page's table with that header."""
    rows = PAGE.split(header)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def errors(way: Any, k: int) -> np.ndarray:
    """Return relative L2 distances and cosines of the models' gradients."""
    found = []
    for seed in range(SEEDS):
        params, batch = helpers.init_params(seed), helpers.ragged_batch(seed)
        expected = helpers.float64_gradient(params, batch)
        got = gradient(way, helpers.loss_sum_fn, params, helpers.cut(batch, k))
        x, y = flat(got), flat(expected)
        cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        found.append((helpers.relative_error(got, expected), cosine))
    return np.array(found).T


@pytest.mark.parametrize(
    "cells", cells_of("| k | naive, median | least to most | cosine | exact |")
)
def test_one_gradient(cells: list[str]):
    k, median, spread, cosine, _ = cells
    distances, _ = errors(EXACT, int(k))
    assert distances.max() < helpers.RTOL["float32"]
    distances, cosines = errors(NAIVE, int(k))
    found = [np.median(distances), distances.min(), distances.max()]
    shown = [float(median), *map(float, spread.split(" to "))]
    np.testing.assert_allclose(found, shown, rtol=0.06)
    assert np.median(cosines) == pytest.approx(float(cosine), abs=0.006)


def line_loss_fn(params: Any, batch: Any) -> Any:
    """The loss of `(loss_sum, num_tokens)`, which is its own gradient."""
    loss_sum, num_tokens = batch
    return params * loss_sum, num_tokens


def odd_or_even_loss_fn(params: Any, batch: Any) -> Any:
    """The loss of the `Linear(1, 2)` of accelerate's guide: is a number odd?"""
    numbers, mask = batch
    logits = numbers[..., None] * params
    return softmax_cross_entropy_sum(logits, numbers % 2, mask)


def published(way: Any) -> list[float]:
    # The loss of torchtitan's pull request 4167.
    found = [gradient(way, line_loss_fn, jnp.ones(()), [(2.0, 1), (90.0, 9)])]
    # The gradients of Megatron-LM's issue 7452, from sums and tokens chosen here.
    window = [(4.0, 2), (4.0, 1), (8.0, 1)]
    found.append(gradient(way, line_loss_fn, jnp.zeros(()), window))
    # The guide of accelerate, with rows of 1 to 16 numbers. Its two devices alternate
    # every 4 rows, so they get 10 + 42 = 52 and 26 + 58 = 84 tokens. The parameters
    # are those that PyTorch draws after `torch.manual_seed(0)`.
    mask = np.tri(16, dtype=bool)
    numbers = np.broadcast_to(np.arange(1, 17, dtype=np.int32), mask.shape)
    params = jnp.array([-0.00748682, 0.53644359], jnp.float32)
    grads = gradient(way, odd_or_even_loss_fn, params, helpers.cut((numbers, mask), 4))
    return [*map(float, found), *(params - 0.08 * grads).tolist()]


def test_what_others_published():
    right, wrong = [9.2, 4, 0.2117, 0.3172], [6, 14 / 3]
    np.testing.assert_allclose(published(EXACT), right, rtol=0, atol=5e-5)
    naive = published(NAIVE)
    np.testing.assert_allclose(naive[: len(wrong)], wrong, rtol=0, atol=5e-5)
    assert (abs(np.subtract(naive, right)) > 0.01).all()
