"""Losses as people write them, each a sum over tokens with a count, and wrong ones.

Each is `loss_fn(params, batch) -> (loss_sum, num_tokens)`. The batches of `make_batch`
have the leaves of every kind of loss, of which each loss reads some.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum import softmax_cross_entropy_sum

Loss = Callable[[Any, Any], tuple[Any, Any]]

ROWS, LENGTH, WIDTH, CLASSES = 6, 7, 4, 5


def make_params(random: np.random.Generator) -> dict[str, jax.Array]:
    shapes = {
        "embed": (CLASSES, WIDTH),
        "hidden": (WIDTH, WIDTH),
        "out": (WIDTH, CLASSES),
        "pixels": (8, 3),
        "slope": (WIDTH,),
    }
    drawn = {k: random.normal(size=shape) for k, shape in shapes.items()}
    return {k: jnp.asarray(x, jnp.float32) for k, x in drawn.items()}


def make_batch(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the leaves of every kind; rows have 2 to `LENGTH` tokens, one is full."""
    tokens = ROWS, LENGTH
    lengths = random.permutation([LENGTH, 2, *random.integers(2, LENGTH, ROWS - 2)])
    there = np.arange(LENGTH) < lengths[:, None]
    ids = random.integers(1, CLASSES, tokens)
    # Each row has at least one loss token and one prompt token.
    prompt = np.arange(LENGTH) < random.integers(1, lengths)[:, None]
    completion = there & ~prompt
    labels = random.integers(0, CLASSES, tokens)
    teacher = random.normal(size=(*tokens, CLASSES))
    segments = np.where(there, 1 + (np.arange(LENGTH) >= lengths[:, None] // 2), 0)
    rows_on = random.permutation(np.arange(ROWS) > 1)
    some = random.random(tokens) < 0.5
    some[:, 0] = True
    binary = random.integers(0, 2, (ROWS, 8))
    binary[0] = 0
    made = {
        "ids": np.where(there, ids, 0),
        "labels": labels,
        "ignored": np.where(completion, labels, -100),
        "void": np.where(there, labels, 255),
        "masked": np.where(some & there, labels, -100),
        "attended": there,
        "attended_ints": there.astype(np.int32),
        "mask": completion,
        "mask_ints": completion.astype(np.int32),
        "mask_floats": completion.astype(np.float32),
        "padding": (~there).astype(np.float32),
        "one_hot": np.eye(CLASSES)[labels],
        "one_hot_ints": np.eye(CLASSES, dtype=np.int32)[labels],
        "one_hot_or_nothing": np.eye(CLASSES)[labels] * completion[..., None],
        "soft": np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True),
        "teacher": teacher,
        "weights": random.random(tokens) * completion,
        "row_weights": random.random(ROWS),
        "rows_on": rows_on.astype(np.float32),
        "advantages": random.normal(size=tokens) * some,
        "rewards": (some * 1.0),
        "segments": segments,
        "positions": np.arange(LENGTH) * np.ones((ROWS, 1), int),
        "x": random.normal(size=(*tokens, WIDTH)),
        "y": random.normal(size=tokens),
        "signs": np.where(random.random(tokens) < 0.5, -1, 1),
        "zero_or_one": random.integers(0, 2, tokens),
        "counts": random.poisson(1.0, tokens),
        "several": random.integers(0, 2, (*tokens, CLASSES)),
        "known": random.random((*tokens, CLASSES)) < 0.7,
        "binary": binary,
        "bernoulli": binary.astype(np.float32),
        "rejected": random.integers(1, CLASSES, tokens),
        "rejected_mask": np.arange(LENGTH) < random.integers(2, LENGTH, ROWS)[:, None],
        "start": random.integers(0, LENGTH, ROWS),
        "end": random.integers(0, LENGTH, ROWS),
        "keys": jax.random.split(jax.random.key(0), ROWS),
    }
    return {
        k: x.astype(np.float32) if x.dtype == np.float64 else x for k, x in made.items()
    }


def what_is_read(loss_fn: Loss) -> list[str]:
    """Return the names of the leaves of a batch that this loss reads."""
    read: set[str] = set()

    class Reads(dict):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

        def __or__(self, other: dict) -> "Reads":
            return Reads(super().__or__(other))

    random = np.random.default_rng(0)
    loss_fn(make_params(random), Reads(make_batch(random)))
    return sorted(read)


def problems(loss_fn: Loss, seeds: Iterable[int]) -> Iterator[tuple[Any, Any]]:
    """Draw parameters and batches with only the leaves that this loss reads."""
    names = what_is_read(loss_fn)
    for seed in seeds:
        random = np.random.default_rng(seed)
        params, batch = make_params(random), make_batch(random)
        yield params, {name: batch[name] for name in names}


def logits_of(params: Any, ids: Any) -> jax.Array:
    return jnp.tanh(params["embed"][ids] @ params["hidden"]) @ params["out"]


def attending(params: Any, batch: Any, attended: Any) -> jax.Array:
    """Return the logits of a layer of causal attention."""
    x = params["embed"][batch["ids"]]
    scores = (x @ params["hidden"]) @ x.swapaxes(1, 2)
    sees = jnp.tri(LENGTH, dtype=bool) & (attended[:, None, :] > 0)
    scores = jnp.where(sees | jnp.eye(LENGTH, dtype=bool), scores, -1e9)
    return (x + jax.nn.softmax(scores) @ x) @ params["out"]


def nll(params: Any, batch: Any, labels: Any = None) -> jax.Array:
    log_p = jax.nn.log_softmax(logits_of(params, batch["ids"]))
    labels = batch["labels"] if labels is None else labels
    return -jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]


