"""`check_loss_fn` finds a loss that is not a sum, and a count of other tokens."""

import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import check_loss_fn, softmax_cross_entropy_sum

PARAMS = helpers.init_params(0)
BATCH = {
    name: leaf[:, :12] for name, leaf in helpers.ragged_batch(0, rows=6).items()
} | {"mask": np.arange(12) < np.array([[2], [12], [7], [4], [9], [11]])}
LABELS = {
    "tokens": BATCH["tokens"],
    "labels": np.where(BATCH["mask"], BATCH["labels"], -100).astype(np.int32),
}
NO_MASK = {"tokens": np.where(BATCH["mask"], BATCH["tokens"] % 31 + 1, 0)}


def from_labels(params: Any, batch: Any) -> Any:
    logits = helpers.logits_of(params, batch["tokens"])
    return softmax_cross_entropy_sum(logits, batch["labels"], ignore_index=-100)


def next_token(params: Any, batch: Any) -> Any:
    """Padding is token 0; the batch contains no mask."""
    logits = helpers.logits_of(params, batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:]
    return softmax_cross_entropy_sum(logits, labels, labels != 0)


def squared_errors(params: Any, batch: Any) -> Any:
    """A regression whose labels are 0 and 1, but are not a mask."""
    errors = jnp.sum((params["hidden"].sum(0) * batch["x"] - batch["y"]) ** 2, -1)
    return jnp.sum(errors * batch["weight"]), jnp.sum(batch["weight"])


def with_keys(params: Any, batch: Any) -> Any:
    """Dropout that depends only on the row, through the row's own key."""
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (12,)))(batch["key"])
    tokens = jnp.where(keep, batch["tokens"], 0)
    return helpers.loss_sum_fn(params, batch | {"tokens": tokens})


KEYS = BATCH | {"key": jax.random.split(jax.random.key(0), 6)}
REGRESSION = {
    "x": np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32),
    "y": np.random.default_rng(1).integers(0, 2, (6, 1)),
    "weight": np.array([1, 0, 1, 1, 0, 1], np.float32),
}


@pytest.mark.parametrize(
    ("loss_fn", "batch", "how"),
    [
        (helpers.loss_sum_fn, BATCH, r"entry by entry of \['mask'\]"),
        (from_labels, LABELS, r"entry by entry of \['labels'\]"),
        (next_token, NO_MASK, "parameters of zero"),
        (squared_errors, REGRESSION, r"entry by entry of \['weight'\]"),
        (with_keys, KEYS, r"entry by entry of \['mask'\]"),
    ],
    ids=["mask", "ignore_index", "padding", "regression", "keys"],
)
def test_sums_pass(loss_fn: Any, batch: Any, how: str):
    report = check_loss_fn(loss_fn, PARAMS, [batch])
    assert report.passed, str(report)
    report.assert_exact()
    assert str(report).startswith("OK")
    assert report.count_checked is not None
    assert re.search(how, report.count_checked)


def already_mean(params: Any, batch: Any) -> Any:
    return helpers.loss_mean_fn(params, batch)


def mean_over_rows(params: Any, batch: Any) -> Any:
    loss_sum, n = helpers.loss_sum_fn(params, batch)
    return loss_sum / len(batch["mask"]), n


def auxiliary(params: Any, batch: Any) -> Any:
    loss_sum, n = helpers.loss_sum_fn(params, batch)
    return loss_sum + 10 * jnp.mean(params["embed"][batch["tokens"]] ** 2), n


def zero_by_accident(params: Any, batch: Any) -> Any:
    _, n = helpers.loss_sum_fn(params, batch)
    return len(batch["mask"]) - 6.0, n


def batch_statistics(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["tokens"]]
    x = (x - x.mean((0, 1))) / x.std((0, 1))
    logits = jnp.tanh(x @ params["hidden"]) @ params["out"]
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def constant_count(params: Any, batch: Any) -> Any:
    return helpers.loss_sum_fn(params, batch)[0], 128


def mean_count(params: Any, batch: Any) -> Any:
    return helpers.loss_sum_fn(params, batch)[0], jnp.mean(batch["mask"] * 12.0)


