"""`check_loss_fn` of losses from many fields: right ones pass, wrong ones are named."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import slow

from optax_tokenaccum import check_loss_fn, reduce_loss, softmax_cross_entropy_sum

Loss = Callable[[Any, Any], tuple[Any, Any]]
ROWS, LENGTH, WIDTH, CLASSES = 6, 8, 4, 5
RANDOM = np.random.default_rng(0)
TOKENS = (ROWS, LENGTH)
LENGTHS = np.array([8, 3, 5, 2, 7, 4])
HERE = np.arange(LENGTH) < LENGTHS[:, None]


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def classes(*shape: int) -> np.ndarray:
    return RANDOM.integers(1, CLASSES, shape).astype(np.int32)


PARAMS = {"in": normal(WIDTH, WIDTH), "out": normal(WIDTH, CLASSES), "b": normal(1)}
X, LABELS, Y = normal(*TOKENS, WIDTH), classes(*TOKENS), normal(*TOKENS)
T = np.float32(RANDOM.uniform(0.1, 0.9, (ROWS, 1)))
HIDDEN = RANDOM.uniform(size=TOKENS) < np.maximum(T, 0.3)  # the tokens to denoise
HIDDEN[:, 0] = True
POSITIVE = np.int32(RANDOM.uniform(size=TOKENS) < 0.2)
POSITIVE[0, 0], POSITIVE[1] = 1, 0  # an image without a box


def features(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["in"])


def outputs(p: Any, x: Any) -> Any:
    return (features(p, x) @ p["out"])[..., 0] + p["b"][0]


def nll(p: Any, b: Any) -> Any:
    log_p = jax.nn.log_softmax(features(p, b["x"]) @ p["out"])
    return -jnp.take_along_axis(log_p, b["labels"][..., None], -1)[..., 0]


def squares(p: Any, b: Any) -> Any:
    return (outputs(p, b["x"]) - b["y"]) ** 2


def bce(p: Any, b: Any) -> Any:
    return optax.sigmoid_binary_cross_entropy(outputs(p, b["x"]), b["positive"])


def attended(p: Any, b: Any) -> Any:
    """Losses behind an attention that the mask `here` limits."""
    scores = b["x"] @ p["in"] @ b["x"].mT
    scores = jnp.where(b["here"][:, None] > 0, scores, -1e9)
    return nll(p, b | {"x": jax.nn.softmax(scores) @ b["x"]})


def masked(losses: Any, mask: Any, count: Any = None) -> tuple[Any, Any]:
    return jnp.sum(losses * mask), jnp.sum(mask) if count is None else count


def graph(p: Any, b: Any) -> Any:
    """A layer of messages, then a loss for each node that has a label."""
    x = features(p, b["adjacency"] @ b["x"])
    return nll(p, b | {"x": x})


def ctc(p: Any, b: Any) -> Any:
    logits = features(p, b["x"]) @ p["out"]
    pads = jnp.zeros(logits.shape[:2])
    return jnp.sum(optax.ctc_loss(logits, pads, b["labels"][:, :3], b["pad"]))


def crf(p: Any, b: Any) -> Any:
    """The log partition function of a chain, whose steps `here` limits."""

    def step(a: Any, given: Any) -> Any:
        scores, here = given
        new = jax.nn.logsumexp(a[:, :, None] + trans, 1) + scores
        return jnp.where(here[:, None], new, a), None

    scores = features(p, b["x"]) @ p["out"]
    trans = jnp.outer(p["out"][0], p["out"][1])
    start = jnp.zeros((len(scores), CLASSES))
    given = scores.swapaxes(0, 1), b["here"].T
    last, _ = jax.lax.scan(step, start, given)
    gold = jnp.take_along_axis(scores, b["labels"][..., None], -1)[..., 0]
    rows = jax.nn.logsumexp(last, 1) - jnp.log(CLASSES)
    return jnp.sum(rows) - jnp.sum(gold * b["here"])


def listwise(p: Any, b: Any) -> Any:
    """ListNet: a softmax over the documents of a query."""
    scores = jnp.where(b["here"], outputs(p, b["x"]), -1e9)
    target = jax.nn.softmax(jnp.where(b["here"], b["y"], -1e9))
    return jnp.sum(-target * jax.nn.log_softmax(scores) * b["here"], -1)


def router_z(p: Any, b: Any) -> Any:
    return jax.nn.logsumexp(features(p, b["x"]) @ p["out"], -1) ** 2


def info_nce(p: Any, b: Any) -> Any:
    a, c = features(p, b["x"][:, 0]), features(p, b["x"][:, 1])
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(9 * a @ c.T))), len(a)


def balance(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(features(p, b["x"]) @ p["out"], -1)
    gates = jnp.sum(gates * b["here"][..., None], (0, 1)) / jnp.sum(b["here"])
    return CLASSES * jnp.sum(gates**2)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def logits_of(p: Any, b: Any) -> Any:
    return features(p, b["x"]) @ p["out"]


MASKED = {"x": X, "labels": LABELS, "here": HERE}
FLOATS = MASKED | {"here": np.float32(HERE)}
INTEGERS = MASKED | {"here": np.int32(HERE)}
DIFFUSION = {"x": X, "labels": LABELS, "hidden": HIDDEN, "t": T}
BOXES = {"x": X, "positive": POSITIVE}
IGNORE = {"x": X, "labels": np.where(HERE, LABELS, 255).astype(np.uint8)}
SEGMENTATION = {"x": X, "labels": np.where(HERE, LABELS, -100)}
WEIGHTED = {"x": X, "y": Y, "w": np.float32(RANDOM.uniform(0.2, 2, TOKENS) * HERE)}
VALID = {"x": X[:, 0], "y": Y[:, 0], "valid": np.float32(LENGTHS > 3)}
ONE_HOT = {"x": X[:, 0], "target": np.eye(CLASSES, dtype=np.float32)[LABELS[:, 0]]}
PADS = MASKED | {"pad": np.float32(~HERE)}
LABEL_PADS = np.float32(np.arange(3) >= LENGTHS[:, None] - 1)
CTC = {"x": X, "labels": LABELS, "pad": LABEL_PADS}
TWO = MASKED | {"y": Y, "there": HERE[::-1].copy()}
NODES = MASKED | {"adjacency": np.float32(RANDOM.random((ROWS, LENGTH, LENGTH)) < 0.4)}
FRAMES = {"x": X, "labels": LABELS, "lengths": LENGTHS}
REWARDS = MASKED | {"reward": np.float32([[0], [1], [1], [0], [1], [0]])}
ADVANTAGES = MASKED | {"reward": normal(ROWS, 1)}
ATTENDED = INTEGERS | {"loss_mask": np.float32(HERE & (np.arange(LENGTH) > 0))}
NUMBERS = {"x": X[:, :, 0], "n": np.int32([2, 0, 1, 3, 0, 1])}
IDS = {"ids": np.where(HERE, LABELS, 0)}
KEYS = MASKED | {"keys": jax.random.split(jax.random.key(0), ROWS)}
SEGMENTS = MASKED | {"segments": np.where(HERE, 1 + (np.arange(LENGTH) > 3), 0)}


def here(losses: Callable[[Any, Any], Any], name: str = "here") -> Loss:
    return lambda p, b: masked(losses(p, b), b[name])


def of_all(losses: Callable[[Any, Any], Any], name: str = "here") -> Loss:
    """Right, except that it counts all tokens."""
    return lambda p, b: masked(losses(p, b), b[name], 1.0 * b[name].size)


def ignoring(losses: Callable[[Any, Any], Any], name: str = "here") -> Loss:
    """Right, except that its loss is over all tokens."""
    return lambda p, b: (jnp.sum(losses(p, b)), jnp.sum(b[name]))


def counted(count: Callable[[Any], Any], losses: Any = nll) -> Loss:
    """Right, except for its count."""
    return lambda p, b: masked(losses(p, b), b["here"], count(b))


def more(extra: Callable[[Any, Any], Any]) -> Loss:
    """Right, except for a term that belongs to no token."""
    return lambda p, b: (here(nll)(p, b)[0] + extra(p, b), b["here"].sum())


def frames(p: Any, b: Any) -> Any:
    return nll(p, b), jnp.arange(LENGTH) < b["lengths"][:, None]


def next_id(p: Any, b: Any, count: int = 1) -> Any:
    """Ids are inputs and labels; 0 is padding."""
    x = jnp.asarray(X[0])[b["ids"][:, :-1]]
    losses = nll(p, {"x": x, "labels": b["ids"][:, 1:]})
    return masked(losses, b["ids"][:, 1:] > 0, jnp.sum(b["ids"][:, count:] > 0))


def denoised(p: Any, b: Any) -> Any:
    return jnp.sum(nll(p, b) * b["hidden"] / b["t"])


def ignored(p: Any, b: Any) -> Any:
    is_label = b["labels"] < CLASSES
    labels = jnp.where(is_label, b["labels"], 0).astype(int)
    return nll(p, b | {"labels": labels}), is_label


def shifted(p: Any, b: Any, losses: Any = nll) -> Any:
    return masked(losses(p, b)[:, 1:], b["here"][:, 1:])


def neighbors(p: Any, b: Any) -> Any:
    return masked(nll(p, b)[:, 1:], b["here"][:, 1:] & b["here"][:, :-1])


def packed_tokens(segments: Any) -> Any:
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)


def one_less(here: Any) -> Any:
    """The tokens after the first of each row."""
    return jnp.sum(jnp.maximum(here.sum(-1) - 1, 0))


def unshifted(losses: Any) -> Loss:
    return lambda p, b: (shifted(p, b, losses)[0], jnp.sum(b["here"]))


def dropout_with_keys_of_rows(p: Any, b: Any) -> Any:
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (LENGTH, 1)))(b["keys"])
    return nll(p, b | {"x": b["x"] * keep})


def rewarded(p: Any, b: Any) -> Any:
    return masked(b["reward"] * nll(p, b) * b["here"], 1, b["here"].sum())


def normalized(p: Any, b: Any) -> Any:
    x = (b["x"] - b["x"].mean((0, 1))) / (b["x"].std((0, 1)) + 1e-3)
    return nll(p, b | {"x": x})


DRAWS = itertools.count()


def noise(*_: Any) -> Any:
    def draw() -> np.float32:
        return np.float32(next(DRAWS) * 0.618 % 1)  # never twice the same in a row

    return jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))


def in_bfloat16(p: Any, b: Any) -> Any:
    return nll(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), b)


def of_labels(p: Any, b: Any) -> Any:
    return softmax_cross_entropy_sum(logits_of(p, b), b["labels"], ignore_index=-100)


def two_tasks(p: Any, b: Any) -> Any:
    pairs = here(nll)(p, b), here(squares, "there")(p, b)
    return [sum(x) for x in zip(*pairs, strict=True)]


def auxiliary(p: Any, b: Any) -> Any:
    return 1e-2 * jnp.sum(p["in"] ** 2) * jnp.sum(b["here"])


NO_MASK, ROW = {"mask": None}, {"per": "sequence"}
# A loss, its micro-batch, and what is given to the check.
RIGHT: dict[str, tuple[Any, ...]] = {
    "floats": (here(nll), FLOATS),
    "integers, attention": (here(attended), INTEGERS),
    "ids": (next_id, IDS),
    "diffusion": (lambda p, b: (denoised(p, b), jnp.sum(b["hidden"])), DIFFUSION),
    "of all tokens": (
        lambda p, b: (denoised(p, b), b["t"].size * 8.0),
        DIFFUSION,
        NO_MASK,
    ),
    "of all that is there": (
        lambda p, b: (
            denoised(p, b | {"hidden": b["hidden"] & b["here"]}),
            b["here"].sum(),
        ),
        DIFFUSION | {"here": HERE},
    ),
    "positives": (lambda p, b: (jnp.sum(bce(p, b)), jnp.sum(b["positive"])), BOXES),
    "boxes": (
        lambda p, b: (jnp.sum((p["b"] * b["x"] - 1) ** 2), jnp.sum(b["n"])),
        NUMBERS,
        NO_MASK,
    ),
    "weights": (here(squares, "w"), WEIGHTED),
    "rows of padding": (here(squares, "valid"), VALID),
    "one-hot": (
        lambda p, b: (
            -jnp.sum(b["target"] * jax.nn.log_softmax(logits_of(p, b))),
            len(b["x"]),
        ),
        ONE_HOT,
        NO_MASK,
    ),
    "255": (lambda p, b: masked(*ignored(p, b)), IGNORE),
    "-100": (of_labels, SEGMENTATION),
    "frames": (lambda p, b: masked(*frames(p, b)), FRAMES),
    "CTC": (lambda p, b: (ctc(p, b), jnp.sum(1 - b["pad"])), CTC, NO_MASK),
    "paddings": (lambda p, b: masked(nll(p, b), 1 - b["pad"]), PADS),
    "a chain": (lambda p, b: (crf(p, b), jnp.sum(b["here"])), MASKED),
    "ranking": (
        lambda p, b: (jnp.sum(listwise(p, b)), jnp.sum(b["here"].any(-1))),
        TWO,
        ROW,
    ),
    "rewards of 0 and 1": (rewarded, REWARDS),
    "advantages": (rewarded, ADVANTAGES),
    "graph": (here(graph), NODES),
    "two tasks": (two_tasks, TWO),
    "keys of rows": (here(dropout_with_keys_of_rows), KEYS),
    "bfloat16": (here(in_bfloat16), MASKED),
    "shifted": (shifted, MASKED),
    "neighbors": (neighbors, MASKED),
    "packed rows": (
        lambda p, b: masked(nll(p, b)[:, 1:], packed_tokens(b["segments"])),
        SEGMENTS,
        {"mask": "segments"},
    ),
    "auxiliary loss": (more(auxiliary), MASKED),
    "segments": (
        lambda p, b: masked(nll(p, b), b["segments"] > 0),
        SEGMENTS,
        {"mask": "segments"},
    ),
}
SIZE = "change the loss alone. The count is the mask's size"
IGNORES = "which the loss ignores"
LESS = "count takes in what the loss leaves out"
COUPLED = "depends on the other rows"
NO_SUM = "not a sum over tokens"
NO_ENTRIES = "the count is not a sum over ['here']'s entries"
WRONG: dict[str, tuple[Any, ...]] = {
    "swapped": (lambda p, b: here(nll)(p, b)[::-1], FLOATS, "swapped"),
    "all counted": (of_all(nll), FLOATS, SIZE),
    "mask ignored": (ignoring(nll), FLOATS, IGNORES),
    "unshifted": (unshifted(nll), MASKED, "before their shift"),
    "contrastive": (info_nce, MASKED, COUPLED),
    "attention, all counted": (of_all(attended), INTEGERS, SIZE),
    "attention, mask ignored": (ignoring(attended), INTEGERS, IGNORES),
    "attention, unshifted": (unshifted(attended), INTEGERS, LESS),
    "both ignored": (
        lambda p, b: (jnp.sum(nll(p, b)), 1.0 * b["here"].size),
        FLOATS,
        "not checked",
        {"mask": "here"},
    ),
    "counted by attention": (
        lambda p, b: masked(attended(p, b), b["loss_mask"], jnp.sum(b["here"])),
        ATTENDED,
        IGNORES,
    ),
    "ids, unshifted": (lambda p, b: next_id(p, b, 0), IDS, LESS),
    "some labels ignored": (
        lambda p, b: masked(nll(p, b), b["here"] * (b["labels"] > 1), b["here"].sum()),
        MASKED,
        LESS,
    ),
    "a mean": (
        lambda p, b: (denoised(p, b) / jnp.sum(b["hidden"]), jnp.sum(b["hidden"])),
        DIFFUSION,
        "already a mean",
    ),
    "weights ignored": (ignoring(squares, "w"), WEIGHTED, IGNORES),
    "weights not counted": (of_all(squares, "w"), WEIGHTED, SIZE, {"mask": "w"}),
    "rows of padding counted": (of_all(squares, "valid"), VALID, SIZE),
    "no gradient": (
        lambda p, b: here(squares, "w")(jax.lax.stop_gradient(p), b),
        WEIGHTED,
        "no parameter changes the loss",
    ),
    "255 as a class": (
        lambda p, b: (jnp.sum(ignored(p, b)[0]), jnp.sum(ignored(p, b)[1])),
        IGNORE,
        IGNORES,
    ),
    "paddings counted": (
        lambda p, b: masked(nll(p, b), 1 - b["pad"], 1.0 * b["pad"].size),
        PADS,
        SIZE,
    ),
    "ranking, by documents": (
        lambda p, b: (jnp.sum(listwise(p, b)), jnp.sum(b["here"])),
        TWO,
        'give per="sequence"',
    ),
    "balance": (more(lambda p, b: balance(p, b) * b["here"].sum()), MASKED, COUPLED),
    "batch statistics": (here(normalized), MASKED, COUPLED),
    "one less in a row": (counted(lambda b: one_less(b["here"])), MASKED, NO_ENTRIES),
    "neighbors, all counted": (
        lambda p, b: (neighbors(p, b)[0], jnp.sum(b["here"])),
        MASKED,
        "the count is a sum over them. If the loss is a mean over sequences",
    ),
    "neighbors, one less": (
        lambda p, b: (neighbors(p, b)[0], one_less(b["here"][:, 1:])),
        MASKED,
        "has entries whose losses depend on each other",
    ),
    "auxiliary mean": (more(lambda p, b: jnp.mean(router_z(p, b))), MASKED, NO_SUM),
    "weight decay": (more(lambda p, b: jnp.sum(p["in"] ** 2)), MASKED, NO_SUM),
    "constant count": (counted(lambda b: 128), MASKED, "the count is not a sum"),
    "by rows": (counted(lambda b: len(b["x"])), MASKED, "one per sequence"),
    "random": (more(noise), MASKED, "random"),
    "weights of the model": (
        lambda p, b: masked(nll(p, b), jax.nn.sigmoid(outputs(p, b["x"]))),
        MASKED,
        "parameters change the count",
    ),
    "8-bit cotangents": (
        here(lambda p, b: nll(p, b | {"x": clipped(b["x"] * p["b"])})),
        MASKED,
        "depends on the size of the loss",
    ),
}
LATER = 5  # of each table, those from here on are slow


def cases(table: dict[str, Any]) -> list[Any]:
    return [*[*table][:LATER], *map(slow, [*table][LATER:])]


@pytest.mark.parametrize("name", cases(RIGHT))
def test_right_losses_pass(name: str):
    loss_fn, batch, *options = RIGHT[name]
    report = check_loss_fn(loss_fn, PARAMS, [batch], **dict(*options))
    report.assert_exact()
    assert str(report).startswith("OK")
    assert (report.count_checked is None) == (options == [NO_MASK])


@pytest.mark.parametrize("name", cases(WRONG))
def test_wrong_losses_are_named(name: str):
    loss_fn, batch, says, *options = WRONG[name]
    report = check_loss_fn(loss_fn, PARAMS, [batch], **dict(*options))
    assert not report.passed
    text = " ".join(str(report).split())
    assert says in text, str(report)
    assert (NO_SUM in text) == (says == NO_SUM)  # coupled rows have another text
    assert ('give per="sequence"' in text) == ("sequence" in says)
    assert max(map(len, str(report).splitlines())) <= 80
    with pytest.raises(AssertionError):
        report.assert_exact()


@pytest.mark.slow
@pytest.mark.parametrize("name", [k for k, x in RIGHT.items() if x[2:] == (NO_MASK,)])
def test_what_may_be_right_is_never_called_wrong(name: str):
    """The same without the hint: not passed, and told how to say that it is right."""
    loss_fn, batch, _ = RIGHT[name]
    report = check_loss_fn(loss_fn, PARAMS, [batch])
    assert report.findings == () and not report.passed
    assert "mask=None if there is none" in report.note


W = {"w": jnp.float32(0.5)}
BATCH = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}


def squares_of(count: Callable[[Any], Any]) -> Loss:
    def loss_fn(params: Any, batch: Any) -> Any:
        loss = jnp.sum(batch["mask"] * (params["w"] * batch["x"] - 1) ** 2)
        return loss, count(batch["mask"])

    return loss_fn


@pytest.mark.parametrize("each", [-1, 1])
def test_a_count_that_is_off_in_every_row_is_named(each: int):
    loss_fn = squares_of(lambda mask: mask.sum() + each * len(mask))
    (finding,) = check_loss_fn(loss_fn, W, [BATCH]).findings
    assert finding.startswith(f"the count is {4 * each} without any entry of ['mask']")


def test_a_count_that_is_at_least_1_is_not_condemned():
    loss_fn = squares_of(lambda mask: jnp.maximum(mask.sum(), 1))
    check_loss_fn(loss_fn, W, [BATCH]).assert_exact()


def test_a_count_of_1_without_a_mask_may_be_that_of_another():
    one = np.zeros((4, 2), bool)
    one[0, 0] = True

    def loss_fn(params: Any, batch: Any) -> Any:
        losses = (params["w"] * batch["x"] - 1) ** 2
        n = batch["mask"].sum() + batch["one"].sum()
        return jnp.sum(losses * batch["mask"] + losses * batch["one"]), n

    batch = {"x": normal(4, 2), "mask": np.ones((4, 2), bool), "one": one}
    check_loss_fn(loss_fn, W, [batch]).assert_exact()
    first = batch | {"mask": np.array([[True, False]] * 4)}  # of one half alone
    loss_fn = squares_of(lambda mask: jnp.maximum(mask.sum(), 1))
    check_loss_fn(loss_fn, W, [first]).assert_exact()


def test_a_loss_may_be_nan_at_parameters_of_zero():
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = squares_of(jnp.sum)(params, batch)
        return loss_sum * (params["w"] / params["w"]), n

    check_loss_fn(loss_fn, W, [BATCH]).assert_exact()


def test_a_loss_that_counts_nothing_or_is_not_finite_is_named():
    report = check_loss_fn(squares_of(lambda mask: 0), W, [BATCH])
    assert "9 of 9 entries of ['mask'] change the loss alone" in report.findings[0]
    report = check_loss_fn(lambda p, b: (jnp.nan * p["w"], len(b)), W, [BATCH["x"]])
    assert report.findings == ("loss and count must be finite: got nan and 4.0.",)


def test_what_cannot_be_checked_says_so():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] * batch - 1) ** 2), batch.size

    report = check_loss_fn(loss_fn, W, [jnp.arange(6.0)])
    assert not report.passed and report.count_checked is None
    assert str(report).startswith("UNSURE: ")
    assert "was not checked: it is the same without any leaf. Name the leaf" in (
        " ".join(str(report).split())
    )
    with pytest.raises(AssertionError, match="mask=None if there is none"):
        report.assert_exact()
    report = check_loss_fn(loss_fn, W, [jnp.arange(6.0)], mask=None)
    report.assert_exact()
    assert str(report).endswith("The count was not checked: there is no mask.")
    report = check_loss_fn(squares_of(lambda x: x.sum()), W, [BATCH], mask="x")
    assert not report.passed and report.count_checked is None
    assert report.note.startswith("it is the same without x. Name the leaf")
    with pytest.raises(ValueError, match=r"mask must be one of .*\['mask'\]"):
        check_loss_fn(squares_of(lambda x: 1), W, [BATCH], mask="labels")
    report = check_loss_fn(lambda p, b: (jnp.mean(b), 1), W, [jnp.arange(6.0)])
    assert "was not checked: correct the above first" in str(report)
    for error, message, given, batch in (
        (ValueError, "at least two rows", loss_fn, jnp.ones(1)),
        (ValueError, "leading axis", loss_fn, jnp.ones(())),
        (TypeError, "loss_fn must be a function", None, jnp.ones(2)),
    ):
        with pytest.raises(error, match=message):
            check_loss_fn(given, W, [batch])


# `per="sequence"`: means over sequences, and their counts.


def sequences(packed: bool) -> dict[str, np.ndarray]:
    """Rows of random lengths, the last without tokens."""
    rng = np.random.default_rng(0)
    lengths = np.array([*rng.integers(3, 9 + 1, 6 - 1), 0])
    there = np.arange(9) < lengths[:, None]
    ids = 1 + (np.arange(9) >= lengths[:, None] // 2)
    batch = {
        "x": rng.normal(size=(6, 9)).astype(np.float32),
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
        slow(reduced("seq-mean-token-sum-norm", max_length=9), False),
    ],
    ids=["mean", "packed", "norm"],
)
def test_means_over_sequences_pass(loss_fn: Any, packed: bool):
    report = check_loss_fn(loss_fn, W, [sequences(packed)], per="sequence")
    assert report.passed, str(report)
    assert report.count_checked == "row by row of ['mask']"


@pytest.mark.slow
def test_sequences_of_one_token_are_not_condemned():
    # Without either of its tokens, such a row of two sequences has another count.
    batch = sequences(True)
    batch["mask"][0] = np.arange(9) < 2
    batch["segment_ids"][0] = np.arange(9) + 1
    report = check_loss_fn(MEAN, W, [batch], per="sequence")
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
        report = check_loss_fn(given, W, [sequences(False)])
        assert 'give per="sequence"' in report.findings[-1]
    # No such doubt where tokens add up.
    token_mean = reduced("token-mean")
    report = check_loss_fn(token_mean, W, [sequences(False)])
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
    batch = sequences(False)
    report = check_loss_fn(loss_fn, W, [batch], per="sequence")
    assert any(finding in x for x in report.findings), str(report)


@pytest.mark.slow
def test_a_count_of_all_rows_is_neither_condemned_nor_called_right():
    """Rows of padding count too, which may be meant."""

    def all_rows(params: Any, batch: Any) -> Any:
        return MEAN(params, batch)[0], len(batch["mask"])

    report = check_loss_fn(all_rows, W, [sequences(False)], per="sequence")
    assert not report.findings and not report.passed
    assert report.count_checked is None
    # `count_empty` counts the sequences that segment ids name.
    loss_fn = reduced("seq-mean-token-mean", count_empty=True)
    report = check_loss_fn(loss_fn, W, [sequences(True)], per="sequence")
    assert report.count_checked == "row by row of ['segment_ids']"
