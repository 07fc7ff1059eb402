"""`check_loss_fn` passes losses as people write them, and finds the wrong ones."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

from optax_tokenaccum import check_loss_fn, softmax_cross_entropy_sum

Loss = Callable[[Any, Any], tuple[Any, Any]]
ROWS, LENGTH, WIDTH = 6, 7, 4


def make_batch() -> dict[str, Any]:
    """Rows of 2 to 7 tokens, with the leaves of every kind of loss."""
    random, tokens = np.random.default_rng(0), (ROWS, LENGTH)
    lengths = np.array([[LENGTH], [2], [5], [4], [6], [3]])
    attended = np.arange(LENGTH) < lengths
    # Each row has at least one loss token and one prompt token.
    mask = attended & (np.arange(LENGTH) >= random.integers(1, lengths))
    labels = random.integers(0, WIDTH, tokens)
    return {
        "x": np.float32(random.normal(size=(*tokens, WIDTH))),
        "labels": labels,
        "ignored": np.where(mask, labels, -100),
        "attended": attended,
        "mask": mask,
        "mask_floats": np.float32(mask),
        "row_weights": np.float32(random.random(ROWS)),
        "rewards": np.float32([[0.0], [1], [-1], [0], [2], [1]]),
        "segments": np.where(mask, 1 + (np.arange(LENGTH) > 3), 0),
        "keys": jax.random.split(jax.random.key(0), ROWS),
    }


RANDOM = np.random.default_rng(1)
WEIGHTS = {
    name: np.float32(RANDOM.normal(size=(WIDTH, WIDTH))) for name in ("hidden", "out")
}


def logits_of(p: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ p["hidden"]) @ p["out"]


def nll(p: Any, b: Any, x: Any = None) -> jax.Array:
    log_p = jax.nn.log_softmax(logits_of(p, b["x"] if x is None else x))
    return -jnp.take_along_axis(log_p, b["labels"][..., None], -1)[..., 0]


def masked(losses: Any, mask: Any) -> tuple[Any, Any]:
    return jnp.sum(losses * mask), jnp.sum(mask)


def ours(p: Any, b: Any, labels: str = "labels") -> Any:
    mask = None if labels == "ignored" else b["mask"]
    logits = logits_of(p, b["x"])
    return softmax_cross_entropy_sum(logits, b[labels], mask, ignore_index=-100)


def more(extra: Callable[[Any, Any], Any]) -> Loss:
    return lambda p, b: (ours(p, b)[0] + extra(p, b), ours(p, b)[1])


def counted(count: Callable[[Any], Any], loss_fn: Loss = ours) -> Loss:
    return lambda p, b: (loss_fn(p, b)[0], count(b))


def in_bfloat16(p: Any, b: Any) -> Any:
    return ours(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), b)


def shifted(p: Any, b: Any) -> Any:
    return masked(nll(p, b)[:, 1:], b["attended"][:, 1:])


def of_segments(p: Any, b: Any) -> Any:
    return masked(nll(p, b), b["segments"] > 0)


def dropout_with_keys_of_rows(p: Any, b: Any) -> Any:
    """Drop tokens by the row's own key."""
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (LENGTH, 1)))(b["keys"])
    return masked(nll(p, b, b["x"] * keep), b["mask"])


def attending(p: Any, b: Any, shift: int = 0) -> Any:
    """The mask is also that of an attention: a token changes the losses of others."""
    scores = b["x"] @ p["hidden"] @ b["x"].mT
    scores = jnp.where(b["attended"][:, None, :], scores, -1e9)
    losses = nll(p, b, jax.nn.softmax(scores) @ b["x"])
    return masked(losses[:, shift:], b["attended"][:, shift:])


# Right losses, and the mask if it must be named. By default the first two run.
RIGHT: dict[str, tuple[Loss, str]] = {
    "mask": (ours, "auto"),
    "ignored labels": (lambda p, b: ours(p, b, "ignored"), "ignored"),
    "row weights": (
        lambda p, b: masked(nll(p, b), b["row_weights"][:, None] * jnp.ones(LENGTH)),
        "['row_weights']",
    ),
    "rewards of 0": (
        lambda p, b: (masked(nll(p, b) * b["rewards"], b["mask"])[0], b["mask"].sum()),
        "auto",
    ),
    "keys of rows": (dropout_with_keys_of_rows, "auto"),
    "bfloat16": (in_bfloat16, "auto"),
    "shifted": (shifted, "auto"),
    "auxiliary loss": (
        lambda p, b: (
            masked(nll(p, b), b["mask_floats"])[0]
            + 1e-2 * jnp.sum(p["hidden"] ** 2) * jnp.sum(b["mask_floats"]),
            jnp.sum(b["mask_floats"]),
        ),
        "mask_floats",
    ),
    "attention": (attending, "auto"),
    "segments": (of_segments, "segments"),
}


