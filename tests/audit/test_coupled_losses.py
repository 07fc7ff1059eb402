"""The audit of losses that couple rows: never EXACT where it can look."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audited_loops import with_transformation

from optax_tokenaccum import Verdict, audit

PARAMS = {"w": jnp.float32([0.5, -1.0, 2.0])}
NOT_LOOKED = "Not checked: whether loss_fn couples rows"


def make_batch(seed: int, rows: int, length: int, lowest: int = 0) -> Any:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, length + 1, (rows, 1))
    ids = random.integers(lowest, 5, (rows, length))
    return {
        "x": np.float32(random.normal(size=(rows, length, 3))),
        "ids": ids,
        "mask": np.arange(length) < lengths,
    }


def errors(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"] - batch["ids"]) ** 2


def plain(params: Any, batch: Any) -> Any:
    mask = batch["mask"]
    return jnp.sum(jnp.where(mask, errors(params, batch), 0)), jnp.sum(mask)


def contrastive(params: Any, batch: Any) -> Any:
    rows = jnp.mean(batch["x"] * params["w"], 1)
    scores = 5 * rows @ jnp.roll(rows, 1, axis=1).T
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores))), len(rows)


def balanced(params: Any, batch: Any) -> Any:
    loss_sum, n = plain(params, batch)
    gates = jax.nn.softmax(batch["x"] * params["w"])
    shares = jax.nn.one_hot(gates.argmax(-1), 3).mean((0, 1))
    return loss_sum + n * jnp.sum(shares * gates.mean((0, 1))), n


def normalized(params: Any, batch: Any) -> Any:
    x = batch["x"] * params["w"]
    x = (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-3)
    mask = batch["mask"]
    return jnp.sum(jnp.where(mask, (x.sum(-1) - 1) ** 2, 0)), jnp.sum(mask)


def mean(params: Any, batch: Any) -> Any:
    loss_sum, n = plain(params, batch)
    return loss_sum / n, n


def constant_count(params: Any, batch: Any) -> Any:
    return plain(params, batch)[0], 7


SAME_SHAPES = [make_batch(i, 4, 6) for i in range(3)]
# No two have the same length, and padding changes nothing.
LENGTHS = [make_batch(i, 4, 5 + i) for i in range(3)]


@pytest.mark.parametrize("loss_fn", [balanced, normalized], ids=lambda f: f.__name__)
def test_a_loss_that_couples_rows_is_never_exact(loss_fn: Any):
    report = audit(with_transformation(loss_fn), loss_fn, PARAMS, SAME_SHAPES)
    assert report.relative_error < 1e-5
    assert report.verdict is Verdict.UNKNOWN
    assert report.explanation.startswith("loss_fn couples rows")


def test_a_contrastive_loss_is_never_exact():
    batches = [make_batch(i, 4 if i < 2 else 2, 6) for i in range(3)]
    report = audit(with_transformation(contrastive), contrastive, PARAMS, batches)
    assert report.relative_error < 1e-5
    assert report.verdict is Verdict.UNKNOWN
    assert report.explanation.startswith("loss_fn couples rows")


@pytest.mark.parametrize("batches", [SAME_SHAPES, LENGTHS], ids=["same", "padded"])
def test_a_loss_that_does_not_passes_and_was_looked_at(batches: Any):
    report = audit(with_transformation(plain), plain, PARAMS, batches)
    report.assert_exact()
    assert NOT_LOOKED not in report.explanation
    coupled = balanced_by_mask
    report = audit(with_transformation(coupled), coupled, PARAMS, batches)
    assert report.verdict is Verdict.UNKNOWN
    assert report.explanation.startswith("loss_fn couples rows")


def balanced_by_mask(params: Any, batch: Any) -> Any:
    """A loss that couples rows, and leaves padding out."""
    loss_sum, n = plain(params, batch)
    gates = jax.nn.softmax(batch["x"] * params["w"])
    gates = jnp.where(batch["mask"][..., None], gates, 0).sum((0, 1)) / n
    return loss_sum + n * jnp.sum(gates**2), n


@pytest.mark.parametrize("loss_fn", [mean, constant_count], ids=lambda f: f.__name__)
def test_a_loss_that_is_no_sum_is_not_called_coupled(loss_fn: Any):
    report = audit(with_transformation(loss_fn), loss_fn, PARAMS, SAME_SHAPES)
    assert report.verdict is Verdict.UNKNOWN
    assert "see check_loss_fn" in report.explanation
    assert "couples rows" not in report.explanation


def without_mask(params: Any, batch: Any) -> Any:
    """Padding counts."""
    return jnp.sum(errors(params, batch)), batch["ids"].size


def of_four_rows(params: Any, batch: Any) -> Any:
    assert batch["x"].shape[0] == 4
    return plain(params, batch)


@pytest.mark.parametrize(
    ("loss_fn", "batches"),
    [
        (without_mask, LENGTHS),
        (of_four_rows, SAME_SHAPES),
        (plain, [make_batch(i, 2 + i, 6) for i in range(3)]),
    ],
    ids=["padding counts", "a fixed shape", "other rows"],
)
def test_where_it_cannot_look_it_says_so(loss_fn: Any, batches: Any):
    report = audit(with_transformation(loss_fn), loss_fn, PARAMS, batches)
    report.assert_exact()
    assert NOT_LOOKED in report.explanation


def test_ignored_labels_are_padded_with_ignored_labels():
    batches = [make_batch(i, 4, 5 + i, lowest=-1) for i in range(3)]

    def loss_fn(params: Any, batch: Any) -> Any:
        is_there = batch["ids"] >= 0
        losses = jnp.where(is_there, errors(params, batch), 0)
        return jnp.sum(losses), jnp.sum(is_there)

    report = audit(with_transformation(loss_fn), loss_fn, PARAMS, batches)
    report.assert_exact()
    assert NOT_LOOKED not in report.explanation
