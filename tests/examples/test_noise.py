"""The gradient noise of a transformer on dialogue, against brute force; its report."""

from functools import cache
from typing import Any, NamedTuple

import batches
import dialogue
import jax
import jax.numpy as jnp
import noise
import numpy as np
import optax
import pytest
import transformer
from methods import loss_fn

from optax_tokenaccum import GradientNoise, StepMetrics, make_train_step

K, ROWS, LENGTH, WINDOWS = 8, 2, 64, 300
UPDATES = 30


@cache
def random_micro_batches() -> Any:
    """Random pairs of dialogues, stacked; any dialogue may come again."""
    pairs, _ = dialogue.read_corpus()
    encoded = [batches.encode(pair) for pair in pairs]
    sequences = [x for x in encoded if len(x.inputs) <= LENGTH]
    draws = np.random.default_rng(0).choice(len(sequences), (K * WINDOWS, ROWS))
    drawn = [batches.pad([sequences[i] for i in rows], [LENGTH]) for rows in draws]
    return jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *drawn)


def make_params(updates: int) -> Any:
    """The parameters after so many updates of AdamW."""
    params = transformer.init(
        jax.random.key(0), vocabulary=batches.VOCABULARY, d_model=32, layers=1
    )
    if not updates:
        return params
    step = make_train_step(loss_fn, optax.adamw(3e-3), K)
    used = jax.tree.map(lambda x: x[: K * updates], random_micro_batches())
    state, _ = jax.lax.scan(
        lambda state, batch: step(state, batch, frozen={}), step.init(params), used
    )
    return state.params


class Sums(NamedTuple):
    """Over all micro-batches; `g` is a summed gradient, `n` its tokens."""

    norms: np.ndarray  # [m], |g|^2
    counts: np.ndarray  # [m], n
    whole: float  # |sum g|^2
    means: float  # |sum g / n|^2


@jax.jit
def sums_of(params: Any, micro_batches: Any) -> Any:
    def add(totals: Any, batch: Any) -> Any:
        grads, n = jax.grad(loss_fn, has_aux=True)(params, batch, {})
        both = grads, jax.tree.map(lambda g: g / n, grads)
        norm = optax.tree.norm(grads, squared=True)
        return jax.tree.map(jnp.add, totals, both), (norm, n)

    zeros = jax.tree.map(jnp.zeros_like, params)
    totals, (norms, counts) = jax.lax.scan(add, (zeros, zeros), micro_batches)
    return norms, counts, *(optax.tree.norm(total, squared=True) for total in totals)


def by_brute_force(sums: Sums) -> np.ndarray:
    """Trace and squared norm, from every micro-batch and the sum of all."""
    m, tokens = len(sums.counts), sums.counts.sum()
    across = sums.whole / tokens
    trace = (np.sum(sums.norms / sums.counts) - across) / (m - 1)
    return np.array([trace, (across - trace) / tokens])


def of_equal_means(sums: Sums) -> np.ndarray:
    """The same from the mean gradients, as if all had the same number of tokens."""
    m, tokens = len(sums.counts), sums.counts.mean()
    across = sums.means / m**2
    variance = (np.mean(sums.norms / sums.counts**2) - across) * m / (m - 1)
    return np.array([tokens * variance, across - variance / m])


@pytest.mark.slow
@pytest.mark.parametrize("updates", [0, UPDATES], ids=["at init", "trained"])
def test_the_noise_is_that_of_brute_force(updates: int):
    params = make_params(updates)
    sums = sums_of(params, random_micro_batches())
    sums = Sums(*(np.asarray(x, np.float64) for x in sums))
    assert sums.counts.max() > 10 * sums.counts.min()

    step = make_train_step(loss_fn, optax.sgd(0.0), K, gradient_noise=True)
    state, metrics = jax.lax.scan(
        lambda state, batch: step(state, batch, frozen={}),
        step.init(jax.tree.map(jnp.copy, params)),
        random_micro_batches(),
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, params))
    windows = np.asarray(metrics.gradient_noise, np.float64)[:, metrics.updated]
    assert windows.shape == (2, WINDOWS)
    got = windows.mean(axis=1)
    errors = windows.std(axis=1, ddof=1) / WINDOWS**0.5

    expected = by_brute_force(sums)
    assert (errors < [0.03 * expected[0], 0.06 * expected[1]]).all()
    assert (abs(got - expected) < 3 * errors).all()
    naive = of_equal_means(sums)
    assert abs(got[0] - expected[0]) < 0.05 * expected[0]
    assert naive[0] > 1.2 * expected[0]
    assert naive[0] - expected[0] > 5 * errors[0]
    # The scale that the example prints, and its standard error.
    scale = noise.scale_of(closed_windows(*windows))
    assert scale.is_reliable
    assert abs(scale.tokens - expected[0] / expected[1]) < 3 * scale.error


# The report.


def closed_windows(
    traces: Any, squared_norms: Any, num_tokens: float = 500.0
) -> list[StepMetrics]:
    empty = StepMetrics(*[None] * len(StepMetrics._fields))
    return [
        empty._replace(
            loss=2.0, num_tokens=num_tokens, gradient_noise=GradientNoise(*window)
        )
        for window in zip(traces, squared_norms, strict=True)
    ]


def test_the_estimates_are_averaged_before_the_division():
    traces, squared_norms = np.arange(1.0, 21), np.tile([0.1, 0.3], 10)
    scale = noise.scale_of(closed_windows(traces, squared_norms))
    assert scale.tokens == pytest.approx(10.5 / 0.2)
    assert np.mean(traces / squared_norms) > 1.2 * scale.tokens
    unknown = closed_windows([np.nan], [np.nan])
    assert noise.scale_of(closed_windows(traces, squared_norms) + unknown) == scale


def test_the_standard_error_is_the_spread_of_many_runs():
    rng = np.random.default_rng(0)
    scales = [
        noise.scale_of(
            closed_windows(*rng.normal([[600], [2]], [[200], [1]], (2, 100)))
        )
        for _ in range(400)
    ]
    spread = np.std([scale.tokens for scale in scales])
    assert np.mean([scale.error for scale in scales]) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize(
    ("trace", "squared_norm", "windows", "advice"),
    [
        (500 * 4, 1, 30, "A window has 0.25 times the noise scale: updates are noisy"),
        (500 / 3, 1, 30, "3 times the noise scale: an update makes at most 75% of"),
        (500 / 20, 1, 30, "20 times the noise scale: most of the accumulation is"),
        (500, -1, 30, "The noise scale of the last third is unknown"),
        (-500, 1, 30, "The noise scale of the last third is unknown"),
        (500, 1, 27, "The noise scale of the last third is unknown"),
        (500, 1, 1, "The noise scale of the last third is unknown"),
    ],
    ids=[
        "below",
        "above",
        "far above",
        "negative norm",
        "negative trace",
        "few",
        "one",
    ],
)
def test_the_advice_follows_from_the_last_third(trace, squared_norm, windows, advice):
    closed = closed_windows([trace] * windows, [squared_norm] * windows)
    *thirds, last = noise.describe(closed).splitlines()
    assert advice in last and last.endswith("see docs/how_many_tokens.md.")
    assert thirds[-1].startswith(f"updates {windows * 2 // 3 + 1} to {windows}: loss 2")


def test_a_large_standard_error_is_not_advice():
    traces = np.tile([100.0, 9000.0, -7000.0], 12)
    scale = noise.scale_of(closed_windows(traces, np.ones(36)))
    assert scale.tokens > 0 and not scale.is_reliable
    assert "give more --updates" in noise.advise(scale, 500.0)