def batch_statistics(p: Any, b: Any) -> Any:
    x = (b["x"] - b["x"].mean((0, 1))) / (b["x"].std((0, 1)) + 1e-3)
    return masked(nll(p, b, x), b["mask"])


def contrastive(p: Any, b: Any) -> Any:
    """The negatives of a row are the other rows."""
    x = jnp.tanh(b["x"] @ p["hidden"])
    scores = 3 * x.mean(1) @ x[:, ::-1][:, 0].T
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores))), len(x)


def balance(p: Any, b: Any) -> Any:
    """A balance loss of experts: a product of two means over the batch."""
    gates = jax.nn.softmax(logits_of(p, b["x"])).reshape(-1, WIDTH)
    shares = jax.nn.one_hot(gates.argmax(-1), WIDTH).mean(0)
    return jnp.sum(b["mask"]) * WIDTH * jnp.sum(shares * gates.mean(0))


def mean_of_sequences(p: Any, b: Any) -> Any:
    mask = b["mask"]
    return jnp.sum(jnp.sum(nll(p, b) * mask, 1) / mask.sum(1)), mask.sum()


DRAWS = itertools.count()


def noise(*_: Any) -> Any:
    def draw() -> np.float32:
        return np.float32(next(DRAWS) * 0.618 % 1)  # never twice the same in a row

    return jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))


ONLY_COUNT = "count takes in what the loss leaves out"
ONLY_LOSS = "loss takes in what the count leaves out"
NO_SUM = "not a sum over tokens"
COUPLED = "depends on the other rows"
# Wrong losses, what is found, and the mask if it must be named. By default the first
# three run.
WRONG: dict[str, tuple[Loss, str, str]] = {
    "already a mean": (
        lambda p, b: (ours(p, b)[0] / ours(p, b)[1], ours(p, b)[1]),
        "already a mean",
        "auto",
    ),
    "unshifted": (
        counted(lambda b: jnp.sum(b["attended"]), shifted),
        f"{ONLY_COUNT}.*before their shift",
        "auto",
    ),
    "contrastive": (contrastive, COUPLED, "auto"),
    "unshifted attention": (
        counted(lambda b: jnp.sum(b["attended"]), lambda p, b: attending(p, b, 1)),
        ONLY_COUNT,
        "auto",
    ),
    "some labels ignored": (
        counted(
            lambda b: jnp.sum(b["mask"]),
            lambda p, b: masked(nll(p, b), b["mask"] & (b["labels"] > 0)),
        ),
        ONLY_COUNT,
        "auto",
    ),
    "size": (counted(lambda b: b["mask"].size), ONLY_LOSS, "auto"),
    "batch statistics": (batch_statistics, COUPLED, "auto"),
    "balance": (more(balance), COUPLED, "auto"),
    "constant count": (counted(lambda b: 128), "the count is not a sum", "auto"),
    "auxiliary mean": (
        more(lambda p, b: jnp.mean((b["x"] @ p["hidden"]) ** 2)),
        NO_SUM,
        "auto",
    ),
    "weight decay": (more(lambda p, b: jnp.sum(p["hidden"] ** 2)), NO_SUM, "auto"),
    "mean of sequences": (mean_of_sequences, 'give per="sequence"', "auto"),
    "random": (more(noise), "random", "auto"),
    "per sequence": (
        counted(lambda b: len(b["mask"])),
        f"{ONLY_LOSS}.*one per sequence",
        "auto",
    ),
}


def cases(losses: dict[str, Any], quick: int) -> list[Any]:
    """Return the names of losses, all but the first ones as slow."""
    first, later = [*losses][:quick], [*losses][quick:]
    return [*first, *map(slow, later)]