def unshifted(params: Any, batch: Any) -> Any:
    shifted = {
        "tokens": batch["tokens"][:, :-1],
        "labels": batch["labels"][:, 1:],
        "mask": batch["mask"][:, 1:],
    }
    return helpers.loss_sum_fn(params, shifted)[0], jnp.sum(batch["mask"])


def with_padding(params: Any, batch: Any) -> Any:
    return helpers.loss_sum_fn(params, batch)[0], batch["mask"].size


def per_sequence(params: Any, batch: Any) -> Any:
    return helpers.loss_sum_fn(params, batch)[0], len(batch["mask"])


def loss_without_mask(params: Any, batch: Any) -> Any:
    everywhere = batch | {"mask": jnp.ones_like(batch["mask"])}
    return helpers.loss_sum_fn(params, everywhere)[0], jnp.sum(batch["mask"])


@pytest.mark.parametrize(
    ("loss_fn", "finding"),
    [
        (already_mean, "already a mean"),
        (mean_over_rows, "already a mean"),
        (auxiliary, "not a sum over tokens"),
        (zero_by_accident, "not a sum over tokens"),
        (batch_statistics, "depends on the other rows"),
        (constant_count, "the count is not a sum"),
        (mean_count, "the count is not a sum"),
        (unshifted, "count takes in what the loss leaves out.*before their shift"),
        (with_padding, "loss takes in what the count leaves out"),
        (per_sequence, "loss takes in what the count leaves out.*one per sequence"),
        (loss_without_mask, "count takes in what the loss leaves out"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_mistakes_are_named(loss_fn: Any, finding: str):
    report = check_loss_fn(loss_fn, PARAMS, [BATCH])
    assert not report.passed
    with pytest.raises(AssertionError, match=f"WRONG: .*{finding}"):
        report.assert_exact()


def padding_unshifted(params: Any, batch: Any) -> Any:
    return next_token(params, batch)[0], jnp.sum(batch["tokens"] != 0)


def padding_counted(params: Any, batch: Any) -> Any:
    return next_token(params, batch)[0], batch["tokens"][:, 1:].size


def padding_per_sequence(params: Any, batch: Any) -> Any:
    return next_token(params, batch)[0], len(batch["tokens"])


@pytest.mark.parametrize(
    ("loss_fn", "finding"),
    [
        (padding_unshifted, r"\+1 in every row: labels before their shift"),
        (padding_counted, "the same with any padding"),
        (padding_per_sequence, "one per sequence"),
    ],
    ids=["unshifted", "padding", "sequences"],
)
def test_counts_without_any_mask_in_the_batch(loss_fn: Any, finding: str):
    report = check_loss_fn(loss_fn, PARAMS, [NO_MASK])
    with pytest.raises(AssertionError, match=finding):
        report.assert_exact()


def test_a_random_loss():
    keys = iter(range(100))

    def loss_fn(params: Any, batch: Any) -> Any:
        def draw() -> np.float32:
            return np.float32(next(keys))

        loss_sum, n = helpers.loss_sum_fn(params, batch)
        noise = jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))
        return loss_sum + noise, n

    report = check_loss_fn(loss_fn, PARAMS, [BATCH])
    assert "random" in report.findings[0]


def test_a_loss_that_is_not_finite_is_not_called_random():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.nan * jnp.sum(batch), batch.shape[0]

    report = check_loss_fn(loss_fn, PARAMS, [jnp.ones((4, 2))])
    assert report.findings == ("loss and count must be finite: got nan and 4.0.",)


def test_what_cannot_be_checked_says_so():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params["hidden"].sum() * batch - 1) ** 2), batch.size

    report = check_loss_fn(loss_fn, PARAMS, [jnp.arange(6.0)])
    assert report.passed and report.count_checked is None
    assert "was not checked" in str(report)
    with pytest.raises(ValueError, match="at least two rows"):
        check_loss_fn(loss_fn, PARAMS, [jnp.ones(1)])
    with pytest.raises(ValueError, match="leading axis"):
        check_loss_fn(loss_fn, PARAMS, [jnp.ones(())])
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        check_loss_fn(None, PARAMS, [jnp.ones(2)])
