"""Loops for `audit`: right ones, and broken ones as people wrote them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import cut, run_step, stack

from optax_tokenaccum import (
    MultiSteps,
    Verdict,
    make_train_step,
    make_window_step,
    token_accumulation,
)

Run = Callable[[Any, Any, Any], Any]


def ragged_batch(seed: int) -> dict[str, np.ndarray]:
    """Return 16 rows of 2 to 16 tokens. Long rows hold other data than short ones."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 17, (16, 1))
    return {
        "x": np.float32(random.normal(size=(16, 16, 8))),
        "y": np.float32(random.normal(size=(16, 16)) + lengths / 4),
        "mask": np.arange(16) < lengths,
    }


def init_params(dtype: Any = "float32") -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {"hidden": (8, 16), "bias": (16,), "out": (16,)}
    return {k: jnp.asarray(random.normal(size=x) / 3, dtype) for k, x in shapes.items()}


def loss_sum_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Squared errors of a small model, computed in the dtype of the parameters."""
    x = batch["x"].astype(params["hidden"].dtype)
    y = jnp.tanh(x @ params["hidden"] + params["bias"]) @ params["out"]
    errors = (y.astype(jnp.float32) - batch["y"]) ** 2
    return jnp.sum(jnp.where(batch["mask"], errors, 0)), jnp.sum(batch["mask"])


def loss_mean_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    loss_sum, num_tokens = loss_sum_fn(params, batch)
    return loss_sum / num_tokens, num_tokens


K = 8
MICRO_BATCHES = cut(ragged_batch(0), K)


class Broken(NamedTuple):
    """A loop, what it does wrong, and what the audit should find."""

    run: Run
    mistake: str  # in words
    verdict: Verdict
    says: str = ""  # a part of the explanation, if the verdict alone is not enough
    dtype: Any = None  # of the parameters, if the mistake needs one


GALLERY: dict[str, Broken] = {}


def broken(name: str, *what: Any, **options: Any) -> Callable[[Run], Run]:
    """Enters a loop in the gallery."""

    def enter(run: Run) -> Run:
        GALLERY[name] = Broken(run, *what, **options)
        return run

    return enter


@functools.cache
def gradient_of(loss_fn: Any) -> Any:
    """The compiled `gradient(params, batch) -> (gradient, num_tokens)`."""
    return jax.jit(jax.grad(loss_fn, has_aux=True))


def mean(params: Any, batch: Any) -> Any:
    """The gradient of the mean loss."""
    return gradient_of(loss_mean_fn)(params, batch)[0]


def scale(grads: Any, factor: Any) -> Any:
    """A multiple of a gradient."""
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def weighted_sum(
    params: Any, micro_batches: Any, weights: Any, loss_fn: Any = loss_sum_fn
) -> Any:
    """The sum of the micro-batches' summed gradients, times their weights."""
    grads = scale(params, 0)
    for weight, batch in zip(weights, micro_batches, strict=True):
        share, _ = gradient_of(loss_fn)(params, batch)
        grads = jax.tree.map(jnp.add, grads, scale(share, weight))
    return grads


def tokens_of(micro_batches: Any) -> Any:
    """The number of tokens of each micro-batch."""
    return np.array([batch["mask"].sum() for batch in micro_batches])


def concatenated(micro_batches: Any) -> Any:
    """All rows of a window."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *micro_batches)


def apply(optimizer: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """Calls the optimizer, uncompiled, because its function is new every time."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def apply_once(optimizer: Any, params: Any, grads: Any) -> Any:
    """Updates the parameters with the gradient of a window."""
    return apply(optimizer, params, optimizer.init(params), grads)[0]