@pytest.mark.parametrize("name", cases(RIGHT, 2))
def test_right_losses_pass(name: str):
    loss_fn, mask = RIGHT[name]
    report = check_loss_fn(loss_fn, WEIGHTS, [make_batch()], mask=mask)
    report.assert_exact()
    assert str(report).startswith("OK")
    assert report.count_checked and report.note is None
    assert mask == "auto" or mask.strip("[']") in report.count_checked


@pytest.mark.parametrize("name", cases(WRONG, 3))
def test_wrong_losses_are_found(name: str):
    loss_fn, says, mask = WRONG[name]
    report = check_loss_fn(loss_fn, WEIGHTS, [make_batch()], mask=mask)
    assert not report.passed
    assert re.search(says, "\n".join(report.findings)), str(report)
    assert (NO_SUM in str(report)) == (says == NO_SUM)  # coupled rows are no such term
    assert max(map(len, str(report).splitlines())) <= 80
    with pytest.raises(AssertionError, match="WRONG: "):
        report.assert_exact()


PARAMS = {"w": jnp.float32(0.5)}
BATCH = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}


def squares(count: Callable[[Any], Any]) -> Loss:
    def loss_fn(params: Any, batch: Any) -> Any:
        loss = jnp.sum(batch["mask"] * (params["w"] * batch["x"] - 1) ** 2)
        return loss, count(batch["mask"])

    return loss_fn


@pytest.mark.parametrize("each", [-1, 1])
def test_a_count_that_is_off_in_every_row_is_named(each: int):
    loss_fn = squares(lambda mask: mask.sum() + each * len(mask))
    (finding,) = check_loss_fn(loss_fn, PARAMS, [BATCH]).findings
    assert finding.startswith(f"the count is {4 * each} without any entry of ['mask']")


def test_a_count_that_is_at_least_1_is_not_condemned():
    loss_fn = squares(lambda mask: jnp.maximum(mask.sum(), 1))
    check_loss_fn(loss_fn, PARAMS, [BATCH]).assert_exact()


def test_a_loss_may_be_nan_at_parameters_of_zero():
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = squares(jnp.sum)(params, batch)
        return loss_sum * (params["w"] / params["w"]), n

    check_loss_fn(loss_fn, PARAMS, [BATCH]).assert_exact()


def test_a_loss_that_counts_nothing_or_is_not_finite_is_named():
    report = check_loss_fn(squares(lambda mask: 0), PARAMS, [BATCH])
    assert "9 of 9 entries of ['mask'] change the loss alone" in report.findings[0]
    report = check_loss_fn(
        lambda p, b: (jnp.nan * p["w"], len(b)), PARAMS, [BATCH["x"]]
    )
    assert report.findings == ("loss and count must be finite: got nan and 4.0.",)


def test_what_cannot_be_checked_says_so():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] * batch - 1) ** 2), batch.size

    report = check_loss_fn(loss_fn, PARAMS, [jnp.arange(6.0)])
    assert not report.passed and report.count_checked is None
    assert str(report).startswith("UNSURE: ")
    assert "was not checked: it is the same without any leaf. Name the leaf" in (
        " ".join(str(report).split())
    )
    with pytest.raises(AssertionError, match="mask=None if there is none"):
        report.assert_exact()
    report = check_loss_fn(loss_fn, PARAMS, [jnp.arange(6.0)], mask=None)
    report.assert_exact()
    assert str(report).endswith("The count was not checked: there is no mask.")
    report = check_loss_fn(squares(lambda x: x.sum()), PARAMS, [BATCH], mask="x")
    assert not report.passed and report.count_checked is None
    assert report.note.startswith("it is the same without x. Name the leaf")
    with pytest.raises(ValueError, match=r"mask must be one of .*\['mask'\]"):
        check_loss_fn(squares(lambda x: 1), PARAMS, [BATCH], mask="labels")
    report = check_loss_fn(lambda p, b: (jnp.mean(b), 1), PARAMS, [jnp.arange(6.0)])
    assert "was not checked: correct the above first" in str(report)
    for error, message, given, batch in (
        (ValueError, "at least two rows", loss_fn, jnp.ones(1)),
        (ValueError, "leading axis", loss_fn, jnp.ones(())),
        (TypeError, "loss_fn must be a function", None, jnp.ones(2)),
    ):
        with pytest.raises(error, match=message):
            check_loss_fn(given, PARAMS, [batch])