def masked(losses: Any, mask: Any) -> tuple[Any, Any]:
    return jnp.sum(losses * mask), jnp.sum(mask)


def log_p_of(params: Any, ids: Any, mask: Any) -> jax.Array:
    return -jnp.sum(nll(params, {"ids": ids}, ids) * mask, -1)


def ours(params: Any, batch: Any) -> Any:
    logits = logits_of(params, batch["ids"])
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def ours_confident(params: Any, batch: Any) -> Any:
    logits = logits_of(params, batch["ids"])
    logits += 100 * jax.nn.one_hot(batch["labels"], CLASSES) * params["slope"][0] ** 2
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def ours_in_bfloat16(params: Any, batch: Any) -> Any:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return ours(params, batch)


def summed_in_bfloat16(params: Any, batch: Any) -> Any:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    losses = nll(params, batch)
    return jnp.sum(jnp.where(batch["mask"], losses, 0)), jnp.sum(batch["mask"])


def ignore_index(params: Any, batch: Any) -> Any:
    logits = logits_of(params, batch["ids"])
    return softmax_cross_entropy_sum(logits, batch["ignored"], ignore_index=-100)


def ignore_index_and_weights(params: Any, batch: Any) -> Any:
    logits, weights = logits_of(params, batch["ids"]), batch["row_weights"]
    weights = jnp.broadcast_to(weights[:, None], batch["ids"].shape)
    return softmax_cross_entropy_sum(
        logits, batch["ignored"], weights, ignore_index=-100
    )


def labels_ignored_mask_counted(params: Any, batch: Any) -> Any:
    """Two leaves with the same information."""
    logits = logits_of(params, batch["ids"])
    loss_sum, _ = softmax_cross_entropy_sum(logits, batch["ignored"], ignore_index=-100)
    return loss_sum, jnp.sum(batch["mask"])


def shifted_by_the_loss(params: Any, batch: Any) -> Any:
    losses = nll(params, {"ids": batch["ids"][:, :-1]}, batch["ids"][:, 1:])
    return masked(losses, batch["attended"][:, 1:])


def shifted_and_attending(params: Any, batch: Any) -> Any:
    logits = attending(params, batch, batch["attended_ints"])[:, :-1]
    mask = batch["attended_ints"][:, 1:]
    return softmax_cross_entropy_sum(logits, batch["ids"][:, 1:], mask)


def attention_and_loss_masks(params: Any, batch: Any) -> Any:
    logits = attending(params, batch, batch["attended"])
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def next_token_without_mask(params: Any, batch: Any) -> Any:
    labels = batch["ids"][:, 1:]
    logits = logits_of(params, batch["ids"][:, :-1])
    return softmax_cross_entropy_sum(logits, labels, labels != 0)


def packed_segments(params: Any, batch: Any) -> Any:
    segments = batch["segments"]
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    losses = nll(params, {"ids": batch["ids"][:, :-1]}, batch["ids"][:, 1:])
    return masked(losses, inside)