def of_weights(weights: Any, loss_fn: Any = loss_sum_fn, foreign: float = 0.0) -> Any:
    """Return a loop that weights micro-batches by `weights`, where 1 is exact."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        shares = weights / tokens_of(micro_batches).sum()
        grads = weighted_sum(params, micro_batches, shares, loss_fn)
        grads = jax.tree.map(jnp.add, grads, scale(params, foreign))
        return apply_once(optimizer, params, grads)

    return run


@broken("mean of means", "averages means", Verdict.MEAN_OF_MEANS)
def mean_of_means(
    optimizer: Any, params: Any, micro_batches: Any, gradient: Any = mean
) -> Any:
    """`optax.MultiSteps` on mean losses."""
    optimizer = optax.MultiSteps(optimizer, K)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for batch in micro_batches:
        updates, state = update(gradient(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def with_counts(gradient: Callable[..., Any], count: Callable[[Any], Any]) -> Run:
    """Makes a loop with `optax_tokenaccum.MultiSteps`, which expects mean losses."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        optimizer = MultiSteps(optimizer, len(micro_batches))
        update, state = jax.jit(optimizer.update), optimizer.init(params)
        for batch in micro_batches:
            grads, n = gradient(params, batch), count(batch)
            updates, state = update(grads, state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        return params

    return run


def with_transformation(loss_fn: Any) -> Run:
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        optimizer = token_accumulation(optimizer, len(micro_batches))
        update, state = jax.jit(optimizer.update), optimizer.init(params)
        for batch in micro_batches:
            grads, n = gradient_of(loss_fn)(params, batch)
            updates, state = update(grads, state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        return params

    return run


broken(
    "padding counted",
    "counts the entries of the mask",
    Verdict.MEAN_OF_MEANS,
    "mask.size changes nothing",
)(with_counts(mean, lambda batch: batch["mask"].size))

broken(
    "labels not shifted",
    "counts one label too many in each row",
    Verdict.UNKNOWN,
    "averaged with wrong counts",
)(with_counts(mean, lambda batch: batch["mask"].sum() + len(batch["mask"])))

broken(
    "summed loss",
    "gives a sum where a mean is expected",
    Verdict.UNKNOWN,
    "a sum is given where a mean is expected",
)(
    with_counts(
        lambda params, batch: gradient_of(loss_sum_fn)(params, batch)[0],
        lambda batch: batch["mask"].sum(),
    )
)


def clip(grads: Any, norm: float) -> Any:
    """Clips as `optax.clip_by_global_norm`."""
    return scale(grads, norm / jnp.maximum(optax.tree.norm(grads), norm))


@broken(
    "each clipped",
    "clips micro-batches outside of the accumulation",
    Verdict.UNKNOWN,
    "each micro-batch is clipped",
)
def each_clipped(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """Clipping that stood around the optimizer, and now stands around MultiSteps."""
    loop = with_counts(
        lambda *x: clip(mean(*x), 2.0), lambda batch: batch["mask"].sum()
    )
    return loop(optimizer, params, micro_batches)


@broken(
    "window clipped",
    "clips the gradient of the window",
    Verdict.UNKNOWN,
    "the gradient of the window is clipped to a norm of 0.3",
)
def window_clipped(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    return apply_once(
        optimizer, params, clip(mean(params, concatenated(micro_batches)), 0.3)
    )


@broken(
    "apply_every",
    "runs the optimizer on zeros",
    Verdict.UNKNOWN,
    "the optimizer also runs on zeros, 7 times in this window, as behind optax.apply",
)
def by_apply_every(
    optimizer: Any, params: Any, micro_batches: Any, factor: float = 1.0
) -> Any:
    """`optax.apply_every` first in a chain: a sum, and zeros before it."""
    optimizer = optax.chain(optax.apply_every(K), optimizer)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for batch in micro_batches:
        grads = gradient_of(loss_sum_fn)(params, batch)[0]
        share = factor / tokens_of(micro_batches).sum()
        updates, state = update(scale(grads, share), state, params)
        params = optax.apply_updates(params, updates)
    return params


@broken("double division", "divides by tokens and by k", Verdict.DIVIDED_TWICE)
def double_division(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """Losses divided by the tokens of the window, then averaged over micro-batches."""
    share = 1 / tokens_of(micro_batches).sum()

    def gradient(params: Any, batch: Any) -> Any:
        return scale(gradient_of(loss_sum_fn)(params, batch)[0], share)

    return mean_of_means(optimizer, params, micro_batches, gradient)


@broken("never divided", "applies the sum over tokens", Verdict.NOT_DIVIDED)
def never_divided(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """Gradients of summed losses are added and never divided."""
    grads = weighted_sum(params, micro_batches, np.ones(K))
    return apply_once(optimizer, params, grads)


@broken("overwritten", "keeps only the last gradient", Verdict.LAST_MICRO_BATCH_ONLY)
def overwritten(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """`=` where `+=` was meant."""
    grads = scale(params, 0)
    for batch in micro_batches:
        grads = mean(params, batch)
    return apply_once(optimizer, params, grads)


@broken("not wrapped", "steps on every micro-batch", Verdict.STEPPED_EVERY_MICRO_BATCH)
def not_wrapped(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """The wrapper is missing, so every micro-batch causes an update."""
    state = optimizer.init(params)
    for batch in micro_batches:
        params, state = apply(optimizer, params, state, mean(params, batch))
    return params


@broken(
    "updates discarded",
    "drops the one update that is not zero",
    Verdict.DISCARDED,
    "no update moves the parameters: none closes the window",
)
def updates_discarded(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """The loop of optax issue 1567: its counter is one ahead of `mini_step`."""
    optimizer = optax.MultiSteps(optimizer, K)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for i, batch in enumerate(micro_batches, start=1):
        updates, state = update(mean(params, batch), state, params)
        if (i + 1) % K == 0:
            params = optax.apply_updates(params, updates)
    return params


@broken(
    "float16 sums", "overflows", Verdict.UNKNOWN, "are not finite", dtype=jnp.float16
)
def float16_sums(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """Sums scaled gradients in float16, whose largest value is 65,504."""
    loss_scale, num_tokens = 2.0**14, tokens_of(micro_batches).sum()
    grads = weighted_sum(params, micro_batches, np.full(K, loss_scale))
    return apply_once(optimizer, params, scale(grads, 1 / loss_scale / num_tokens))


@broken(
    "stale window",
    "starts with leftovers of the last epoch",
    Verdict.UNKNOWN,
    "not a sum of these micro-batches",
)
def stale_window(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """The previous epoch ended in the middle of a window, and nothing closed it."""
    before = cut(ragged_batch(99), K)[:2]
    return mean_of_means(optimizer, params, [*before, *micro_batches])


def full_batch(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    return apply_once(optimizer, params, mean(params, concatenated(micro_batches)))


by_transformation = with_transformation(loss_sum_fn)
by_multi_steps = with_counts(mean, lambda batch: batch["mask"].sum())


def by_train_step(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    step = make_train_step(loss_sum_fn, optimizer, len(micro_batches))
    return run_step(step, step.init(params), micro_batches)[0].params


def by_window_step(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    window_step = make_window_step(loss_sum_fn, optimizer)
    return window_step(window_step.init(params), stack(micro_batches))[0].params
