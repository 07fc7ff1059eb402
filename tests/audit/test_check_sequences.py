"""`check_loss_fn(per="sequence")`: means over sequences, and wrong counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import check_loss_fn, reduce_loss

ROWS, LENGTH = 6, 9
PARAMS = {"w": jnp.float32(0.5)}


def make_batch(seed: int, packed: bool) -> dict[str, np.ndarray]:
    """Rows of random lengths, the last without tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.array([*rng.integers(3, LENGTH + 1, ROWS - 1), 0])
    there = np.arange(LENGTH) < lengths[:, None]
    ids = 1 + (np.arange(LENGTH) >= lengths[:, None] // 2)
    batch = {
        "x": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
        "mask": there & (rng.uniform(size=there.shape) < 0.8) | (there & (ids == 2)),
    }
    return batch | ({"segment_ids": np.where(there, ids, 0)} if packed else {})


def losses_of(params: Any, batch: Any) -> jax.Array:
    return (params["w"] * batch["x"] - 1) ** 2


def reduced(reduction: str, **options: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        ids = batch.get("segment_ids")
        losses = losses_of(params, batch)
        return reduce_loss(losses, batch["mask"], reduction, segment_ids=ids, **options)

    return loss_fn


SEQUENCE_MEANS = [
    reduced("seq-mean-token-mean"),
    reduced("seq-mean-token-sum"),
    reduced("seq-mean-token-sum-norm", max_length=LENGTH),
]


@pytest.mark.parametrize(
    ("loss_fn", "packed"),
    [*((loss_fn, False) for loss_fn in SEQUENCE_MEANS), (SEQUENCE_MEANS[0], True)],
    ids=["mean", "sum", "norm", "packed"],
)
def test_means_over_sequences_pass(loss_fn: Any, packed: bool):
    batch = make_batch(0, packed)
    report = check_loss_fn(loss_fn, PARAMS, [batch], per="sequence")
    assert report.passed, str(report)
    assert report.count_checked == "row by row of ['mask']"


def test_sequences_of_one_token_are_not_condemned():
    # Without either of its tokens, such a row of two sequences has another count.
    batch = make_batch(0, packed=True)
    batch["mask"][0] = np.arange(LENGTH) < 2
    batch["segment_ids"][0] = np.arange(LENGTH) + 1
    report = check_loss_fn(SEQUENCE_MEANS[0], PARAMS, [batch], per="sequence")
    assert report.passed, str(report)
    assert report.count_checked == "row by row of ['mask']"
    # The number of sequences is that of their tokens.
    batch = make_batch(0, packed=False)
    batch["mask"] &= np.arange(LENGTH) == 0
    assert check_loss_fn(SEQUENCE_MEANS[1], PARAMS, [batch], per="sequence").passed


def test_a_count_of_sequences_is_not_one_of_tokens():
    findings = check_loss_fn(SEQUENCE_MEANS[1], PARAMS, [make_batch(0, False)]).findings
    assert 'per="sequence"' in findings[-1]


def all_rows(params: Any, batch: Any) -> Any:
    return reduced("seq-mean-token-mean")(params, batch)[0], len(batch["x"])


def tokens(params: Any, batch: Any) -> Any:
    loss_sum, _ = reduced("seq-mean-token-sum")(params, batch)
    return loss_sum, jnp.sum(batch["mask"])


def long_sequences(params: Any, batch: Any) -> Any:
    loss_sum, _ = reduced("seq-mean-token-sum")(params, batch)
    return loss_sum, jnp.sum(jnp.sum(batch["mask"], -1) > 4)


def shares(params: Any, batch: Any) -> Any:
    loss_sum, _ = reduced("seq-mean-token-sum")(params, batch)
    return loss_sum, jnp.sum(jnp.sum(batch["mask"], -1) / LENGTH)


def mean_of_sequences(params: Any, batch: Any) -> Any:
    loss_sum, n = reduced("seq-mean-token-mean")(params, batch)
    return loss_sum / jnp.maximum(n, 1), n


def padded_batch(params: Any, batch: Any) -> Any:
    longest = jnp.max(jnp.sum(batch["mask"], -1))
    loss_sum, n = reduced("seq-mean-token-sum")(params, batch)
    return loss_sum / longest, n


@pytest.mark.parametrize(
    ("loss_fn", "finding"),
    [
        (tokens, "changes with every entry of"),
        (long_sequences, "sequences that the count leaves out"),
        (shares, "must be a whole number of sequences"),
        (mean_of_sequences, "already a mean"),
        (padded_batch, "depends on the other rows"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_mistakes_are_named(loss_fn: Any, finding: str):
    batch = make_batch(0, packed=False)
    report = check_loss_fn(loss_fn, PARAMS, [batch], per="sequence")
    assert any(finding in x for x in report.findings), str(report)


@pytest.mark.parametrize(
    "loss_fn",
    [all_rows, reduced("seq-mean-token-mean", count_empty=True)],
    ids=["by hand", "count_empty"],
)
def test_a_count_of_all_rows_is_neither_condemned_nor_called_right(loss_fn: Any):
    """Rows of padding count too, which may be meant."""
    report = check_loss_fn(loss_fn, PARAMS, [make_batch(0, True)], per="sequence")
    assert report.passed and report.count_checked is None