def positions(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["ids"]] + jnp.sin(batch["positions"])[..., None]
    logits = jnp.tanh(x @ params["hidden"]) @ params["out"]
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["attended"])


def one_hot_masked(params: Any, batch: Any) -> Any:
    losses = optax.losses.softmax_cross_entropy(
        logits_of(params, batch["ids"]), batch["one_hot"]
    )
    return masked(losses, batch["mask_floats"])


def one_hot_without_mask(params: Any, batch: Any) -> Any:
    losses = optax.losses.softmax_cross_entropy(
        logits_of(params, batch["ids"]), batch["one_hot"]
    )
    return jnp.sum(losses), losses.size


def one_hot_classes_of_rows(params: Any, batch: Any) -> Any:
    log_p = jax.nn.log_softmax(logits_of(params, batch["ids"][:, 0]))
    return -jnp.sum(log_p * batch["one_hot_ints"][:, 0]), len(log_p)


def one_hot_or_nothing(params: Any, batch: Any) -> Any:
    log_p = jax.nn.log_softmax(logits_of(params, batch["ids"]))
    labels = batch["one_hot_or_nothing"]
    return -jnp.sum(log_p * labels), jnp.sum(labels)


def soft_labels(params: Any, batch: Any) -> Any:
    losses = optax.losses.softmax_cross_entropy(
        logits_of(params, batch["ids"]), batch["soft"]
    )
    return masked(losses, batch["mask"])


def label_smoothing(params: Any, batch: Any) -> Any:
    labels = optax.smooth_labels(batch["one_hot"], 0.1)
    losses = optax.losses.softmax_cross_entropy(logits_of(params, batch["ids"]), labels)
    return masked(losses, batch["mask_ints"])


def label_smoothing_without_mask(params: Any, batch: Any) -> Any:
    labels = optax.smooth_labels(batch["one_hot"], 0.1)
    losses = optax.losses.softmax_cross_entropy(logits_of(params, batch["ids"]), labels)
    return jnp.sum(losses), losses.size


def z_loss(params: Any, batch: Any) -> Any:
    log_z = jax.nn.logsumexp(logits_of(params, batch["ids"]), -1)
    return masked(nll(params, batch) + 1e-2 * log_z**2, batch["mask"])


def auxiliary_per_token(params: Any, batch: Any) -> Any:
    loss_sum, n = masked(nll(params, batch), batch["mask_floats"])
    return loss_sum + 1e-2 * jnp.sum(params["hidden"] ** 2) * n, n


def focal(params: Any, batch: Any) -> Any:
    losses = nll(params, batch)
    return masked((1 - jnp.exp(-losses)) ** 2 * losses, batch["mask"])


def token_weights(params: Any, batch: Any) -> Any:
    return masked(nll(params, batch), batch["weights"])


def row_weights(params: Any, batch: Any) -> Any:
    return masked(nll(params, batch), batch["row_weights"][:, None] * batch["mask"])


def rows_on(params: Any, batch: Any) -> Any:
    return masked(nll(params, batch), batch["rows_on"][:, None] * batch["mask"])


def policy_gradient(params: Any, batch: Any) -> Any:
    return masked(batch["advantages"] * nll(params, batch), batch["mask"])


def rewards_of_zero_and_one(params: Any, batch: Any) -> Any:
    return masked(batch["rewards"] * nll(params, batch), batch["mask"])


def clipped_policy_gradient(params: Any, batch: Any) -> Any:
    ratio = jnp.exp(jnp.clip(-nll(params, batch) + 1.5, -5, 5))
    gains = batch["advantages"] * ratio, batch["advantages"] * jnp.clip(ratio, 0.8, 1.2)
    return masked(-jnp.minimum(*gains), batch["mask"])


def hinge(params: Any, batch: Any) -> Any:
    margins = batch["signs"] * (batch["x"] @ params["slope"])
    return masked(jnp.maximum(0, 1 - margins), batch["mask"])


def squared_hinge_of_classes(params: Any, batch: Any) -> Any:
    signs = 2 * batch["one_hot"] - 1
    margins = signs * logits_of(params, batch["ids"])
    return masked(jnp.sum(jnp.maximum(0, 1 - margins) ** 2, -1), batch["mask"])


def regression(params: Any, batch: Any) -> Any:
    errors = batch["x"] @ params["slope"] - batch["y"]
    return masked(errors**2, batch["mask_floats"])


