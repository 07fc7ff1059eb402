"""`check_loss_fn` passes losses as people write them, and finds the wrong ones.

The batches of `make_batch` have the leaves of every kind of loss; each reads some.
"""

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

ROWS, LENGTH, WIDTH, CLASSES = 6, 7, 4, 5


def make_params(random: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "embed": (CLASSES, WIDTH),
        "hidden": (WIDTH, WIDTH),
        "out": (WIDTH, CLASSES),
        "slope": (WIDTH,),
    }
    return {k: np.float32(random.normal(size=shape)) for k, shape in shapes.items()}


def make_batch(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the leaves of every kind; rows have 2 to `LENGTH` tokens, one is full."""
    tokens = ROWS, LENGTH
    lengths = random.permutation([LENGTH, 2, *random.integers(2, LENGTH, ROWS - 2)])
    there = np.arange(LENGTH) < lengths[:, None]
    # Each row has at least one loss token and one prompt token.
    prompt = np.arange(LENGTH) < random.integers(1, lengths)[:, None]
    completion = there & ~prompt
    labels = random.integers(0, CLASSES, tokens)
    made = {
        "ids": np.where(there, random.integers(1, CLASSES, tokens), 0),
        "labels": labels,
        "ignored": np.where(completion, labels, -100),
        "attended": there,
        "mask": completion,
        "mask_floats": completion.astype(np.float32),
        "weights": random.random(tokens) * completion,
        "row_weights": random.random(ROWS),
        "x": random.normal(size=(*tokens, WIDTH)),
        "y": random.normal(size=tokens),
        "segments": np.where(completion, 1 + (np.arange(LENGTH) > 3), 0),
        "keys": jax.random.split(jax.random.key(0), ROWS),
    }
    return {
        k: x.astype(np.float32) if x.dtype == np.float64 else x for k, x in made.items()
    }


class Reads(dict):
    """A batch that notes which of its leaves were read."""

    def __init__(self, batch: dict[str, Any]):
        super().__init__(batch)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def problem(loss_fn: Loss) -> tuple[Any, Any]:
    """Draw parameters and a batch with only the leaves that this loss reads."""
    random = np.random.default_rng(0)
    params, batch = make_params(random), Reads(make_batch(random))
    jax.eval_shape(lambda params: loss_fn(params, batch), params)
    return params, {name: batch[name] for name in sorted(batch.names)}


def logits_of(p: Any, ids: Any) -> jax.Array:
    return jnp.tanh(p["embed"][ids] @ p["hidden"]) @ p["out"]


def cross_entropy(p: Any, b: Any, labels: str, mask: Any = None) -> Any:
    logits = logits_of(p, b["ids"])
    return softmax_cross_entropy_sum(logits, b[labels], mask, ignore_index=-100)


def ours(p: Any, b: Any) -> Any:
    return cross_entropy(p, b, "labels", b["mask"])


def nll(p: Any, ids: Any, labels: Any) -> jax.Array:
    log_p = jax.nn.log_softmax(logits_of(p, ids))
    return -jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]


def nll_of(p: Any, b: Any) -> jax.Array:
    return nll(p, b["ids"], b["labels"])


def masked(losses: Any, mask: Any) -> tuple[Any, Any]:
    return jnp.sum(losses * mask), jnp.sum(mask)


def in_bfloat16(loss_fn: Loss) -> Loss:
    return lambda p, b: loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), b)


def shifted(p: Any, b: Any) -> Any:
    losses = nll(p, b["ids"][:, :-1], b["ids"][:, 1:])
    return masked(losses, b["attended"][:, 1:])


def without_mask(p: Any, b: Any) -> Any:
    labels = b["ids"][:, 1:]
    return softmax_cross_entropy_sum(
        logits_of(p, b["ids"][:, :-1]), labels, labels != 0
    )


def with_auxiliary(p: Any, b: Any) -> Any:
    loss_sum, n = masked(nll_of(p, b), b["mask_floats"])
    return loss_sum + 1e-2 * jnp.sum(p["hidden"] ** 2) * n, n


def errors(p: Any, b: Any) -> jax.Array:
    return b["x"] @ p["slope"] - b["y"]


def dropout_with_keys_of_rows(p: Any, b: Any) -> Any:
    """Drop tokens by the row's own key."""
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (LENGTH,)))(b["keys"])
    losses = nll(p, jnp.where(keep, b["ids"], 0), b["labels"])
    return masked(losses, b["mask"])


def attending(p: Any, b: Any) -> Any:
    """The mask is also that of an attention: a token changes the losses of others."""
    x = p["embed"][b["ids"]]
    scores = jnp.where(b["mask"][:, None, :], x @ x.mT, -1e9)
    logits = jnp.tanh(jax.nn.softmax(scores) @ x @ p["hidden"]) @ p["out"]
    return softmax_cross_entropy_sum(logits, b["labels"], b["mask"])


