"""The audit of losses that couple rows: never EXACT where it can look."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audited_loops import with_transformation
from helpers import slow

from optax_tokenaccum import Verdict, audit

PARAMS = {"w": jnp.float32([0.5, -1.0, 2.0])}
COUPLED, NOT_LOOKED = "loss_fn couples rows:", "Not checked: whether loss_fn couples"


def make_batch(seed: int, rows: int, length: int) -> Any:
    random = np.random.default_rng(seed)
    return {
        "x": np.float32(random.normal(size=(rows, length, 3))),
        "y": np.float32(random.normal(size=(rows, length))),
        "mask": np.arange(length) < random.integers(1, length + 1, (rows, 1)),
        "labels": random.integers(-1, 5, (rows, length)),
    }


def plain(params: Any, batch: Any) -> Any:
    losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(jnp.where(batch["mask"], losses, 0)), jnp.sum(batch["mask"])


def of_labels(params: Any, batch: Any) -> Any:
    return plain(params, batch | {"mask": batch["labels"] >= 0})


def contrastive(params: Any, batch: Any) -> Any:
    rows = jnp.mean(batch["x"] * params["w"], 1)
    scores = 5 * rows @ jnp.roll(rows, 1, axis=1).T
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores))), len(rows)


def balanced_by_mask(params: Any, batch: Any) -> Any:
    """A loss that couples rows, and leaves padding out."""
    loss_sum, n = plain(params, batch)
    gates = jax.nn.softmax(batch["x"] * params["w"])
    gates = jnp.where(batch["mask"][..., None], gates, 0).sum((0, 1)) / n
    return loss_sum + n * jnp.sum(gates**2), n


def without_mask(params: Any, batch: Any) -> Any:
    return plain(params, batch | {"mask": jnp.ones(batch["y"].shape)})


def mean(params: Any, batch: Any) -> Any:
    loss_sum, n = plain(params, batch)
    return loss_sum / n, n


def of_four_rows(params: Any, batch: Any) -> Any:
    assert batch["x"].shape[0] == 4
    return plain(params, batch)


def of_one_sequence(params: Any, batch: Any) -> Any:
    return plain(params, jax.tree.map(lambda x: x[None], batch) | {"x": jnp.ones(3)})


def attending(params: Any, batch: Any) -> Any:
    """A loss of one sequence, whose tokens see each other."""
    x = jnp.exp(batch["y"] * params["w"][0])
    losses = (x / jnp.sum(x) * batch["y"] - 1) ** 2
    return jnp.sum(jnp.where(batch["mask"], losses, 0)), jnp.sum(batch["mask"])


# No two micro-batches have the same shape.
SHAPES = [make_batch(i, 5 - i, 5 + i) for i in range(3)]
FOUR = [make_batch(i, 4, 6) for i in range(3)]
FLAT: Any = [{k: b[k][0] for k in ("y", "mask")} for b in FOUR]


@pytest.mark.parametrize(
    ("loss_fn", "batches", "says"),
    [
        slow(contrastive, FOUR, COUPLED),
        (contrastive, SHAPES, COUPLED),
        (balanced_by_mask, SHAPES, COUPLED),
        (mean, SHAPES, "see check_loss_fn"),
        (plain, SHAPES, None),
        slow(of_labels, SHAPES, None),
        (of_four_rows, FOUR, NOT_LOOKED),
        (plain, [make_batch(i, 1, 4 + i) for i in range(3)], NOT_LOOKED),
        slow(attending, FLAT, NOT_LOOKED),
        slow(of_one_sequence, FLAT, None),
        slow(without_mask, SHAPES, None),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loss_that_couples_rows_is_never_exact(loss_fn: Any, batches: Any, says: Any):
    report = audit(with_transformation(loss_fn), loss_fn, PARAMS, batches)
    assert report.relative_error < 1e-5
    is_right = says in (None, NOT_LOOKED)
    assert report.verdict is (Verdict.EXACT if is_right else Verdict.UNKNOWN)
    for text in (COUPLED, NOT_LOOKED, "see check_loss_fn"):
        assert (text in report.explanation) == (text == says), str(report)
