"""`check_loss_fn` of losses from many fields: right ones pass, wrong ones are named."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import slow
from jax.lax import stop_gradient

from optax_tokenaccum.debug._check_loss_fn import check_loss_fn
from optax_tokenaccum.losses import reduce_loss, softmax_cross_entropy_sum

Loss = Callable[[Any, Any], tuple[Any, Any]]
ROWS, LENGTH, WIDTH, CLASSES = 6, 8, 4, 5
TOKENS = (ROWS, LENGTH)
RANDOM = np.random.default_rng(0)
LENGTHS, PROMPTS = np.array([[8, 3, 5, 2, 7, 4], [2, 1, 1, 1, 3, 2]])[..., None]
PLACE = np.arange(LENGTH)
HERE, ANSWER = PLACE < LENGTHS, PLACE >= PROMPTS


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


EMBEDDING, IDS = normal(CLASSES, WIDTH), RANDOM.integers(1, CLASSES, TOKENS)
PARAMS = {"in": normal(WIDTH, WIDTH), "out": normal(WIDTH, CLASSES), "b": normal(1)}
T = np.float32(RANDOM.uniform(0.3, 0.9, (ROWS, 1)))
BATCH = {
    "x": normal(*TOKENS, WIDTH),
    "y": normal(*TOKENS),
    "classes": IDS,
    "ids": np.where(HERE, IDS - 1, CLASSES - 1),
    "labels": np.where(HERE & ANSWER, IDS, -100),
    "bytes": np.where(HERE, IDS, 255).astype(np.uint8),
    "mask": HERE,
    "answer": np.float32(ANSWER),
    "pad": np.int32(~HERE),
    "weights": np.float32(RANDOM.uniform(0.2, 2, TOKENS) * HERE),
    "lengths": LENGTHS[:, 0],
    "segments": np.where(HERE, 1 + (PLACE > 3), 0),
    "hidden": (RANDOM.uniform(size=TOKENS) < T) & HERE,
    "t": T,
    "box": np.int32((RANDOM.uniform(size=TOKENS) < 0.2) & (LENGTHS != 3)),
    "advantage": np.float32([[1], [-1], [0], [2], [-1], [0]]),
    "keys": jax.random.split(jax.random.key(0), ROWS),
}
# What a loss or a count is multiplied by, if it is no leaf of the batch.
MASKS: dict[str, Callable[[Any], Any]] = {
    "all": lambda b: jnp.ones_like(b["y"]),
    "both": lambda b: b["mask"] * b["answer"],
    "not pad": lambda b: 1 - b["pad"],
    "not 255": lambda b: b["bytes"] != 255,
    "to lengths": lambda b: PLACE < b["lengths"][:, None],
    "of labels": lambda b: b["mask"] & (b["labels"] >= 0),
    "of classes": lambda b: jnp.arange(1.0, CLASSES + 1)[b["classes"]] * b["mask"],
    "but the first": lambda b: b["mask"] * (PLACE > 0),
    "first half": lambda b: b["mask"] | (PLACE > 3),
    "rows": lambda b: b["mask"].any(-1),
    "long rows": lambda b: b["mask"].sum(-1) > 4,
    "at least 1": lambda b: jnp.maximum(b["mask"].sum(), 1),
    "128": lambda b: 128.0,
    "random": lambda b: noise() * b["mask"],
}


# Losses of tokens, and sums of them.


def logits_of(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["in"]) @ p["out"]


def attention(p: Any, x: Any, sees: Any = True) -> Any:
    """Logits behind a causal attention, to keys for which `sees` is true."""
    scores = jnp.where(jnp.tri(x.shape[1]) * sees > 0, x @ p["in"] @ x.mT, -1e9)
    return logits_of(p, x + jax.nn.softmax(scores) @ x)


def cross_entropy(logits: Any, labels: Any) -> Any:
    one_hot = jax.nn.one_hot(labels, CLASSES)
    return -jnp.sum(jax.nn.log_softmax(logits) * one_hot, -1)


def nll(p: Any, b: Any) -> Any:
    return cross_entropy(logits_of(p, b["x"]), b["classes"])


def attended(p: Any, b: Any) -> Any:
    """Losses of tokens that attend to those of the mask."""
    return cross_entropy(attention(p, b["x"], b["mask"][:, None]), b["classes"])


def squares(p: Any, b: Any) -> Any:
    return (logits_of(p, b["x"])[..., 0] - b["y"]) ** 2


def router(p: Any, b: Any) -> Any:
    return jnp.sum(jax.nn.softmax(logits_of(p, b["x"])) ** 2, -1)


def of(losses: Any, mask: str = "mask", count: str = "") -> Loss:
    """The sum of losses times a mask, and its count, or that of another mask."""

    def loss_fn(p: Any, b: Any) -> Any:
        used, counted = (
            MASKS[x](b) if x in MASKS else b[x] for x in (mask, count or mask)
        )
        return jnp.sum(losses(p, b) * used), jnp.sum(counted)

    return loss_fn


def mean(loss_fn: Loss, times_count: bool = False) -> Loss:
    """A mean, which is NaN without tokens; perhaps times its count."""

    def of_mean(p: Any, b: Any) -> Any:
        loss_sum, n = loss_fn(p, b)
        return loss_sum / n * (n if times_count else 1), n

    return of_mean


def plus(term: Callable[[Any, Any], Any]) -> Loss:
    return lambda p, b: (of(nll)(p, b)[0] + term(p, b), jnp.sum(b["mask"]))


def counting(count: str, loss_fn: Loss) -> Loss:
    return lambda p, b: (loss_fn(p, b)[0], of(nll, count=count)(p, b)[1])


def of_labels(p: Any, b: Any, **options: Any) -> Any:
    logits = attention(p, b["x"])
    return softmax_cross_entropy_sum(logits, b["labels"], ignore_index=-100, **options)


def packed(p: Any, b: Any, all_counted: bool = False) -> Any:
    """Rows with several sequences, whose tokens predict the next of their own."""
    ids, segments = b["classes"], b["segments"]
    sees = segments[:, None, :-1] == segments[:, :-1, None]
    logits = attention(p, jnp.asarray(EMBEDDING)[ids[:, :-1]], sees)
    is_token = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    loss_sum = jnp.sum(cross_entropy(logits, ids[:, 1:]) * is_token)
    return loss_sum, jnp.sum(segments[:, 1:] > 0 if all_counted else is_token)


def next_id(p: Any, b: Any, begin: int = 1) -> Any:
    """Ids are inputs and labels; the last is padding, to which no token attends."""
    x, is_token = jnp.asarray(EMBEDDING)[b["ids"]], b["ids"] != CLASSES - 1
    logits = attention(p, x[:, :-1], is_token[:, None, :-1])
    losses = cross_entropy(logits, b["ids"][:, 1:]) * is_token[:, 1:]
    return jnp.sum(losses), jnp.sum(is_token[:, begin:])


def shifted(p: Any, b: Any, begin: int = 1, losses: Any = nll) -> Any:
    return jnp.sum((losses(p, b) * b["mask"])[:, 1:]), jnp.sum(b["mask"][:, begin:])


def sequences(p: Any, b: Any, reduction: Any = "seq-mean-token-mean", **more: Any):
    ids = b["segments"] if "packed" in b else None
    losses = nll(p, b) * b["advantage"]
    return reduce_loss(losses, b["mask"], reduction, segment_ids=ids, **more)


def packed_sequences(p: Any, b: Any) -> Any:
    return sequences(p, b | {"packed": True})


def sequences_of_lengths(p: Any, b: Any) -> Any:
    return sequences(p, b | {"mask": MASKS["to lengths"](b)})


def no_loss_in_the_longest(p: Any, b: Any) -> Any:
    return sequences(p, b | {"advantage": b["advantage"] * (b["lengths"] < 8)[:, None]})


def focal(p: Any, b: Any) -> Any:
    logits = logits_of(p, b["x"])[..., 0]
    return jnp.sum(optax.sigmoid_focal_loss(logits, b["box"])), jnp.sum(b["box"])


def dpo(p: Any, b: Any) -> Any:
    """Pairs in a row: one half is chosen, the other rejected."""
    losses = cross_entropy(attention(p, b["x"]), b["classes"]) * b["mask"]
    margins = jnp.sum(losses[:, 4:], -1) - jnp.sum(losses[:, :4], -1)
    return -jnp.sum(jax.nn.log_sigmoid(margins)), len(losses)


def in_dtype(dtype: Any, scale: float = 1.0) -> Loss:
    def loss_fn(p: Any, b: Any) -> Any:
        p, x = jax.tree.map(lambda x: x.astype(dtype), (p, b["x"]))
        loss_sum, n = of(attended)(p, b | {"x": x})
        return (loss_sum * scale).astype(dtype).astype(jnp.float32) / scale, n

    return loss_fn


def denoised(p: Any, b: Any, count: str = "hidden") -> Any:
    """Masked diffusion: tokens are hidden at time t, and weighted by 1/t."""
    x = jnp.where(b["hidden"][..., None], 0.0, b["x"])
    losses = cross_entropy(attention(p, x), b["classes"])
    return jnp.sum(losses * b["hidden"] / b["t"]), jnp.sum(b[count])


def ctc(p: Any, b: Any, of_rows: bool = False) -> Any:
    logits, pads = logits_of(p, b["x"]), b["pad"][:, 1:4]
    no_pads = jnp.zeros(logits.shape[:2])
    losses = optax.ctc_loss(logits, no_pads, b["classes"][:, :3], pads)
    return jnp.sum(losses), len(losses) if of_rows else jnp.sum(1 - pads)


def listwise(p: Any, b: Any, count: str = "rows") -> Any:
    """A softmax over the documents of a query."""
    scores = jnp.where(b["mask"], logits_of(p, b["x"])[..., 0], -1e9)
    target = jax.nn.softmax(jnp.where(b["mask"], b["y"], -1e9))
    losses = -target * jax.nn.log_softmax(scores)
    return of(lambda *_: losses, count=count)(p, b)


def one_label(p: Any, b: Any) -> Any:
    losses = cross_entropy(logits_of(p, b["x"]).mean(1), b["classes"][:, 0])
    return jnp.sum(losses), len(losses)


def dropped(p: Any, b: Any) -> Any:
    """Dropout with a key of each row."""
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (LENGTH, 1)))(b["keys"])
    return nll(p, b | {"x": b["x"] * keep})


def mean_of(losses: Any, mask: str = "mask") -> Any:
    return lambda p, b: mean(of(losses, mask))(p, b)[0]


def mean_of_rows(p: Any, b: Any) -> Any:
    """Over the rows, times the tokens."""
    return jnp.mean(squares(p, b)[:, 0]) * jnp.sum(b["mask"])


def balance(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(logits_of(p, b["x"])) * b["mask"][..., None]
    n = jnp.sum(b["mask"])
    return jnp.sum((jnp.sum(gates, (0, 1)) / n) ** 2) * n


# A loss of a batch, and what is given to the check: mask, and perhaps per.
RIGHT: dict[str, tuple[Any, ...]] = {
    "a mask": (of(nll), "mask"),
    "prompts are context": (of_labels, "labels"),
    "packed rows": (packed, "segments"),
    "means of sequences": (sequences, "mask", "sequence"),
    "a mean times its count": (mean(of_labels, times_count=True), "['labels']"),
    "of weights": (mean(of(squares, "weights"), times_count=True), "weights"),
    "a mask of keys, too": (of(attended), "mask"),
    "the last id is padding": (next_id, "ids"),
    "1 is padding": (of(nll, "not pad"), "pad"),
    "255 is padding": (of(nll, "not 255"), "bytes"),
    "lengths": (of(nll, "to lengths"), "lengths"),
    "weights": (of(squares, "weights"), "weights"),
    "two masks": (of(nll, "both"), ["mask", "answer"]),
    "shifted": (shifted, "mask"),
    "attention, shifted": (partial(shifted, losses=attended), "mask"),
    "focal loss over positives": (focal, None),
    "a balance loss of tokens": (plus(lambda p, b: of(router)(p, b)[0]), "mask"),
    "DPO": (dpo, None),
    "class weights": (of(nll, "of classes"), "mask"),
    "label smoothing": (partial(of_labels, label_smoothing=0.1), "labels"),
    "scaled float16": (in_dtype(jnp.float16, 64.0), "mask"),
    "bfloat16": (in_dtype(jnp.bfloat16), "mask"),
    "a prior": (plus(lambda p, b: jnp.sum(p["in"] ** 2) * b["mask"].sum()), "mask"),
    "diffusion": (denoised, "hidden"),
    "diffusion, all counted": (partial(denoised, count="mask"), None),
    "CTC": (ctc, None),
    "CTC of sequences": (partial(ctc, of_rows=True), None, "sequence"),
    "one label per row": (one_label, None),
    "ranking": (listwise, "mask", "sequence"),
    "keys of rows": (of(dropped), "mask"),
    "packed sequences": (packed_sequences, "mask", "sequence"),
    "sequences by name": (packed_sequences, "segments", "sequence"),
    "sequences by lengths": (sequences_of_lengths, "lengths", "sequence"),
    "not told that of sequences": (no_loss_in_the_longest, "mask"),
    "DAPO": (partial(sequences, reduction="token-mean"), "mask"),
}


# Mistakes.

DRAWS = itertools.count()


def noise(*_: Any) -> Any:
    def draw() -> np.float32:
        return np.float32(1 + next(DRAWS) * 0.618 % 1)  # never twice the same in a row

    return jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))


@jax.custom_vjp
def clipped(p: Any) -> Any:
    return p


clipped.defvjp(lambda p: (p, None), lambda _, g: (optax.tree.clip(g, -0.1, 0.1),))


@jax.custom_vjp
def fused(logits: Any, labels: Any) -> Any:
    """Losses that are 0 where a label is ignored, and gradients that are not."""
    return cross_entropy(logits, labels)


def fused_bwd(rest: Any, g: Any) -> Any:
    logits, labels = rest
    one_hot = jax.nn.one_hot(labels, CLASSES)
    return (jax.nn.softmax(logits) - one_hot) * g[..., None], None


fused.defvjp(lambda *args: (fused(*args), args), fused_bwd)


def fused_sum(p: Any, b: Any) -> Any:
    losses = fused(logits_of(p, b["x"]), b["labels"])
    return jnp.sum(losses), jnp.sum(b["labels"] >= 0)


def straight_through(p: Any, b: Any) -> Any:
    """Losses of 0 where nothing counts, with a gradient."""
    losses = nll(p, b)
    return jnp.where(b["mask"], losses, losses - stop_gradient(losses))


def gated(p: Any, b: Any) -> Any:
    mask = b["mask"] * jax.nn.sigmoid(b["y"] * p["b"])
    return jnp.sum(nll(p, b) * mask), jnp.sum(mask)


def normalized(p: Any, b: Any) -> Any:
    x = (b["x"] - b["x"].mean((0, 1))) / (b["x"].std((0, 1)) + 1e-3)
    return nll(p, b | {"x": x})


def info_nce(p: Any, b: Any) -> Any:
    a, c = logits_of(p, b["x"][:, 0]), logits_of(p, b["x"][:, 1])
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(a @ c.T))), len(a)


def last_token(p: Any, b: Any) -> Any:
    """The last token of each row, by an index that is -1 without tokens."""
    last = jnp.sum(b["mask"], -1, keepdims=True) - 1
    losses = jnp.take_along_axis(nll(p, b), last, 1)
    return jnp.sum(losses), jnp.sum(b["mask"].any(-1))


LEFT_OUT, ALONE = "count takes in what the loss leaves out", "change the count alone"
TRAINS, MORE_LOSS = "leaves out: its gradient there is not 0", "change the loss alone"
MEAN, SCALE = "already a mean", "the gradient depends on the size of the loss"
COUPLED = "take coupled_value_and_grad"
SEVERAL, SEQUENCES = "See several terms, docs/losses.md", 'give per="sequence"'
# The same, and what a finding says.
WRONG: dict[str, tuple[Any, ...]] = {
    "a mean": (mean(of(nll)), "mask", MEAN),
    "padding counted": (of(nll, count="all"), "mask", LEFT_OUT),
    "ignored labels counted": (counting("all", of_labels), "labels", LEFT_OUT),
    "padding trained": (of(nll, "all", "mask"), "mask", TRAINS),
    "padding trained backward": (fused_sum, "labels", TRAINS),
    "before the shift": (partial(shifted, begin=0), "mask", "before their shift"),
    "swapped": (lambda p, b: of(nll, "weights")(p, b)[::-1], "weights", "swapped"),
    "stopped": (of(lambda p, b: nll(stop_gradient(p), b)), "mask", "no parameter"),
    "a mask of neither": (of(nll), "answer", TRAINS),
    "half a mask": (of(nll, "first half", "mask"), "mask", TRAINS),
    "one of two masks trained": (of(nll, "mask", "both"), ["mask", "answer"], TRAINS),
    "one of two counted": (of(nll, "both", "mask"), ["mask", "answer"], LEFT_OUT),
    "clipped cotangents": (of(lambda p, b: nll(clipped(p), b)), "mask", SCALE),
    "batch norm": (of(normalized), "mask", COUPLED),
    "contrastive": (info_nce, None, COUPLED),
    "a random count": (of(nll, count="random"), "mask", "the count is random"),
    "a random loss": (of(nll, "random", "mask"), "mask", "the loss is random"),
    "a count of parameters": (gated, "mask", "parameters change the count"),
    "a trained mask": (of(straight_through, "all", "mask"), "mask", TRAINS),
    "a bad backward's mean": (mean(fused_sum, times_count=True), "labels", TRAINS),
    "prompts counted": (of(nll, "of labels", "mask"), "mask", ALONE),
    "attention, unshifted": (partial(shifted, begin=0, losses=attended), "mask", ALONE),
    "segments, all counted": (partial(packed, all_counted=True), "segments", ALONE),
    "ids, unshifted": (partial(next_id, begin=0), "ids", ALONE),
    "one less in a row": (of(nll, count="but the first"), "mask", MORE_LOSS),
    "at least 1": (of(nll, count="at least 1"), "mask", "maximum(n, 1)"),
    "a constant count": (of(nll, count="128"), "mask", "not a sum over rows"),
    "positives are no mask": (focal, "box", TRAINS),
    "balance": (plus(balance), "mask", COUPLED),
    "batch norm, no mask": (of(normalized, "all"), None, COUPLED),
    "a mean term": (plus(mean_of(router)), "mask", SEVERAL),
    "a mean over boxes": (plus(mean_of(squares, "box")), "mask", SEVERAL),
    "a mean over rows": (plus(mean_of_rows), "mask", SEVERAL),
    "weight decay": (plus(lambda p, _: jnp.sum(p["in"] ** 2)), "mask", SEVERAL),
    "a bfloat16 mean": (mean(in_dtype(jnp.bfloat16)), "mask", MEAN),
    "sequences, by tokens": (counting("mask", sequences), "mask", SEQUENCES),
    "tokens, by sequences": (of(nll, count="rows"), "mask", SEQUENCES),
    "documents": (partial(listwise, count="mask"), "mask", ALONE),
    "long rows": (counting("long rows", sequences), "mask", MORE_LOSS, "sequence"),
    "tokens": (of(nll), "mask", "not one of sequences", "sequence"),
    "a last token": (last_token, "mask", TRAINS, "sequence"),
}
LATER = 5  # of each table, those from here on are slow


def cases(table: dict[str, Any]) -> list[Any]:
    return [*[*table][:LATER], *map(slow, [*table][LATER:])]


def check(loss_fn: Any, mask: Any, per: Any = "token", batches: Any = (BATCH,)) -> Any:
    return check_loss_fn(loss_fn, PARAMS, batches, mask=mask, per=per)


@pytest.mark.parametrize("name", cases(RIGHT))
def test_right_losses_pass(name: str):
    report = check(*RIGHT[name])
    report.assert_exact()
    assert str(report).startswith("OK. Checked: gradients, rows")
    assert ("which tokens count" in str(report)) == (RIGHT[name][1] is None)


@pytest.mark.parametrize("name", cases(WRONG))
def test_wrong_losses_are_named(name: str):
    loss_fn, mask, says, *per = WRONG[name]
    report = check(loss_fn, mask, *per)
    assert not report.passed and any(says in x for x in report.findings), str(report)
    has_two = name == "a mask of neither" or isinstance(mask, list)
    assert len(report.findings) == 1 + has_two, str(report)
    assert max(map(len, str(report).splitlines())) <= 80
    with pytest.raises(AssertionError, match="WRONG: "):
        report.assert_exact()


def of_graphs(p: Any, b: Any) -> Any:
    """A layer of messages over the edges of all graphs, and losses of nodes."""
    (senders, receivers), x = b["edges"].T, b["nodes"]
    x = x + jax.ops.segment_sum(x[senders], receivers, len(x))
    return of(nll, "known")(p, b | {"x": x})


GRAPHS = {"nodes": normal(9, WIDTH), "edges": RANDOM.integers(0, 9, (20, 2))}
GRAPHS |= {"n_node": np.array([4, 5]), "classes": IDS.ravel()[:9], "scale": 1.0}
GRAPHS |= {"known": np.arange(9) % 3 > 0}
ONE_ROW = jax.tree.map(lambda x: x[:1], BATCH)


@pytest.mark.parametrize(
    ("loss_fn", "batch", "mask"),
    [(of_graphs, GRAPHS, "known"), (of(attended), ONE_ROW, "mask")],
    ids=["graphs", "one row"],
)
def test_without_rows_the_rest_is_checked(loss_fn: Loss, batch: Any, mask: str):
    report = check(loss_fn, mask, batches=[batch])
    report.assert_exact()
    assert report.checked == (f"['{mask}']",) and "Not checked: rows" in str(report)
    for wrong, says in (
        (lambda p, b: (loss_fn(p, b)[0], 9.0), LEFT_OUT),
        (
            lambda p, b: (loss_fn(p, b | {mask: b[mask] | True})[0], b[mask].sum()),
            TRAINS,
        ),
        (mean(of(nll) if batch is ONE_ROW else loss_fn), "is a mean over entries"),
        (lambda p, b: loss_fn(stop_gradient(p), b), "no parameter"),
    ):
        assert says in str(check(wrong, mask, batches=[batch]).findings)


def with_rows(length: int | None = None) -> dict[str, Any]:
    """The micro-batch with a mask of floats, so that 0/0 is NaN in the gradient."""
    mask = np.float32(PLACE < (LENGTHS if length is None else length))
    return BATCH | {"mask": np.broadcast_to(mask, TOKENS)}


def test_a_fuller_micro_batch_hides_nothing():
    ragged, full, empty = with_rows(), with_rows(8), with_rows(0)
    nans = ragged | {"x": np.where(HERE[..., None], BATCH["x"], np.nan)}  # padding
    right = mean(of(nll), times_count=True)
    selected = of(lambda p, b: jnp.where(b["mask"] > 0, nll(p, b), 0))
    for others in ([], [full], [empty, full]):
        check(right, "mask", batches=[ragged, *others]).assert_exact()
        (finding,) = check(selected, "mask", batches=[nans, *others]).findings
        assert "must be finite: got (count, norm) [(29.0, nan)]" in finding
    (finding,) = check(right, "mask", batches=[empty]).findings
    assert "no parameter changes the loss" in finding
    with_prompts = of(nll, "of labels", "mask")
    full = BATCH | {"mask": HERE | True, "labels": IDS}
    check(with_prompts, "mask", batches=[full]).assert_exact()
    assert ALONE in str(check(with_prompts, "mask", batches=[full, BATCH]).findings)


def test_sequences_of_one_token_pass():
    batch = BATCH | {"mask": HERE & (LENGTHS != 3)}  # and a row without tokens
    batch["segments"] = np.where(LENGTHS == 8, PLACE + 1, BATCH["segments"])
    check(packed_sequences, "mask", "sequence", [batch]).assert_exact()


def test_bad_arguments():
    for mask in ("nothing", ["mask", "nothing"], BATCH["mask"]):
        with pytest.raises(ValueError, match=r"mask must be one of \[.*got .{,42}\.$"):
            check(of(nll), mask)
    with pytest.raises(TypeError, match="loss_fn must be a function: got a dict.$"):
        check_loss_fn(PARAMS, of(nll), [BATCH], mask=None)
    negative = of(nll, count="y")
    assert "must be finite" in check(negative, None).findings[0]
