"""The audit in low precision, and of loops that move parameters without a gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audited_loops import (
    GALLERY,
    MICRO_BATCHES,
    RIGHT,
    K,
    apply,
    of_weights,
    tokens_of,
)
from helpers import init_params
from helpers import loss_sum_fn as loss_fn

from optax_tokenaccum import Verdict, audit

N = tokens_of(MICRO_BATCHES)
EXACT, MEAN_OF_MEANS = np.ones(K), N.mean() / N


@functools.cache
def rounded_to(dtype: str, loss_fn: Any = loss_fn) -> Any:
    """Compute `loss_fn` in `dtype`, whatever the dtype of the parameters."""

    def rounded(params: Any, batch: Any) -> Any:
        return loss_fn(jax.tree.map(lambda x: x.astype(dtype), params), batch)

    return rounded


def with_two_short_micro_batches() -> list[Any]:
    """Return micro-batches of which the second and sixth have four tokens each."""
    found = [*MICRO_BATCHES]
    for i in (1, 5):
        mask = found[i]["mask"].copy()
        mask[:, 1:] = False
        found[i] = found[i] | {"mask": mask}
    return found


SHORT = with_two_short_micro_batches()
LOST, TWICE = np.ones(K), np.ones(K)
LOST[[1, 5]] = 0
TWICE[5] = 2


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (LOST, "2 of the 8 micro-batches count for nothing"),
        (TWICE, "1 of the 8 micro-batches counts twice"),
        (EXACT, "the token mean of the whole window"),
    ],
    ids=["two lost", "one twice", "right"],
)
def test_weights_tell_what_rounding_hides(weights: Any, says: str):
    report = audit(of_weights(weights), loss_fn, init_params(0, "bfloat16"), SHORT)
    # By the relative error alone, all of them would pass.
    assert report.relative_error < report.rtol or not (weights == 1).all()
    assert report.passed == (weights == 1).all(), str(report)
    assert says in report.explanation, str(report)


def small_loss_fn(params: Any, batch: Any) -> Any:
    is_short = batch["mask"].sum() < 5
    loss_sum, num_tokens = loss_fn(params, batch)
    return jnp.where(is_short, 1e-3, 1) * loss_sum, num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("weights", [EXACT, LOST], ids=["right", "two lost"])
def test_a_micro_batch_below_the_noise_cannot_be_told(weights: Any):
    """A micro-batch of four tokens whose gradient is 1000 times smaller."""
    run = of_weights(weights, small_loss_fn)
    report = audit(run, small_loss_fn, init_params(0, "bfloat16"), SHORT)
    assert report.verdict is Verdict.UNKNOWN
    assert report.explanation.startswith("cannot tell")
    assert "micro-batches [1, 5]" in report.explanation
    in_float32 = audit(run, small_loss_fn, init_params(0), SHORT)
    assert in_float32.passed == (weights == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_parameters_and_low_precision_inside(dtype: str):
    rounded = rounded_to(dtype)
    for weights, foreign, verdict in (
        (EXACT, 0, Verdict.EXACT),
        (MEAN_OF_MEANS, 0, Verdict.MEAN_OF_MEANS),
        (np.arange(K) == K - 1, 0, Verdict.LAST_MICRO_BATCH_ONLY),
        (np.full(K, 1 / K), 0, Verdict.DIVIDED_TWICE),
        (EXACT, 0.05, Verdict.UNKNOWN),
        (np.full(K, 2.0), 0, Verdict.UNKNOWN),
    ):
        run = of_weights(weights, rounded, foreign)
        report = audit(run, loss_fn, init_params(0), MICRO_BATCHES)
        assert report.verdict is verdict, str(report)


def test_noise_is_measured_and_a_given_tolerance_is_kept():
    run = of_weights(EXACT, rounded_to("bfloat16"))
    report = audit(run, loss_fn, init_params(0), MICRO_BATCHES)
    assert report.passed and report.relative_error > 1e-4
    assert "Rounding noise of" in report.explanation
    report = audit(run, loss_fn, init_params(0), MICRO_BATCHES, rtol=1e-4)
    assert report.verdict is Verdict.UNKNOWN and report.rtol == 1e-4


def test_float32_is_as_strict_as_ever():
    """An error of 1e-3 is not noise: it repeats at other parameters."""
    for run in (
        of_weights(EXACT, foreign=1e-5),
        of_weights(np.full(K, 1.001)),
        of_weights(1 + 1e-3 * np.arange(K)),
    ):
        report = audit(run, loss_fn, init_params(0), MICRO_BATCHES)
        assert 1e-4 < report.relative_error < 1e-2
        assert report.verdict is Verdict.UNKNOWN, str(report)
        assert report.rtol == pytest.approx(1e-4, rel=0.1)


@pytest.mark.slow
def test_a_random_loop_is_named_random():
    random = np.random.default_rng(0)

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        keep = random.uniform(size=params["hidden"].shape) < 0.8

        def dropped(params: Any, batch: Any) -> Any:
            return loss_fn(params | {"hidden": params["hidden"] * keep}, batch)

        return of_weights(EXACT, dropped)(optimizer, params, micro_batches)

    report = audit(run, loss_fn, init_params(0), MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert "cannot tell" in report.explanation
    assert "Dropout does that" in report.explanation


# Parameters that move without a gradient.


def decay(rate: float) -> Any:
    return lambda params: jax.tree.map(lambda p: p * (1 - rate), params)


def round_trip(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params)


RANDOM = np.random.default_rng(0)


def random_rounding(params: Any) -> Any:
    def move(p: jax.Array) -> jax.Array:
        return p * (1 + 1e-6 * RANDOM.normal(size=p.shape)).astype(p.dtype)

    return jax.tree.map(move, params)


@pytest.mark.parametrize(
    ("drift", "where", "dtype"),
    [
        (decay(1e-2), "before", "float32"),
        pytest.param(round_trip, "both", "float32", marks=pytest.mark.slow),
        (random_rounding, "after", "float32"),
    ],
    ids=["decay", "round trip", "random rounding"],
)
def test_what_moves_without_a_gradient_is_no_step(drift: Any, where: str, dtype: str):
    def drifting(run: Any) -> Any:
        def around(optimizer: Any, params: Any, micro_batches: Any) -> Any:
            if where != "after":
                params = drift(params)
            params = run(optimizer, params, micro_batches)
            return params if where == "before" else drift(params)

        return around

    for run, verdict in (
        (of_weights(EXACT), Verdict.EXACT),
        (of_weights(MEAN_OF_MEANS), Verdict.MEAN_OF_MEANS),
        (GALLERY["not wrapped"].run, Verdict.STEPPED_EVERY_MICRO_BATCH),
        (of_weights(np.zeros(K)), Verdict.DISCARDED),
    ):
        report = audit(drifting(run), loss_fn, init_params(0, dtype), MICRO_BATCHES)
        assert report.verdict is verdict, str(report)


def test_decay_within_the_update():
    """`p - g - rate * p`, where the decay uses the parameters before the step."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        moved = RIGHT["token_accumulation"](optimizer, params, micro_batches)
        return jax.tree.map(lambda new, old: new - 1e-2 * old, moved, params)

    assert audit(run, loss_fn, init_params(0), MICRO_BATCHES).passed


@pytest.mark.parametrize(
    ("dtype", "rate", "size"), [("float32", 0, 1e-4), ("bfloat16", 1e-2, 1e-4)]
)
def test_a_small_second_step_is_a_step(dtype: str, rate: float, size: float):
    def sized_loss_fn(params: Any, batch: Any) -> Any:
        (x, mask), target = batch, jnp.arange(12.0)
        loss = jnp.sum(mask[:, None] * (params * x - target) ** 2)
        return loss, jnp.sum(mask)

    random = np.random.default_rng(0)
    micro_batches = [
        (np.float32(factor * random.normal(size=(4, 12))), np.float32(np.arange(4) < n))
        for factor, n in ((1, 4), (size, 2), (1, 3))
    ]
    params = jnp.asarray(1 + random.uniform(size=12), dtype)
    mean = jax.jit(jax.grad(lambda p, b: (lambda s, n: s / n)(*sized_loss_fn(p, b))))

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        state = optimizer.init(params)
        for batch in micro_batches:
            params, state = apply(optimizer, params, state, mean(params, batch))
            params = decay(rate)(params)
        return params

    report = audit(run, sized_loss_fn, params, micro_batches)
    assert report.verdict is Verdict.STEPPED_EVERY_MICRO_BATCH, str(report)