# Right losses, and the mask if it must be named. By default the first three run.
RIGHT: dict[str, tuple[Loss, str | None]] = {
    "mask": (ours, None),
    "ignored labels": (lambda p, b: cross_entropy(p, b, "ignored"), "ignored"),
    "no mask": (without_mask, "ids"),
    "row weights": (
        lambda p, b: masked(
            errors(p, b) ** 2, b["row_weights"][:, None] * jnp.ones(LENGTH)
        ),
        "['row_weights']",
    ),
    "keys of rows": (dropout_with_keys_of_rows, None),
    "bfloat16": (in_bfloat16(ours), None),
    "shifted": (shifted, None),
    "auxiliary loss": (with_auxiliary, "mask_floats"),
    "token weights": (lambda p, b: masked(nll_of(p, b), b["weights"]), "weights"),
    "attention": (attending, None),
    "twice the count": (lambda p, b: (ours(p, b)[0], 2 * ours(p, b)[1]), None),
    "segments": (lambda p, b: masked(nll_of(p, b), b["segments"] > 0), "segments"),
}


def batch_statistics(p: Any, b: Any) -> Any:
    x = p["embed"][b["ids"]]
    x = (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-3)
    logits = jnp.tanh(x @ p["hidden"]) @ p["out"]
    return softmax_cross_entropy_sum(logits, b["labels"], b["mask"])


def contrastive(p: Any, b: Any) -> Any:
    """The negatives of a row are the other rows."""
    x = jnp.tanh(p["embed"][b["ids"]] @ p["hidden"])
    scores = 3 * x.mean(1) @ x[:, ::-1][:, 0].T
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores))), len(x)


def balanced(p: Any, b: Any) -> Any:
    """A balance loss of experts: a product of two means over the batch."""
    loss_sum, n = ours(p, b)
    gates = jax.nn.softmax(logits_of(p, b["ids"])).reshape(-1, CLASSES)
    shares = jax.nn.one_hot(gates.argmax(-1), CLASSES).mean(0)
    return loss_sum + n * CLASSES * jnp.sum(shares * gates.mean(0)), n


def pairs(p: Any, b: Any) -> Any:
    scores = jnp.sum(errors(p, b) * b["mask"], 1)
    return -jnp.sum(jax.nn.log_sigmoid(scores[::2] - scores[1::2])), len(scores)


def mean_of_sequences(p: Any, b: Any) -> Any:
    mask = b["mask"]
    return jnp.sum(jnp.sum(nll_of(p, b) * mask, 1) / mask.sum(1)), mask.sum()


def dropout(p: Any, b: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, b["ids"].shape)
    return masked(nll(p, jnp.where(keep, b["ids"], 0), b["labels"]), b["mask"])


DRAWS = itertools.count()


def random_loss(p: Any, b: Any) -> Any:
    def draw() -> np.float32:
        return np.float32(next(DRAWS) * 0.618 % 1)  # never twice the same in a row

    noise = jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))
    loss_sum, n = ours(p, b)
    return loss_sum * (0.9 + 0.2 * noise), n


ONLY_COUNT = "count takes in what the loss leaves out"
ONLY_LOSS = "loss takes in what the count leaves out"
NO_SUM = "not a sum over tokens"
COUPLED = "depends on the other rows"
# Wrong losses, what is found, and the mask if it must be named. By default the first
# five run.
WRONG: dict[str, tuple[Loss, str, str | None]] = {
    "already a mean": (
        lambda p, b: (ours(p, b)[0] / ours(p, b)[1], ours(p, b)[1]),
        "already a mean",
        None,
    ),
    "unshifted": (
        lambda p, b: (shifted(p, b)[0], jnp.sum(b["attended"])),
        f"{ONLY_COUNT}.*before their shift",
        None,
    ),
    "size": (lambda p, b: (ours(p, b)[0], b["mask"].size), ONLY_LOSS, None),
    "contrastive": (contrastive, COUPLED, None),
    "batch statistics": (batch_statistics, COUPLED, None),
    "balance": (balanced, COUPLED, None),
    "pairs": (pairs, COUPLED, None),
    "dropout": (dropout, COUPLED, None),
    "size without mask": (
        lambda p, b: (without_mask(p, b)[0], b["ids"][:, 1:].size),
        ONLY_LOSS,
        "ids",
    ),
    "per sequence without mask": (
        lambda p, b: (without_mask(p, b)[0], len(b["ids"])),
        "one per sequence",
        "ids",
    ),
    "segments counted once": (
        lambda p, b: (masked(nll_of(p, b), b["segments"] > 0)[0], len(b["segments"])),
        ONLY_LOSS,
        "segments",
    ),
    "ignored labels counted wrong": (
        lambda p, b: (cross_entropy(p, b, "ignored")[0], jnp.sum(b["ids"] > 0)),
        ONLY_LOSS,
        "ignored",
    ),
    "constant count": (
        lambda p, b: (ours(p, b)[0], 128),
        "the count is not a sum",
        None,
    ),
    "auxiliary mean": (
        lambda p, b: (
            ours(p, b)[0] + jnp.mean(p["embed"][b["ids"]] ** 2),
            ours(p, b)[1],
        ),
        NO_SUM,
        None,
    ),
    "auxiliary mean over tokens": (
        lambda p, b: (
            ours(p, b)[0] + jnp.sum(nll_of(p, b) ** 2 * b["mask"]) / ours(p, b)[1],
            ours(p, b)[1],
        ),
        NO_SUM,
        None,
    ),
    "weight decay": (
        lambda p, b: (ours(p, b)[0] + jnp.sum(p["hidden"] ** 2), ours(p, b)[1]),
        NO_SUM,
        None,
    ),
    "mean of sequences": (mean_of_sequences, 'give per="sequence"', None),
    "random": (random_loss, "random", None),
    "per sequence": (
        lambda p, b: (ours(p, b)[0], len(b["mask"])),
        f"{ONLY_LOSS}.*one per sequence",
        None,
    ),
}


