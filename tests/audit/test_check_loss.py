"""`check_loss_fn` finds a loss that is not a sum, and a count of other tokens.

`test_kinds_of_losses.py` repeats this for every kind of loss and many batches.
"""

import re
from typing import Any

import jax.numpy as jnp
import kinds_of_losses as kinds
import pytest

from optax_tokenaccum import check_loss_fn

PARAMS = {"w": jnp.float32(0.5)}


@pytest.mark.parametrize(
    ("loss_fn", "how"),
    [
        (kinds.ours, r"entry by entry of \['mask'\]"),
        (kinds.ignore_index, r"entry by entry of \['ignored'\]"),
        (kinds.next_token_without_mask, "parameters of zero"),
        (kinds.rows_on, r"entry by entry of .*\['rows_on'\]"),
        (kinds.weighted_regression, r"entry by entry of \['row_weights'\]"),
        (kinds.huber_on_zero_or_one, r"entry by entry of \['mask_ints'\]"),
        (kinds.dropout_with_keys_of_rows, r"entry by entry of \['mask'\]"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_sums_pass(loss_fn: Any, how: str):
    ((params, batch),) = kinds.problems(loss_fn, [0])
    report = check_loss_fn(loss_fn, params, [batch])
    assert report.passed, str(report)
    report.assert_exact()
    assert str(report).startswith("OK")
    assert report.count_checked is not None
    assert re.search(how, report.count_checked)


@pytest.mark.parametrize(
    "loss_fn",
    [
        kinds.already_mean,
        kinds.mean_over_rows,
        kinds.auxiliary_mean,
        kinds.zero_for_the_whole_batch,
        kinds.batch_statistics,
        kinds.constant_count,
        kinds.mean_count,
        kinds.unshifted,
        kinds.unshifted_without_mask,
        kinds.with_padding,
        kinds.with_padding_without_mask,
        kinds.per_sequence,
        kinds.per_sequence_without_mask,
        kinds.loss_without_mask,
        kinds.random_loss,
    ],
    ids=lambda loss_fn: loss_fn.__name__,
)
def test_mistakes_are_named(loss_fn: Any):
    ((params, batch),) = kinds.problems(loss_fn, [0])
    report = check_loss_fn(loss_fn, params, [batch])
    assert not report.passed
    with pytest.raises(AssertionError, match=f"WRONG: .*{kinds.WRONG[loss_fn]}"):
        report.assert_exact()


def test_a_loss_that_is_not_finite_is_not_called_random():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.nan * jnp.sum(batch), batch.shape[0]

    report = check_loss_fn(loss_fn, PARAMS, [jnp.ones((4, 2))])
    assert report.findings == ("loss and count must be finite: got nan and 4.0.",)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_count_that_is_off_in_every_row_is_named(more: int):
    def loss_fn(params: Any, batch: Any) -> Any:
        loss = jnp.sum(batch["mask"] * (params["w"] * batch["x"] - 1) ** 2)
        return loss, batch["mask"].sum() + more * len(batch["mask"])

    batch = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}
    report = check_loss_fn(loss_fn, PARAMS, [batch])
    (finding,) = report.findings
    start = f"the count is {9 + 4 * more} where the entries of ['mask'] add up to 9."
    assert finding.startswith(start)


def test_a_count_that_is_at_least_1_is_not_condemned():
    def loss_fn(params: Any, batch: Any) -> Any:
        loss = jnp.sum(batch["mask"] * (params["w"] * batch["x"] - 1) ** 2)
        return loss, jnp.maximum(batch["mask"].sum(), 1)

    batch = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}
    check_loss_fn(loss_fn, PARAMS, [batch]).assert_exact()


def test_a_loss_that_counts_nothing_is_named():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] * batch - 1) ** 2), 0

    report = check_loss_fn(loss_fn, PARAMS, [jnp.ones((4, 2))])
    assert report.findings[0].startswith("the loss is 2, and its count is 0")


def test_what_cannot_be_checked_says_so():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] * batch - 1) ** 2), batch.size

    report = check_loss_fn(loss_fn, PARAMS, [jnp.arange(6.0)])
    assert report.passed and report.count_checked is None
    assert "was not checked" in str(report)
    with pytest.raises(ValueError, match="at least two rows"):
        check_loss_fn(loss_fn, PARAMS, [jnp.ones(1)])
    with pytest.raises(ValueError, match="leading axis"):
        check_loss_fn(loss_fn, PARAMS, [jnp.ones(())])
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        check_loss_fn(None, PARAMS, [jnp.ones(2)])
