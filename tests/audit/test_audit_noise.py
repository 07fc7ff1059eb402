"""The audit in low precision, and of loops that move parameters without a gradient."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from broken_loops import K, add, cut, loss_fn, parameters, scale
from data import Batch
from llama import make_rows
from right_loops import by_train_step

from optax_tokenaccum import Verdict, audit

pytestmark = pytest.mark.slow

SEEDS = 2
gradient_of = functools.cache(lambda loss_fn: jax.jit(jax.grad(loss_fn, has_aux=True)))


def apply(optimizer: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """Call the optimizer once, uncompiled, because its function is new every time."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def rows_with_two_short_micro_batches(seed: int) -> Batch:
    """Return rows whose second and sixth micro-batches have four loss tokens each."""
    rows = make_rows(seed)
    mask = rows.mask.copy()
    short = np.isin(np.arange(len(mask)) // (len(mask) // K), [1, 5])
    mask[short, 1:] = False
    return rows._replace(mask=mask)


@functools.cache
def rounded_to(dtype: Any, loss_fn: Any) -> Any:
    """Compute `loss_fn` in `dtype`, whatever the dtype of the parameters."""

    def rounded(params: Any, batch: Any) -> Any:
        return loss_fn(jax.tree.map(lambda x: x.astype(dtype), params), batch)

    return rounded


def of_weights(weights: Any, loss_fn: Any = loss_fn, foreign: float = 0.0) -> Any:
    """Return a loop that weights micro-batches by `weights`, where 1 is exact."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        num_tokens = sum(batch.mask.sum() for batch in micro_batches)
        grads = scale(params, foreign)
        for weight, batch in zip(weights, micro_batches, strict=True):
            share, _ = gradient_of(loss_fn)(params, batch)
            grads = add(grads, scale(share, weight / num_tokens))
        return apply(optimizer, params, optimizer.init(params), grads)[0]

    return run


def mean_of_means(loss_fn: Any) -> Any:
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        num_tokens = [batch.mask.sum() for batch in micro_batches]
        weights = np.mean(num_tokens) / np.array(num_tokens)
        return of_weights(weights, loss_fn)(optimizer, params, micro_batches)

    return run


def on_every_micro_batch(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    state = optimizer.init(params)
    for batch in micro_batches:
        grads, num_tokens = gradient_of(loss_fn)(params, batch)
        params, state = apply(optimizer, params, state, scale(grads, 1 / num_tokens))
    return params


LOST, TWICE = np.ones(K), np.ones(K)
LOST[[1, 5]] = 0
TWICE[5] = 2


@pytest.mark.parametrize("where", ["parameters", "computation", "loop"])
@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (LOST, "2 of the 8 micro-batches count for nothing"),
        (TWICE, "1 of the 8 micro-batches counts twice"),
        (np.ones(K), "the token mean of the whole window"),
    ],
    ids=["two lost", "one twice", "right"],
)
def test_weights_tell_what_rounding_hides(where: str, weights: Any, says: str):
    dtype = jnp.bfloat16 if where == "parameters" else jnp.float32
    given = rounded_to(jnp.bfloat16, loss_fn) if where == "computation" else loss_fn
    run = of_weights(
        weights, rounded_to(jnp.bfloat16, loss_fn) if where != "parameters" else given
    )
    for seed in range(SEEDS):
        micro_batches = cut(rows_with_two_short_micro_batches(seed))
        report = audit(run, given, parameters(seed, dtype), micro_batches)
        # By the relative error alone, all of them would pass.
        assert report.relative_error < report.rtol or not (weights == 1).all()
        assert report.passed == (weights == 1).all(), f"seed {seed}\n{report}"
        assert says in report.explanation, f"seed {seed}\n{report}"


def test_a_micro_batch_below_the_noise_cannot_be_told():
    """A micro-batch of one row and one token whose gradient is 1000 times smaller."""

    def small_loss_fn(params: Any, batch: Batch) -> Any:
        is_short = batch.mask.sum() < 5
        loss_sum, num_tokens = loss_fn(params, batch)
        return jnp.where(is_short, 1e-3, 1) * loss_sum, num_tokens

    micro_batches = cut(rows_with_two_short_micro_batches(0))
    for weights in (np.ones(K), LOST):
        run, params = of_weights(weights, small_loss_fn), parameters(0, jnp.bfloat16)
        report = audit(run, small_loss_fn, params, micro_batches)
        assert report.verdict is Verdict.UNKNOWN
        assert report.explanation.startswith("cannot tell")
        assert "micro-batches [1, 5]" in report.explanation
    # In float32 the audit can tell.
    params = parameters(0)
    assert not audit(
        of_weights(LOST, small_loss_fn), small_loss_fn, params, micro_batches
    ).passed
    assert audit(
        of_weights(np.ones(K), small_loss_fn), small_loss_fn, params, micro_batches
    ).passed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("given", ["the same", "float32"])
def test_float32_parameters_and_low_precision_inside(given: str, dtype: Any):
    rounded = rounded_to(dtype, loss_fn)
    params, micro_batches = parameters(0), cut(make_rows(0))
    loss_fn_given = rounded if given == "the same" else loss_fn
    steps = of_weights(np.ones(K), rounded)
    last = np.arange(K) == K - 1
    for run, verdict in (
        (steps, Verdict.EXACT),
        (mean_of_means(rounded), Verdict.MEAN_OF_MEANS),
        (of_weights(last, rounded), Verdict.LAST_MICRO_BATCH_ONLY),
        (of_weights(np.full(K, 1 / K), rounded), Verdict.DIVIDED_TWICE),
        (of_weights(np.ones(K), rounded, foreign=0.05), Verdict.UNKNOWN),
        (of_weights(np.full(K, 2.0), rounded), Verdict.UNKNOWN),
    ):
        report = audit(run, loss_fn_given, params, micro_batches)
        assert report.verdict is verdict, str(report)
    if given == "float32":
        report = audit(steps, loss_fn_given, params, micro_batches)
        assert report.relative_error > 1e-4
        assert "Rounding noise of" in report.explanation
        # A tolerance that the caller gives is kept.
        report = audit(steps, loss_fn_given, params, micro_batches, rtol=1e-4)
        assert report.verdict is Verdict.UNKNOWN and report.rtol == 1e-4


def test_float32_is_as_strict_as_ever():
    """An error of 1e-3 is not noise: it repeats at other parameters."""
    params, micro_batches = parameters(0), cut(make_rows(0))
    for run in (
        of_weights(np.ones(K), foreign=1e-5),
        of_weights(np.full(K, 1.001)),
        of_weights(1 + 1e-3 * np.arange(K)),
    ):
        report = audit(run, loss_fn, params, micro_batches)
        assert 1e-4 < report.relative_error < 1e-2
        assert report.verdict is Verdict.UNKNOWN, str(report)
        assert report.rtol == pytest.approx(1e-4, rel=0.1)


def test_a_random_loop_is_named_random():
    random = np.random.default_rng(0)

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        keep = random.uniform(size=params["hidden"].shape) < 0.8

        def dropped(params: Any, batch: Batch) -> Any:
            return loss_fn(params | {"hidden": params["hidden"] * keep}, batch)

        return of_weights(np.ones(K), dropped)(optimizer, params, micro_batches)

    report = audit(run, loss_fn, parameters(0), cut(make_rows(0)))
    assert report.verdict is Verdict.UNKNOWN
    assert "cannot tell" in report.explanation
    assert "Dropout does that" in report.explanation


# Parameters that move without a gradient.


def decay(rate: float) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map(lambda p: p * (1 - rate), params)


def decay_matrix(params: Any) -> Any:
    return params | {"hidden": params["hidden"] - 1e-2 * params["hidden"]}


def round_trip(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params)


def slightly_larger(params: Any) -> Any:
    return jax.tree.map(lambda p: p * 1.0000001, params)


def random_rounding() -> Callable[[Any], Any]:
    random = np.random.default_rng(0)

    def rounded(params: Any) -> Any:
        def move(p: jax.Array) -> jax.Array:
            return p * (1 + 1e-6 * random.normal(size=p.shape)).astype(p.dtype)

        return jax.tree.map(move, params)

    return rounded


DRIFTS = {
    "decay": decay(1e-2),
    "slow decay": decay(3e-5),
    "decay of a matrix": decay_matrix,
    "round trip": round_trip,
    "slightly larger": slightly_larger,
    "random rounding": random_rounding(),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("name", "where"),
    [*itertools.product(DRIFTS, ["before", "after"]), ("round trip", "both")],
)
def test_what_moves_without_a_gradient_is_no_step(name: str, where: str, dtype: Any):
    def drifting(run: Any) -> Any:
        def around(optimizer: Any, params: Any, micro_batches: Any) -> Any:
            if where != "after":
                params = DRIFTS[name](params)
            params = run(optimizer, params, micro_batches)
            return params if where == "before" else DRIFTS[name](params)

        return around

    params, micro_batches = parameters(0, dtype), cut(make_rows(0))
    for run, verdict in (
        (of_weights(np.ones(K)), Verdict.EXACT),
        (mean_of_means(loss_fn), Verdict.MEAN_OF_MEANS),
        (on_every_micro_batch, Verdict.STEPPED_EVERY_MICRO_BATCH),
        (of_weights(np.zeros(K)), Verdict.DISCARDED),
    ):
        report = audit(drifting(run), loss_fn, params, micro_batches)
        assert report.verdict is verdict, str(report)


def test_decay_within_the_update():
    """`p - g - rate * p`, where the decay uses the parameters before the step."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        moved = by_train_step(optimizer, params, micro_batches)
        return jax.tree.map(lambda new, old: new - 1e-2 * old, moved, params)

    assert audit(run, loss_fn, parameters(0), cut(make_rows(0))).passed


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("drift", [lambda params: params, decay(1e-2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_small_second_step_is_a_step(dtype: Any, drift: Any, size: float):
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
            params = drift(params)
        return params

    report = audit(run, sized_loss_fn, params, micro_batches)
    assert report.verdict is Verdict.STEPPED_EVERY_MICRO_BATCH, str(report)


def test_random_rounding_of_few_parameters_is_no_gradient():
    """Two parameters and two micro-batches, whose weights explain every movement."""

    def line_loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum((params * batch - 1) ** 2), batch.shape[0]

    drift = random_rounding()

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        zeros = jnp.zeros_like(params)
        return drift(apply(optimizer, params, optimizer.init(params), zeros)[0])

    random = np.random.default_rng(0)
    micro_batches = [np.float32(random.normal(size=(n, 2))) for n in (1, 4)]
    report = audit(run, line_loss_fn, jnp.array([0.5, 2.0]), micro_batches)
    assert report.verdict is Verdict.DISCARDED, str(report)
