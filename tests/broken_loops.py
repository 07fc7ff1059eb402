"""Loops that apply a wrong gradient, and what the audit says about each.

Each loop has the signature that `audit` expects,
`run(optimizer, params, micro_batches) -> params`, and contains a mistake that people
made. In most of the loops, the loss still goes down.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Batch
from llama import VOCABULARY, make_rows

from optax_tokenaccum import MultiSteps, Verdict, softmax_cross_entropy_sum

K, WIDTH = 8, 16
MicroBatches = Sequence[Batch]


class Broken(NamedTuple):
    """A loop, what it does wrong, and what the audit should find.

    Attributes:
      run: the loop.
      mistake: what it does wrong, in words.
      verdict: the verdict that the audit should return.
      says: a part of the expected explanation, if the verdict alone is not enough.
      dtype: the dtype of the parameters.
    """

    run: Callable[[Any, Any, MicroBatches], Any]
    mistake: str
    verdict: Verdict
    says: str = ""
    dtype: Any = jnp.float32


def loss_fn(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The summed loss of a small next-token model, and the number of tokens."""
    x = jnp.tanh(params["embedding"][batch.inputs] @ params["hidden"])
    return softmax_cross_entropy_sum(x @ params["head"], batch.labels, batch.mask)


@jax.jit
def sum_and_count(params: Any, batch: Batch) -> tuple[Any, jax.Array]:
    """The gradient of the summed loss, and the number of tokens."""
    return jax.grad(loss_fn, has_aux=True)(params, batch)


@jax.jit
def mean(params: Any, batch: Batch) -> Any:
    """The gradient of the mean loss."""
    grads, num_tokens = sum_and_count(params, batch)
    return jax.tree.map(lambda g: g / num_tokens, grads)


def add(x: Any, y: Any) -> Any:
    """The sum of two gradients."""
    return jax.tree.map(jnp.add, x, y)


