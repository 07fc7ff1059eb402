"""Loops for `audit`, on the problem of `helpers`: right ones, and broken ones.

A gradient function is `gradient(params, batch) -> (gradient, num_tokens)`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import loss_mean_fn, loss_sum_fn

from optax_tokenaccum import (
    MultiSteps,
    make_train_step,
    make_window_step,
    token_accumulation,
)
from optax_tokenaccum.debug._report import Verdict

Run = Callable[[Any, Any, Any], Any]
K = 8
MICRO_BATCHES = helpers.cut(helpers.ragged_batch(0), K)
TOKENS = np.array([batch["mask"].sum() for batch in MICRO_BATCHES])


@functools.cache
def gradient_of(loss_fn: Any) -> Any:
    return jax.jit(jax.grad(loss_fn, has_aux=True))


mean, summed = gradient_of(loss_mean_fn), gradient_of(loss_sum_fn)


def scale(grads: Any, factor: Any) -> Any:
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def changed(gradient: Any, change: Any = lambda g: g, count: Any = np.sum) -> Any:
    """A gradient function with another gradient, or another count of the mask."""
    return lambda p, batch: (change(gradient(p, batch)[0]), count(batch["mask"]))


def clip(grads: Any, norm: float) -> Any:
    return scale(grads, norm / jnp.maximum(optax.tree.norm(grads), norm))


def concatenated(micro_batches: Any) -> Any:
    """All rows of a window."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *micro_batches)


def weighted_sum(
    params: Any, micro_batches: Any, weights: Any, gradient: Any = summed
) -> Any:
    """The sum of the micro-batches' gradients, times their weights."""
    grads = scale(params, 0)
    for weight, batch in zip(weights, micro_batches, strict=True):
        share = scale(gradient(params, batch)[0], weight)
        grads = jax.tree.map(jnp.add, grads, share)
    return grads


def loop(wrap: Callable[[Any, int], Any], gradient: Any) -> Run:
    """A loop that updates with `wrap(optimizer, k)`."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        optimizer = wrap(optimizer, len(micro_batches))
        update, state = jax.jit(optimizer.update), optimizer.init(params)
        for batch in micro_batches:
            grads, n = gradient(params, batch)
            updates, state = update(grads, state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        return params

    return run


def once(gradient: Callable[[Any, Any], Any]) -> Run:
    """A loop that updates once, with `gradient(params, micro_batches)`."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        grads = gradient(params, micro_batches)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return run


def of_weights(weights: Any, gradient: Any = summed, foreign: float = 0.0) -> Run:
    """A loop that weights micro-batches by `weights`, where 1 is exact."""

    def weighted(params: Any, micro_batches: Any) -> Any:
        shares = weights / sum(batch["mask"].sum() for batch in micro_batches)
        grads = weighted_sum(params, micro_batches, shares, gradient)
        return jax.tree.map(jnp.add, grads, scale(params, foreign))

    return once(weighted)


def mean_of_window(params: Any, micro_batches: Any) -> Any:
    return mean(params, concatenated(micro_batches))[0]


full_batch = once(mean_of_window)
mean_of_means = loop(optax.MultiSteps, mean)
by_transformation = loop(token_accumulation, summed)
by_multi_steps = loop(MultiSteps, mean)