def weighted_regression(params: Any, batch: Any) -> Any:
    errors = batch["x"] @ params["slope"] - batch["y"]
    weights = batch["row_weights"][:, None] * jnp.ones_like(errors)
    return masked(errors**2, weights)


def huber_on_zero_or_one(params: Any, batch: Any) -> Any:
    errors = optax.losses.huber_loss(batch["x"] @ params["slope"], batch["zero_or_one"])
    return masked(errors, batch["mask_ints"])


def insensitive_regression(params: Any, batch: Any) -> Any:
    """The loss of most tokens is exactly zero."""
    errors = jnp.abs(1e-3 * (batch["x"] @ params["slope"]) - batch["y"])
    return masked(jnp.maximum(errors - 1, 0), batch["mask"])


def poisson(params: Any, batch: Any) -> Any:
    log_rate = batch["x"] @ params["slope"]
    return masked(jnp.exp(log_rate) - batch["counts"] * log_rate, batch["mask"])


def binary_labels(params: Any, batch: Any) -> Any:
    losses = optax.losses.sigmoid_binary_cross_entropy(
        batch["x"] @ params["slope"], batch["zero_or_one"]
    )
    return jnp.sum(losses), losses.size


def several_labels(params: Any, batch: Any) -> Any:
    losses = optax.losses.sigmoid_binary_cross_entropy(
        logits_of(params, batch["ids"]), batch["several"]
    )
    return masked(jnp.sum(losses, -1), batch["mask"])


def several_labels_some_known(params: Any, batch: Any) -> Any:
    losses = optax.losses.sigmoid_binary_cross_entropy(
        logits_of(params, batch["ids"]), batch["several"]
    )
    return masked(losses, batch["known"])


def binary_autoencoder(params: Any, batch: Any) -> Any:
    logits = (batch["binary"] @ params["pixels"]) @ params["pixels"].T
    losses = optax.losses.sigmoid_binary_cross_entropy(logits, batch["binary"])
    return jnp.sum(losses), losses.size


def linear_autoencoder_of_bits(params: Any, batch: Any) -> Any:
    x = batch["bernoulli"]
    return jnp.sum((x - (x @ params["pixels"]) @ params["pixels"].T) ** 2), len(x)


def masked_binary_autoencoder(params: Any, batch: Any) -> Any:
    x = batch["bernoulli"]
    logits = (x @ params["pixels"]) @ params["pixels"].T
    losses = jnp.sum(optax.losses.sigmoid_binary_cross_entropy(logits, x), -1)
    return masked(losses, batch["rows_on"])


def masked_language_model(params: Any, batch: Any) -> Any:
    logits = attending(params, batch, batch["attended"])
    return softmax_cross_entropy_sum(logits, batch["masked"], ignore_index=-100)


def segmentation_with_void(params: Any, batch: Any) -> Any:
    is_class = batch["void"] != 255
    labels = jnp.where(is_class, batch["void"], 0)
    return masked(nll(params, batch, labels), is_class)


def distillation(params: Any, batch: Any) -> Any:
    log_p = jax.nn.log_softmax(logits_of(params, batch["ids"]))
    teacher = jax.nn.log_softmax(batch["teacher"])
    losses = jnp.sum(jnp.exp(teacher) * (teacher - log_p), -1)
    return masked(losses, batch["mask"])


def preference_pairs(params: Any, batch: Any) -> Any:
    chosen = log_p_of(params, batch["ids"], batch["mask"])
    rejected = log_p_of(params, batch["rejected"], batch["rejected_mask"])
    return -jnp.sum(jax.nn.log_sigmoid(0.1 * (chosen - rejected))), len(chosen)


def contrast_within_rows(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["ids"]] @ params["hidden"]
    scores = jnp.einsum("rd,rtd->rt", x[:, 0], x[:, 1:])
    return -jnp.sum(jax.nn.log_softmax(scores)[:, 0]), len(scores)


def spans(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["ids"]]
    rows = jnp.arange(len(x))

    def cost(scores: Any, place: Any) -> Any:
        return -jnp.sum(jax.nn.log_softmax(scores)[rows, place])

    loss_sum = cost(x @ params["slope"], batch["start"])
    return loss_sum + cost(x @ params["out"][:, 0], batch["end"]), len(x)