def scale(grads: Any, factor: Any) -> Any:
    """A multiple of a gradient."""
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def make_step(optimizer: Any) -> Callable[..., tuple[Any, Any]]:
    """Makes `step(params, state, grads) -> (params, state)`, one optimizer call."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def mean_of_means(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """`optax.MultiSteps` on mean losses."""
    optimizer = optax.MultiSteps(optimizer, len(micro_batches))
    step, state = make_step(optimizer), optimizer.init(params)
    for batch in micro_batches:
        params, state = step(params, state, mean(params, batch))
    return params


def with_counts(
    gradient: Callable[[Any, Batch], Any], count: Callable[[Batch], Any]
) -> Callable[[Any, Any, MicroBatches], Any]:
    """Makes a loop with `optax_tokenaccum.MultiSteps`, which expects mean losses."""

    def run(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
        optimizer = MultiSteps(optimizer, len(micro_batches))
        state = optimizer.init(params)
        for batch in micro_batches:
            updates, state = optimizer.update(
                gradient(params, batch), state, params, num_tokens=count(batch)
            )
            params = optax.apply_updates(params, updates)
        return params

    return run


summed_loss = with_counts(
    lambda params, batch: sum_and_count(params, batch)[0],
    lambda batch: batch.mask.sum(),
)
counts_padding = with_counts(mean, lambda batch: batch.mask.size)
counts_before_shift = with_counts(
    mean, lambda batch: batch.mask.sum() + len(batch.mask)
)


def mean_over_devices(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """Two devices take the means of their rows, and `pmean` averages these."""
    state = optimizer.init(params)
    grads = scale(params, 0)
    for pair in zip(micro_batches[::2], micro_batches[1::2], strict=True):
        rows = jax.tree.map(lambda *parts: jnp.stack(parts), *pair)
        shares = jax.vmap(
            lambda batch: jax.lax.pmean(mean(params, batch), "devices"),
            axis_name="devices",
        )(rows)
        share = jax.tree.map(lambda x: x[0], shares)
        grads = add(grads, scale(share, 2 / len(micro_batches)))
    return make_step(optimizer)(params, state, grads)[0]


def summed_over_devices(
    optimizer: Any, params: Any, micro_batches: MicroBatches
) -> Any:
    """Two devices hold the same rows: both are exact, then `psum` adds them."""
    sums = [sum_and_count(params, batch) for batch in micro_batches]
    num_tokens = sum(n for _, n in sums)
    grads = scale(params, 0)
    for g, _ in sums:
        grads = add(grads, scale(g, 1 / num_tokens))
    both = jax.tree.map(lambda g: jnp.stack([g, g]), grads)
    grads = jax.vmap(lambda g: jax.lax.psum(g, "devices"), axis_name="devices")(both)
    grads = jax.tree.map(lambda g: g[0], grads)
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def double_division(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """Losses divided by the tokens of the window, then averaged over micro-batches."""
    optimizer = optax.MultiSteps(optimizer, len(micro_batches))
    step, state = make_step(optimizer), optimizer.init(params)
    num_tokens = sum(batch.mask.sum() for batch in micro_batches)
    for batch in micro_batches:
        grads = scale(sum_and_count(params, batch)[0], 1 / num_tokens)
        params, state = step(params, state, grads)
    return params


def never_divided(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """Gradients of summed losses are added and never divided."""
    grads = scale(params, 0)
    for batch in micro_batches:
        grads = add(grads, sum_and_count(params, batch)[0])
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def overwritten(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """`=` where `+=` was meant."""
    grads = scale(params, 0)
    for batch in micro_batches:
        grads = mean(params, batch)
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def not_wrapped(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """The wrapper is missing, so every micro-batch causes an update."""
    step, state = make_step(optimizer), optimizer.init(params)
    for batch in micro_batches:
        params, state = step(params, state, mean(params, batch))
    return params


def updates_discarded(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """The loop of optax issue 1567: its counter is one ahead of `mini_step`."""
    k = len(micro_batches)
    optimizer = optax.MultiSteps(optimizer, k)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for i, batch in enumerate(micro_batches, start=1):
        updates, state = update(mean(params, batch), state, params)
        if (i + 1) % k == 0:
            params = optax.apply_updates(params, updates)
    return params


def misaligned(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """`if i % k == 0`, counted from 0: the first micro-batch closes the window."""
    step, state = make_step(optimizer), optimizer.init(params)
    grads, num_tokens = scale(params, 0), 0
    for i, batch in enumerate(micro_batches):
        g, n = sum_and_count(params, batch)
        grads, num_tokens = add(grads, g), num_tokens + n
        if i % len(micro_batches) == 0:
            grads = scale(grads, 1 / num_tokens)
            params, state = step(params, state, grads)
            grads, num_tokens = scale(params, 0), 0
    return params


def clipped_before(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """Clips every micro-batch instead of the window."""
    clip = optax.clip_by_global_norm(0.05)
    num_tokens = sum(batch.mask.sum() for batch in micro_batches)
    grads = scale(params, 0)
    for batch in micro_batches:
        g, _ = clip.update(mean(params, batch), clip.init(params))
        grads = add(grads, scale(g, batch.mask.sum() / num_tokens))
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def float16_sums(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """Sums scaled gradients in float16, whose largest value is 65,504."""
    loss_scale = 2.0**14
    grads, num_tokens = scale(params, 0), 0
    for batch in micro_batches:
        g, n = sum_and_count(params, batch)
        grads, num_tokens = add(grads, scale(g, loss_scale)), num_tokens + n
    grads = scale(grads, 1 / loss_scale / num_tokens)
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def stale_window(optimizer: Any, params: Any, micro_batches: MicroBatches) -> Any:
    """The previous epoch ended in the middle of a window, and nothing closed it."""
    optimizer = optax.MultiSteps(optimizer, len(micro_batches))
    step, state = make_step(optimizer), optimizer.init(params)
    for batch in (*cut(make_rows(99))[:2], *micro_batches):
        params, state = step(params, state, mean(params, batch))
    return params


GALLERY = {
    "mean of means": Broken(
        mean_of_means, "averages micro-batches' means", Verdict.MEAN_OF_MEANS
    ),
    "padding counted": Broken(
        counts_padding,
        "counts the entries of the mask",
        Verdict.MEAN_OF_MEANS,
        "such as mask.size",
    ),
    "labels not shifted": Broken(
        counts_before_shift,
        "counts one label too many in each row",
        Verdict.UNKNOWN,
        "averaged with wrong counts",
    ),
    "summed loss": Broken(
        summed_loss,
        "gives a sum where a mean is expected",
        Verdict.UNKNOWN,
        "a sum is given where a mean is expected",
    ),
    "mean over devices": Broken(
        mean_over_devices, "averages devices' means", Verdict.MEAN_OF_MEANS
    ),
    "summed over devices": Broken(
        summed_over_devices,
        "counts equal gradients twice",
        Verdict.UNKNOWN,
        "2 times what it should be (are two devices",
    ),
    "double division": Broken(
        double_division, "divides by tokens and by k", Verdict.DIVIDED_TWICE
    ),
    "never divided": Broken(
        never_divided, "applies the sum over tokens", Verdict.NOT_DIVIDED
    ),
    "overwritten": Broken(
        overwritten, "keeps only the last gradient", Verdict.LAST_MICRO_BATCH_ONLY
    ),
    "not wrapped": Broken(
        not_wrapped, "steps on every micro-batch", Verdict.STEPPED_EVERY_MICRO_BATCH
    ),
    "updates discarded": Broken(
        updates_discarded, "drops the one update that is not zero", Verdict.DISCARDED
    ),
    "misaligned": Broken(
        misaligned,
        "closes its window too early",
        Verdict.UNKNOWN,
        "7 of the 8 micro-batches count for nothing",
    ),
    "clipped before": Broken(
        clipped_before,
        "clips micro-batches, not the window",
        Verdict.UNKNOWN,
        "weighted in a way of their own",
    ),
    "float16 sums": Broken(
        float16_sums, "overflows", Verdict.UNKNOWN, "are not finite", jnp.float16
    ),
    "stale window": Broken(
        stale_window,
        "starts with leftovers of the last epoch",
        Verdict.UNKNOWN,
        "not a sum of these micro-batches",
    ),
}


def cut(rows: Batch) -> list[Batch]:
    """Cuts rows into `K` micro-batches of equal size."""
    parts = [np.split(part, K) for part in rows]
    return [Batch(*micro_batch) for micro_batch in zip(*parts, strict=True)]


def parameters(seed: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters of the model."""
    random = np.random.default_rng(seed)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "hidden": (WIDTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    return {
        name: jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, dtype)
        for name, shape in shapes.items()
    }