def by_train_step(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    step = make_train_step(loss_sum_fn, optimizer, len(micro_batches))
    return helpers.run_step(step, step.init(params), micro_batches)[0].params


def by_window_step(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    step = make_window_step(loss_sum_fn, optimizer)
    return step(step.init(params), helpers.stack(micro_batches))[0].params


def updates_discarded(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """The loop of optax issue 1567: its counter is one ahead of `mini_step`."""
    optimizer = optax.MultiSteps(optimizer, K)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for i, batch in enumerate(micro_batches, start=1):
        updates, state = update(mean(params, batch)[0], state, params)
        if (i + 1) % K == 0:
            params = optax.apply_updates(params, updates)
    return params


def in_float16(params: Any, micro_batches: Any) -> Any:
    """A sum of scaled gradients in float16, whose largest value is 65,504."""
    grads = weighted_sum(params, micro_batches, np.full(K, 2.0**14))
    return scale(grads, 1 / 2.0**14 / TOKENS.sum())


def stale_window(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    """The previous epoch ended in the middle of a window, and nothing closed it."""
    before = helpers.cut(helpers.ragged_batch(99), K)[:2]
    run = loop(lambda tx, _: optax.MultiSteps(tx, K), mean)
    return run(optimizer, params, [*before, *micro_batches])


def two_windows(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    run = loop(lambda tx, _: tx, mean)
    return run(optimizer, params, [concatenated(micro_batches)] * 2)


def frozen(optimizer: Any, k: int, wrap: Any = token_accumulation) -> Any:
    mask = {"embed": False, "hidden": True, "out": False}
    return wrap(optax.chain(optimizer, optax.masked(optax.set_to_zero(), mask)), k)


def unmasked_fn(params: Any, batch: Any) -> Any:
    loss_sum, _ = loss_sum_fn(params, batch | {"mask": np.ones(batch["mask"].shape)})
    return loss_sum, jnp.sum(batch["mask"])


class Broken(NamedTuple):
    """A loop, and what the audit should find."""

    run: Run
    verdict: Verdict
    says: str  # a part of the explanation
    mistake: str = ""  # in the words of docs/audit.md, which shows it
    dtype: Any = None  # of the parameters, if the mistake needs one
    loss_fn: Any = loss_sum_fn
    fixed: Run | None = None  # the loop, changed as the explanation says


def of_means(tx: Any, k: int) -> Any:
    return token_accumulation(tx, k, gradients="mean")


def clipping(tx: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), tx)


by_k = changed(mean, lambda g: scale(g, 1 / K))
by_total = changed(summed, lambda g: scale(g, 1 / TOKENS.sum()))
sums_by_multi_steps = loop(functools.partial(MultiSteps, gradients="sum"), summed)


def unknown(run: Run, says: str, **options: Any) -> Broken:
    return Broken(run, Verdict.UNKNOWN, says, **options)


GALLERY = {
    "mean of means": Broken(
        mean_of_means,
        Verdict.MEAN_OF_MEANS,
        "MultiSteps the loss's own count as num_tokens",
        "averages means",
        fixed=by_multi_steps,
    ),
    "padding counted": Broken(
        loop(MultiSteps, changed(mean, count=np.size)),
        Verdict.MEAN_OF_MEANS,
        "mask.size changes nothing",
        "counts the entries of the mask",
    ),
    "double division": Broken(
        loop(optax.MultiSteps, by_total),
        Verdict.DIVIDED_TWICE,
        "give MultiSteps use_grad_mean=False",
        "divides by tokens and by k",
        fixed=loop(functools.partial(MultiSteps, use_grad_mean=False), by_total),
    ),
    "mean loss / k": Broken(
        loop(MultiSteps, by_k),
        Verdict.DIVIDED_TWICE,
        "Remove '/ k' from the loss",
        fixed=by_multi_steps,
    ),
    "never divided": Broken(
        once(lambda *window: weighted_sum(*window, np.ones(K))),
        Verdict.NOT_DIVIDED,
        "the loop applies a sum",
        "applies the sum over tokens",
    ),
    "overwritten": Broken(
        once(lambda params, window: mean(params, window[-1])[0]),
        Verdict.LAST_MICRO_BATCH_ONLY,
        "only the last gradient is applied",
        "keeps only the last gradient",
    ),
    "not wrapped": Broken(
        loop(lambda tx, _: tx, mean),
        Verdict.STEPPED_EVERY_MICRO_BATCH,
        "wrap the optimizer in token_accumulation (gradients='mean' for a mean loss)",
        "steps on every micro-batch",
        fixed=loop(of_means, mean),
    ),
    "updates discarded": Broken(
        updates_discarded,
        Verdict.DISCARDED,
        "no update moves the parameters: none closes the window",
        "drops the one update that is not zero",
    ),
    "another optimizer": Broken(
        loop(lambda _, k: token_accumulation(optax.adam(0.1), k), summed),
        Verdict.DISCARDED,
        "parameters move without the given optimizer",
    ),
    "accumulation inside another": Broken(
        loop(lambda tx, k: optax.MultiSteps(token_accumulation(tx, k), k), summed),
        Verdict.DISCARDED,
        "is one accumulation inside another?",
    ),
    "clipped, not wrapped": Broken(
        loop(lambda tx, _: clipping(tx), mean),
        Verdict.STEPPED_EVERY_MICRO_BATCH,
        "wrap the optimizer in token_accumulation",
    ),
    "labels not shifted": unknown(
        loop(MultiSteps, changed(mean, count=lambda mask: mask.sum() + len(mask))),
        "is each clipped, or its count wrong?",
    ),
    "sums for MultiSteps": unknown(
        loop(MultiSteps, summed),
        "a sum is given as a mean: write MultiSteps(gradients='sum')",
        fixed=sums_by_multi_steps,
    ),
    "sums for optax.MultiSteps": unknown(
        loop(optax.MultiSteps, summed),
        "Is a sum given as a mean (139)? Then write MultiSteps(gradients='sum')",
        fixed=sums_by_multi_steps,
    ),
    "means for token_accumulation": unknown(
        loop(token_accumulation, mean),
        "sum is expected (0.00719424), or are means added up (8)? Write "
        "token_accumulation(gradients='mean'), and give num_tokens",
        fixed=loop(of_means, mean),
    ),
    "each clipped": unknown(
        loop(MultiSteps, changed(mean, lambda g: clip(g, 0.1))),
        "each micro-batch is clipped",
    ),
    "window clipped": unknown(
        once(lambda *window: clip(mean_of_window(*window), 0.03)), "Is it clipped"
    ),
    "apply_every": unknown(
        loop(lambda tx, k: optax.chain(optax.apply_every(k), tx), by_total),
        "the optimizer also runs on zeros, 7 times, as with optax.apply_every",
    ),
    "apply_every after": unknown(
        loop(lambda tx, k: optax.chain(tx, optax.apply_every(k)), mean),
        "runs on every micro-batch and adds its updates, as with optax.apply_every",
        fixed=loop(of_means, mean),
    ),
    "clipped, apply_every after": unknown(
        loop(lambda tx, k: optax.chain(clipping(tx), optax.apply_every(k)), mean),
        "Drop apply_every, and write token_accumulation(optax.chain(...), k), with "
        "gradients='mean' for a mean loss",
        fixed=loop(lambda tx, k: of_means(clipping(tx), k), mean),
    ),
    "float16 sums": unknown(once(in_float16), "are not finite", dtype=jnp.float16),
    "stale window": unknown(stale_window, "not a sum of these micro-batches"),
    "padding in the loss": unknown(
        loop(token_accumulation, gradient_of(unmasked_fn)), "Does padding count?"
    ),
    "two windows": unknown(two_windows, "make it one window, one step"),
    "frozen parameters": unknown(
        loop(frozen, summed),
        "does not move 1 of the parameters, such as ['hidden']: stop their gradient in "
        "loss_fn, or leave them out of params. As to the others, the loop applies the "
        "exact mean",
    ),
    "mean loss_fn": unknown(
        by_transformation, "couples rows, or is not a sum", loss_fn=loss_mean_fn
    ),
}