def connectionist(params: Any, batch: Any) -> Any:
    logits = logits_of(params, batch["ids"])
    labels, none = batch["rejected"][:, :2], jnp.zeros((len(logits), 2))
    losses = optax.losses.ctc_loss(logits, batch["padding"], labels, none)
    return jnp.sum(losses), len(logits)


def dropout_with_keys_of_rows(params: Any, batch: Any) -> Any:
    """Dropout that depends only on the row, through the row's own key."""

    def keep(key: Any) -> Any:
        return jax.random.bernoulli(key, 0.8, (LENGTH,))

    ids = jnp.where(jax.vmap(keep)(batch["keys"]), batch["ids"], 0)
    return ours(params, batch | {"ids": ids})


def mean_of_each_sequence(params: Any, batch: Any) -> Any:
    losses, mask = nll(params, batch), batch["mask"]
    means = jnp.sum(losses * mask, -1) / jnp.maximum(jnp.sum(mask, -1), 1)
    return jnp.sum(means), len(means)


def two_heads(params: Any, batch: Any) -> Any:
    logits = logits_of(params, batch["ids"])
    mask = batch["attended"] & (batch["labels"] > 0)
    first, n = softmax_cross_entropy_sum(logits, batch["labels"], mask)
    second, _ = softmax_cross_entropy_sum(2 * logits, batch["ids"], mask)
    return first + 0.3 * second, n


RIGHT: list[Loss] = [
    ours,
    ours_confident,
    ours_in_bfloat16,
    summed_in_bfloat16,
    ignore_index,
    ignore_index_and_weights,
    labels_ignored_mask_counted,
    shifted_by_the_loss,
    shifted_and_attending,
    attention_and_loss_masks,
    next_token_without_mask,
    packed_segments,
    positions,
    one_hot_masked,
    one_hot_without_mask,
    one_hot_classes_of_rows,
    one_hot_or_nothing,
    soft_labels,
    label_smoothing,
    label_smoothing_without_mask,
    z_loss,
    auxiliary_per_token,
    focal,
    token_weights,
    row_weights,
    rows_on,
    policy_gradient,
    rewards_of_zero_and_one,
    clipped_policy_gradient,
    hinge,
    squared_hinge_of_classes,
    regression,
    weighted_regression,
    huber_on_zero_or_one,
    insensitive_regression,
    poisson,
    binary_labels,
    several_labels,
    several_labels_some_known,
    binary_autoencoder,
    linear_autoencoder_of_bits,
    masked_binary_autoencoder,
    masked_language_model,
    segmentation_with_void,
    distillation,
    preference_pairs,
    contrast_within_rows,
    spans,
    connectionist,
    dropout_with_keys_of_rows,
    mean_of_each_sequence,
    two_heads,
]


# Wrong losses.


def already_mean(params: Any, batch: Any) -> Any:
    loss_sum, n = ours(params, batch)
    return loss_sum / n, n


def mean_over_rows(params: Any, batch: Any) -> Any:
    loss_sum, n = ours(params, batch)
    return loss_sum / len(batch["ids"]), n


def unshifted(params: Any, batch: Any) -> Any:
    return shifted_by_the_loss(params, batch)[0], jnp.sum(batch["attended"])


def unshifted_and_attending(params: Any, batch: Any) -> Any:
    return shifted_and_attending(params, batch)[0], jnp.sum(batch["attended_ints"])


def unshifted_without_mask(params: Any, batch: Any) -> Any:
    return next_token_without_mask(params, batch)[0], jnp.sum(batch["ids"] != 0)


def unshifted_labels(params: Any, batch: Any) -> Any:
    labels = batch["masked"]
    logits = logits_of(params, batch["ids"])[:, :-1]
    loss_sum, _ = softmax_cross_entropy_sum(logits, labels[:, 1:], ignore_index=-100)
    return loss_sum, jnp.sum(labels != -100)


def with_padding(params: Any, batch: Any) -> Any:
    return ours(params, batch)[0], batch["mask"].size


def with_padding_of_a_float_mask(params: Any, batch: Any) -> Any:
    return regression(params, batch)[0], batch["mask_floats"].size


def with_padding_of_ignored(params: Any, batch: Any) -> Any:
    return ignore_index(params, batch)[0], batch["ignored"].size


def with_padding_of_a_hinge(params: Any, batch: Any) -> Any:
    return hinge(params, batch)[0], batch["mask"].size


def with_padding_without_mask(params: Any, batch: Any) -> Any:
    return next_token_without_mask(params, batch)[0], batch["ids"][:, 1:].size


