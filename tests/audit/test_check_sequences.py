"""`check_loss_fn(per="sequence")`: means over sequences, and wrong counts."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

from optax_tokenaccum import check_loss_fn, reduce_loss

ROWS, LENGTH = 6, 9
PARAMS = {"w": jnp.float32(0.5)}


def make_batch(packed: bool) -> dict[str, np.ndarray]:
    """Rows of random lengths, the last without tokens."""
    rng = np.random.default_rng(0)
    lengths = np.array([*rng.integers(3, LENGTH + 1, ROWS - 1), 0])
    there = np.arange(LENGTH) < lengths[:, None]
    ids = 1 + (np.arange(LENGTH) >= lengths[:, None] // 2)
    batch = {
        "x": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
        "mask": there & (rng.uniform(size=there.shape) < 0.8) | (there & (ids == 2)),
    }
    return batch | ({"segment_ids": np.where(there, ids, 0)} if packed else {})


def reduced(reduction: str, **options: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        ids = batch.get("segment_ids")
        losses = (params["w"] * batch["x"] - 1) ** 2
        return reduce_loss(losses, batch["mask"], reduction, segment_ids=ids, **options)

    return loss_fn


MEAN, SUM = reduced("seq-mean-token-mean"), reduced("seq-mean-token-sum")


@pytest.mark.parametrize(
    ("loss_fn", "packed"),
    [
        slow(MEAN, False),
        (MEAN, True),
        slow(reduced("seq-mean-token-sum-norm", max_length=LENGTH), False),
    ],
    ids=["mean", "packed", "norm"],
)
def test_means_over_sequences_pass(loss_fn: Any, packed: bool):
    report = check_loss_fn(loss_fn, PARAMS, [make_batch(packed)], per="sequence")
    assert report.passed, str(report)
    assert report.count_checked == "row by row of ['mask']"


@pytest.mark.slow
def test_sequences_of_one_token_are_not_condemned():
    # Without either of its tokens, such a row of two sequences has another count.
    batch = make_batch(True)
    batch["mask"][0] = np.arange(LENGTH) < 2
    batch["segment_ids"][0] = np.arange(LENGTH) + 1
    report = check_loss_fn(MEAN, PARAMS, [batch], per="sequence")
    assert report.passed, str(report)
    assert report.count_checked == "row by row of ['mask']"


def tokens(params: Any, batch: Any, loss_fn: Any = SUM) -> Any:
    loss_sum, _ = loss_fn(params, batch)
    return loss_sum, jnp.sum(batch["mask"])


def unmasked(params: Any, batch: Any) -> Any:
    """The mean over all of a row, with padding; rows without tokens do not count."""
    losses = jnp.mean((params["w"] * batch["x"] - 1) ** 2, axis=1)
    return jnp.sum(losses), jnp.sum(jnp.any(batch["mask"], axis=1))


def test_a_mean_over_sequences_that_is_counted_in_tokens_is_told_to_ask_again():
    loss_fn = functools.partial(tokens, loss_fn=MEAN)
    for given in (loss_fn, MEAN, SUM):
        report = check_loss_fn(given, PARAMS, [make_batch(False)])
        assert 'give per="sequence"' in report.findings[-1]
    # No such doubt where tokens add up.
    token_mean = reduced("token-mean")
    report = check_loss_fn(token_mean, PARAMS, [make_batch(False)])
    assert report.passed and str(report).endswith("entry by entry of ['mask'].")


def long_sequences(params: Any, batch: Any) -> Any:
    loss_sum, _ = SUM(params, batch)
    return loss_sum, jnp.sum(jnp.sum(batch["mask"], -1) > 4)


def mean_of_sequences(params: Any, batch: Any) -> Any:
    loss_sum, n = MEAN(params, batch)
    return loss_sum / jnp.maximum(n, 1), n


@pytest.mark.parametrize(
    ("loss_fn", "finding"),
    [
        (tokens, "changes with every entry of"),
        (long_sequences, "sequences that the count leaves out"),
        (unmasked, "1 of 6 rows have a loss and a count of 0"),
        (mean_of_sequences, "already a mean"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_mistakes_are_named(loss_fn: Any, finding: str):
    batch = make_batch(False)
    report = check_loss_fn(loss_fn, PARAMS, [batch], per="sequence")
    assert any(finding in x for x in report.findings), str(report)


@pytest.mark.slow
def test_a_count_of_all_rows_is_neither_condemned_nor_called_right():
    """Rows of padding count too, which may be meant."""

    def all_rows(params: Any, batch: Any) -> Any:
        return MEAN(params, batch)[0], len(batch["mask"])

    report = check_loss_fn(all_rows, PARAMS, [make_batch(False)], per="sequence")
    assert not report.findings and not report.passed
    assert report.count_checked is None
    # `count_empty` counts the sequences that segment ids name.
    loss_fn = reduced("seq-mean-token-mean", count_empty=True)
    report = check_loss_fn(loss_fn, PARAMS, [make_batch(True)], per="sequence")
    assert report.count_checked == "row by row of ['segment_ids']"