def cases(losses: dict[str, Any], quick: int) -> list[Any]:
    """Return the names of losses, all but the first ones as slow."""
    first, later = [*losses][:quick], [*losses][quick:]
    return [*first, *map(slow, later)]


@pytest.mark.parametrize("name", cases(RIGHT, 3))
def test_right_losses_pass(name: str):
    loss_fn, mask = RIGHT[name]
    params, batch = problem(loss_fn)
    report = check_loss_fn(jax.jit(loss_fn), params, [batch], mask=mask)
    report.assert_exact()
    assert str(report).startswith("OK")
    assert report.count_checked and report.note is None
    assert mask is None or mask.strip("[']") in report.count_checked
    if mask is not None:  # it is not guessed
        report = check_loss_fn(jax.jit(loss_fn), params, [batch])
        assert report.passed and report.count_checked is None


@pytest.mark.parametrize("name", cases(WRONG, 5))
def test_wrong_losses_are_found(name: str):
    loss_fn, says, mask = WRONG[name]
    params, batch = problem(loss_fn)
    report = check_loss_fn(jax.jit(loss_fn), params, [batch], mask=mask)
    assert not report.passed
    assert re.search(says, "\n".join(report.findings)), str(report)
    assert (NO_SUM in str(report)) == (says == NO_SUM)  # coupled rows are no such term
    assert max(map(len, str(report).splitlines())) <= 80
    with pytest.raises(AssertionError, match="WRONG: "):
        report.assert_exact()


PARAMS = {"w": jnp.float32(0.5)}
BATCH = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}


def counted(count: Callable[[Any], Any]) -> Loss:
    def loss_fn(params: Any, batch: Any) -> Any:
        loss = jnp.sum(batch["mask"] * (params["w"] * batch["x"] - 1) ** 2)
        return loss, count(batch["mask"])

    return loss_fn


@pytest.mark.parametrize("more", [-1, 1])
def test_a_count_that_is_off_in_every_row_is_named(more: int):
    loss_fn = counted(lambda mask: mask.sum() + more * len(mask))
    (finding,) = check_loss_fn(loss_fn, PARAMS, [BATCH]).findings
    assert finding.startswith(f"the count is {4 * more} without any entry of ['mask']")


def test_a_count_that_is_at_least_1_is_not_condemned():
    loss_fn = counted(lambda mask: jnp.maximum(mask.sum(), 1))
    check_loss_fn(loss_fn, PARAMS, [BATCH]).assert_exact()


def test_a_loss_that_counts_nothing_or_is_not_finite_is_named():
    report = check_loss_fn(counted(lambda mask: 0), PARAMS, [BATCH])
    assert report.findings[0].startswith("the loss is 2.25, and its count is 0")
    report = check_loss_fn(
        lambda p, b: (jnp.nan * p["w"], len(b)), PARAMS, [BATCH["x"]]
    )
    assert report.findings == ("loss and count must be finite: got nan and 4.0.",)


def test_what_cannot_be_checked_says_so():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] * batch - 1) ** 2), batch.size

    report = check_loss_fn(loss_fn, PARAMS, [jnp.arange(6.0)])
    assert report.passed and report.count_checked is None
    assert "was not checked: it is the same without any leaf of bools" in (
        " ".join(str(report).split())
    )
    report = check_loss_fn(counted(lambda x: x.sum()), PARAMS, [BATCH], mask="x")
    assert report.passed and report.count_checked is None
    assert report.note == "it is the same without x. Name another mask=."
    with pytest.raises(ValueError, match=r"mask must be one of .*\['mask'\]"):
        check_loss_fn(counted(lambda x: 1), PARAMS, [BATCH], mask="labels")
    report = check_loss_fn(lambda p, b: (jnp.mean(b), 1), PARAMS, [jnp.arange(6.0)])
    assert "was not checked: correct the above first" in str(report)
    for error, message, given, batch in (
        (ValueError, "at least two rows", loss_fn, jnp.ones(1)),
        (ValueError, "leading axis", loss_fn, jnp.ones(())),
        (TypeError, "loss_fn must be a function", None, jnp.ones(2)),
    ):
        with pytest.raises(error, match=message):
            check_loss_fn(given, PARAMS, [batch])