def per_sequence(params: Any, batch: Any) -> Any:
    return ours(params, batch)[0], len(batch["mask"])


def per_sequence_without_mask(params: Any, batch: Any) -> Any:
    return next_token_without_mask(params, batch)[0], len(batch["ids"])


def another_mask(params: Any, batch: Any) -> Any:
    return ours(params, batch)[0], jnp.sum(batch["attended"])


def another_mask_of_a_hinge(params: Any, batch: Any) -> Any:
    return hinge(params, batch)[0], jnp.sum(batch["attended_ints"])


def both_masks_but_one_counted(params: Any, batch: Any) -> Any:
    losses = nll(params, batch) * batch["known"][..., 0]
    return masked(losses, batch["attended"])


def prompt_in_the_loss(params: Any, batch: Any) -> Any:
    losses = nll(params, batch)
    return jnp.sum(losses * batch["attended"]), jnp.sum(batch["mask"])


def loss_without_mask(params: Any, batch: Any) -> Any:
    return jnp.sum(nll(params, batch)), jnp.sum(batch["mask"])


def constant_count(params: Any, batch: Any) -> Any:
    return ours(params, batch)[0], 128


def mean_count(params: Any, batch: Any) -> Any:
    return ours(params, batch)[0], LENGTH * jnp.mean(batch["mask"])


def auxiliary_mean(params: Any, batch: Any) -> Any:
    loss_sum, n = ours(params, batch)
    return loss_sum + jnp.mean(params["embed"][batch["ids"]] ** 2), n


def auxiliary_constant(params: Any, batch: Any) -> Any:
    loss_sum, n = ours(params, batch)
    return loss_sum + jnp.sum(params["hidden"] ** 2), n


def zero_for_the_whole_batch(params: Any, batch: Any) -> Any:
    return len(batch["ids"]) - float(ROWS), ours(params, batch)[1]


def batch_statistics(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["ids"]]
    x = (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-3)
    logits = jnp.tanh(x @ params["hidden"]) @ params["out"]
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def contrast_within_the_batch(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["ids"]].sum(1)
    scores = (x @ params["hidden"]) @ x.T
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores))), len(x)


DRAWS = itertools.count()


def random_loss(params: Any, batch: Any) -> Any:
    def draw() -> np.float32:
        return np.float32(next(DRAWS) * 0.618 % 1)  # never twice the same in a row

    noise = jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))
    loss_sum, n = ours(params, batch)
    return loss_sum * (0.9 + 0.2 * noise), n


def dropout_with_one_key(params: Any, batch: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, batch["ids"].shape)
    return ours(params, batch | {"ids": jnp.where(keep, batch["ids"], 0)})


WRONG: dict[Loss, str] = {
    already_mean: "already a mean",
    mean_over_rows: "already a mean",
    unshifted: "count takes in what the loss leaves out.*before their shift",
    unshifted_and_attending: "labels before their shift",
    unshifted_without_mask: r"\+1 in every row: labels before their shift",
    unshifted_labels: "count takes in what the loss leaves out.*before their shift",
    with_padding: "loss takes in what the count leaves out",
    with_padding_of_a_float_mask: "loss takes in what the count leaves out",
    with_padding_of_ignored: "loss takes in what the count leaves out",
    with_padding_of_a_hinge: "loss takes in what the count leaves out",
    with_padding_without_mask: "the same with any padding",
    per_sequence: "loss takes in what the count leaves out.*one per sequence",
    per_sequence_without_mask: "one per sequence",
    another_mask: "count takes in what the loss leaves out",
    another_mask_of_a_hinge: "count takes in what the loss leaves out",
    both_masks_but_one_counted: "count takes in what the loss leaves out",
    prompt_in_the_loss: "loss takes in what the count leaves out",
    loss_without_mask: "count takes in what the loss leaves out",
    constant_count: "the count is not a sum",
    mean_count: "the count is not a sum",
    auxiliary_mean: "not a sum over tokens",
    auxiliary_constant: "not a sum over tokens",
    zero_for_the_whole_batch: "not a sum over tokens",
    batch_statistics: "depends on the other rows",
    contrast_within_the_batch: "not a sum over tokens|depends on the other rows",
    random_loss: "random",
    dropout_with_one_key: "not a sum over tokens|depends on the other rows",
}
