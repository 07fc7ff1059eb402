"""`check_loss_fn` of losses from many fields: right ones pass, wrong ones are named."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import slow

from optax_tokenaccum import check_loss_fn, softmax_cross_entropy_sum

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


def triplet(p: Any, b: Any) -> Any:
    a, c, d = (features(p, b["x"][:, i]) for i in range(3))
    near, far = (jnp.sum((a - x) ** 2, -1) for x in (c, d))
    return jax.nn.softplus(near - far)


def listwise(p: Any, b: Any) -> Any:
    """ListNet: a softmax over the documents of a query."""
    scores = jnp.where(b["here"], outputs(p, b["x"]), -1e9)
    target = jax.nn.softmax(jnp.where(b["here"], b["y"], -1e9))
    return jnp.sum(-target * jax.nn.log_softmax(scores) * b["here"], -1)


def vae(p: Any, b: Any) -> Any:
    mean = features(p, b["x"])
    decoded = (mean + 0.1) @ p["out"]
    error = jnp.sum((decoded[..., :WIDTH] - b["x"]) ** 2, -1)
    return error + 0.5 * jnp.sum(mean**2, -1)


def distillation(p: Any, b: Any) -> Any:
    log_p = jax.nn.log_softmax(features(p, b["x"]) @ p["out"])
    return -jnp.sum(b["teacher"] * log_p, -1)


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

MASKED = {"x": X, "labels": LABELS, "here": HERE}
FLOATS = MASKED | {"here": np.float32(HERE)}
INTEGERS = MASKED | {"here": np.int32(HERE)}
DIFFUSION = {"x": X, "labels": LABELS, "hidden": HIDDEN, "t": T}
BOXES = {"x": X, "positive": POSITIVE}
IGNORE = {"x": X, "labels": np.where(HERE, LABELS, 255).astype(np.uint8)}
SEGMENTATION = {"x": X, "labels": np.where(HERE, LABELS, -100)}
WEIGHTED = {"x": X, "y": Y, "w": np.float32(RANDOM.uniform(0.2, 2, TOKENS) * HERE)}
ROW_WEIGHTS = {"x": X[:, 0], "y": Y[:, 0], "w": np.float32(LENGTHS / 8)}
VALID = {"x": X[:, 0], "y": Y[:, 0], "valid": np.float32(LENGTHS > 3)}
ONE_HOT = {"x": X[:, 0], "target": np.eye(CLASSES, dtype=np.float32)[LABELS[:, 0]]}
PADS = MASKED | {"pad": np.float32(~HERE)}
CTC = {
    "x": X,
    "labels": LABELS,
    "pad": np.float32(np.arange(3) >= LENGTHS[:, None] - 1),
}
TWO = MASKED | {"y": Y, "there": HERE[::-1].copy()}
TEACHER = MASKED | {"teacher": np.float32(RANDOM.dirichlet(np.ones(CLASSES), TOKENS))}
NODES = MASKED | {"adjacency": np.float32(RANDOM.random((ROWS, LENGTH, LENGTH)) < 0.4)}
FRAMES = {"x": X, "labels": LABELS, "lengths": LENGTHS}
REWARDS = MASKED | {"reward": np.float32([[0], [1], [1], [0], [1], [0]])}
ADVANTAGES = MASKED | {"advantage": normal(ROWS, 1)}
ATTENDED = INTEGERS | {"loss_mask": np.float32(HERE & (np.arange(LENGTH) > 0))}
NUMBERS = {"x": X[:, :, 0], "n": np.int32([2, 0, 1, 3, 0, 1])}
IDS = {"ids": np.where(HERE, LABELS, 0)}


def here(losses: Callable[[Any, Any], Any], name: str = "here") -> Loss:
    return lambda p, b: masked(losses(p, b), b[name])


def of_all(losses: Callable[[Any, Any], Any], name: str = "here") -> Loss:
    """Right, but for a count of all tokens."""
    return lambda p, b: masked(losses(p, b), b[name], 1.0 * b[name].size)


def ignoring(losses: Callable[[Any, Any], Any], name: str = "here") -> Loss:
    """Right, but for a loss over all tokens."""
    return lambda p, b: (jnp.sum(losses(p, b)), jnp.sum(b[name]))


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


AUTO: dict[str, Any] = {}
NO_MASK, ROW = {"mask": None}, {"per": "sequence"}
# A loss, its micro-batch, and what is given to the check.
RIGHT: dict[str, tuple[Loss, Any, dict[str, Any]]] = {
    "language model, floats": (here(nll), FLOATS, AUTO),
    "language model, integers, attention": (here(attended), INTEGERS, AUTO),
    "language model, ids": (next_id, IDS, AUTO),
    "masked model": (here(nll, "hidden"), DIFFUSION, AUTO),
    "masked diffusion": (
        lambda p, b: (denoised(p, b), jnp.sum(b["hidden"])),
        DIFFUSION,
        AUTO,
    ),
    "masked diffusion, of all tokens": (
        lambda p, b: (denoised(p, b), 1.0 * b["hidden"].size),
        DIFFUSION,
        NO_MASK,
    ),
    "masked diffusion, of all that is there": (
        lambda p, b: (
            denoised(p, b | {"hidden": b["hidden"] & b["here"]}),
            b["here"].sum(),
        ),
        DIFFUSION | {"here": HERE},
        AUTO,
    ),
    "detection, by positives": (
        lambda p, b: (jnp.sum(bce(p, b)), jnp.sum(b["positive"])),
        BOXES,
        AUTO,
    ),
    "detection, by boxes": (
        lambda p, b: (jnp.sum((p["b"] * b["x"] - 1) ** 2), jnp.sum(b["n"])),
        NUMBERS,
        NO_MASK,
    ),
    "regression, weights": (here(squares, "w"), WEIGHTED, AUTO),
    "regression, weights of rows": (here(squares, "w"), ROW_WEIGHTS, AUTO),
    "regression, rows of padding": (here(squares, "valid"), VALID, AUTO),
    "classification, one-hot": (
        lambda p, b: (
            -jnp.sum(b["target"] * jax.nn.log_softmax(features(p, b["x"]) @ p["out"])),
            len(b["x"]),
        ),
        ONE_HOT,
        NO_MASK,
    ),
    "segmentation, 255": (lambda p, b: masked(*ignored(p, b)), IGNORE, AUTO),
    "segmentation, -100": (
        lambda p, b: softmax_cross_entropy_sum(
            features(p, b["x"]) @ p["out"], b["labels"], ignore_index=-100
        ),
        SEGMENTATION,
        AUTO,
    ),
    "speech, frames": (lambda p, b: masked(*frames(p, b)), FRAMES, AUTO),
    "speech, CTC by labels": (
        lambda p, b: (ctc(p, b), jnp.sum(1 - b["pad"])),
        CTC,
        NO_MASK,
    ),
    "speech, CTC by rows": (lambda p, b: (ctc(p, b), len(b["x"])), CTC, NO_MASK),
    "paddings": (lambda p, b: masked(nll(p, b), 1 - b["pad"]), PADS, AUTO),
    "tags, a chain": (lambda p, b: (crf(p, b), jnp.sum(b["here"])), MASKED, AUTO),
    "contrastive, triplets": (
        lambda p, b: (jnp.sum(triplet(p, b)), len(b["x"])),
        MASKED,
        NO_MASK,
    ),
    "ranking": (
        lambda p, b: (jnp.sum(listwise(p, b)), jnp.sum(b["here"].any(-1))),
        TWO,
        ROW,
    ),
    "rewards of 0 and 1": (
        lambda p, b: masked(b["reward"] * nll(p, b) * b["here"], 1, b["here"].sum()),
        REWARDS,
        AUTO,
    ),
    "advantages": (
        lambda p, b: masked(b["advantage"] * nll(p, b) * b["here"], 1, b["here"].sum()),
        ADVANTAGES,
        AUTO,
    ),
    "experts, z-loss": (
        here(lambda p, b: nll(p, b) + 0.01 * router_z(p, b)),
        FLOATS,
        AUTO,
    ),
    "distillation": (here(distillation), TEACHER, AUTO),
    "autoencoder": (
        lambda p, b: (jnp.sum(vae(p, b)), 1.0 * b["x"][..., 0].size),
        {"x": X},
        NO_MASK,
    ),
    "graph": (here(graph), NODES, AUTO),
    "two tasks": (
        lambda p, b: (
            here(nll)(p, b)[0] + here(squares, "there")(p, b)[0],
            jnp.sum(b["here"]) + jnp.sum(b["there"]),
        ),
        TWO,
        AUTO,
    ),
}
SIZE = "change the loss alone. The count is the mask's size"
IGNORES = "which the loss ignores"
LESS = "count takes in what the loss leaves out"
COUPLED = "depends on the other rows"
WRONG: dict[str, tuple[Loss, Any, dict[str, Any], str]] = {
    "language model, swapped": (
        lambda p, b: here(nll)(p, b)[::-1],
        FLOATS,
        AUTO,
        "swapped",
    ),
    "language model, all counted": (of_all(nll), FLOATS, AUTO, SIZE),
    "language model, attention, all counted": (
        of_all(attended),
        INTEGERS,
        AUTO,
        SIZE,
    ),
    "language model, mask ignored": (ignoring(nll), MASKED, AUTO, IGNORES),
    "language model, floats ignored": (ignoring(nll), FLOATS, AUTO, IGNORES),
    "language model, attention, mask ignored": (
        ignoring(attended),
        INTEGERS,
        AUTO,
        IGNORES,
    ),
    "language model, both ignored": (
        lambda p, b: (jnp.sum(nll(p, b)), 1.0 * b["here"].size),
        FLOATS,
        {"mask": "here"},
        "not checked",
    ),
    "language model, counted by attention": (
        lambda p, b: masked(attended(p, b), b["loss_mask"], jnp.sum(b["here"])),
        ATTENDED,
        AUTO,
        IGNORES,
    ),
    "language model, ids, unshifted": (
        lambda p, b: next_id(p, b, 0),
        IDS,
        AUTO,
        LESS,
    ),
    "masked model, all counted": (
        lambda p, b: masked(nll(p, b), b["hidden"], 1.0 * b["hidden"].size),
        DIFFUSION,
        AUTO,
        SIZE,
    ),
    "masked diffusion, a mean": (
        lambda p, b: (denoised(p, b) / jnp.sum(b["hidden"]), jnp.sum(b["hidden"])),
        DIFFUSION,
        AUTO,
        "already a mean",
    ),
    "detection, divided by positives": (
        lambda p, b: (jnp.sum(bce(p, b)) / b["positive"].sum(), b["positive"].sum()),
        BOXES,
        AUTO,
        "already a mean",
    ),
    "regression, weights ignored": (
        ignoring(squares, "w"),
        WEIGHTED,
        AUTO,
        IGNORES,
    ),
    "regression, weights not counted": (
        of_all(squares, "w"),
        WEIGHTED,
        {"mask": "w"},
        SIZE,
    ),
    "regression, rows of padding counted": (
        of_all(squares, "valid"),
        VALID,
        AUTO,
        SIZE,
    ),
    "regression, no gradient": (
        lambda p, b: here(squares, "w")(jax.lax.stop_gradient(p), b),
        WEIGHTED,
        AUTO,
        "no parameter changes the loss",
    ),
    "segmentation, all counted": (
        lambda p, b: masked(*ignored(p, b), 1.0 * b["labels"].size),
        IGNORE,
        AUTO,
        SIZE,
    ),
    "segmentation, 255 as a class": (
        lambda p, b: (jnp.sum(ignored(p, b)[0]), jnp.sum(ignored(p, b)[1])),
        IGNORE,
        AUTO,
        IGNORES,
    ),
    "paddings counted": (
        lambda p, b: masked(nll(p, b), 1 - b["pad"], 1.0 * b["pad"].size),
        PADS,
        AUTO,
        SIZE,
    ),
    "contrastive": (info_nce, MASKED, AUTO, COUPLED),
    "ranking, by documents": (
        lambda p, b: (jnp.sum(listwise(p, b)), jnp.sum(b["here"])),
        TWO,
        AUTO,
        'give per="sequence"',
    ),
    "experts, balance": (
        lambda p, b: (
            here(nll)(p, b)[0] + balance(p, b) * b["here"].sum(),
            b["here"].sum(),
        ),
        MASKED,
        AUTO,
        COUPLED,
    ),
    "experts, a mean": (
        lambda p, b: (here(nll)(p, b)[0] + jnp.mean(router_z(p, b)), b["here"].sum()),
        MASKED,
        AUTO,
        "not a sum over tokens",
    ),
    "distillation, by rows": (
        lambda p, b: masked(distillation(p, b), b["here"], len(b["x"])),
        TEACHER,
        AUTO,
        "one per sequence",
    ),
    "weights of the model": (
        lambda p, b: masked(nll(p, b), jax.nn.sigmoid(outputs(p, b["x"]))),
        MASKED,
        AUTO,
        "parameters change the count",
    ),
    "8-bit cotangents": (
        here(lambda p, b: nll(p, b | {"x": clipped(b["x"] * p["b"])})),
        MASKED,
        AUTO,
        "depends on the size of the loss",
    ),
}
LATER = 3  # of each table, those from here on are slow


def cases(table: dict[str, Any]) -> list[Any]:
    return [*[*table][:LATER], *map(slow, [*table][LATER:])]


@pytest.mark.parametrize("name", cases(RIGHT))
def test_right_losses_pass(name: str):
    loss_fn, batch, options = RIGHT[name]
    report = check_loss_fn(loss_fn, PARAMS, [batch], **options)
    report.assert_exact()
    assert (report.count_checked is None) == (options == NO_MASK)


@pytest.mark.parametrize("name", cases(WRONG))
def test_wrong_losses_are_named(name: str):
    loss_fn, batch, options, says = WRONG[name]
    report = check_loss_fn(loss_fn, PARAMS, [batch], **options)
    assert not report.passed
    assert says in " ".join(str(report).split()), str(report)
    assert ('give per="sequence"' in str(report)) == ("sequence" in says)
    with pytest.raises(AssertionError):
        report.assert_exact()


UNSURE = [name for name, (*_, given) in RIGHT.items() if given == NO_MASK]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSURE)
def test_what_may_be_right_is_never_called_wrong(name: str):
    """The same without the hint: not passed, and told how to say that it is right."""
    loss_fn, batch, _ = RIGHT[name]
    report = check_loss_fn(loss_fn, PARAMS, [batch])
    assert report.findings == () and not report.passed
    assert "mask=None if there is none" in report.note
