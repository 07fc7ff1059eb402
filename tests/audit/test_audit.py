"""The audit gives every broken loop its verdict and passes every right one."""

import dataclasses
import itertools
import os
import re
from pathlib import Path
from typing import Any

import broken_loops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from broken_loops import (
    K,
    cut,
    loss_fn,
    make_step,
    mean,
    parameters,
    scale,
    sum_and_count,
    with_counts,
)
from data import Batch
from flax import nnx
from llama import make_rows
from right_loops import (
    GRAPH,
    NNX_PARAMS,
    RIGHT,
    by_linen,
    by_nnx,
    by_nnx_without_counts,
    nnx_loss_fn,
    with_train_step,
    with_transformation,
)

from optax_tokenaccum import Verdict, audit

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("AUDIT_SEEDS", "2"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_pass(name: str, dtype: str):
    for seed in range(SEEDS):
        params = parameters(seed, dtype)
        report = audit(RIGHT[name], loss_fn, params, cut(make_rows(seed)))
        assert report.verdict is Verdict.EXACT, f"seed {seed}\n{report}"
        assert report.passed
        report.assert_exact()
        assert report.factor == 1
        np.testing.assert_allclose(report.weights, 1, rtol=10 * report.rtol)


@pytest.mark.parametrize("name", broken_loops.GALLERY)
def test_broken_loops_get_their_verdict(name: str):
    broken = broken_loops.GALLERY[name]
    for seed in range(SEEDS):
        params = parameters(seed, broken.dtype)
        report = audit(broken.run, loss_fn, params, cut(make_rows(seed)))
        assert report.verdict is broken.verdict, f"seed {seed}\n{report}"
        assert not report.passed
        with pytest.raises(AssertionError, match=broken.verdict.name):
            report.assert_exact()
        assert broken.says in report.explanation


@pytest.mark.parametrize(
    "name", [n for n, b in broken_loops.GALLERY.items() if b.dtype == jnp.float32]
)
def test_broken_loops_in_bfloat16(name: str):
    broken = broken_loops.GALLERY[name]
    params = parameters(0, jnp.bfloat16)
    report = audit(broken.run, loss_fn, params, cut(make_rows(0)))
    assert report.verdict is broken.verdict, str(report)


def with_an_empty_one() -> list[Batch]:
    first, *others = cut(make_rows(0))
    return [first._replace(mask=np.zeros_like(first.mask)), *others]


def test_a_micro_batch_without_tokens_has_no_weight():
    run = RIGHT["token_accumulation"]
    report = audit(run, loss_fn, parameters(0), with_an_empty_one())
    report.assert_exact()
    assert np.isnan(report.weights[0]) and not np.isnan(report.weights[1:]).any()
    assert "by micro-batch: -, 1, 1" in str(report)


def test_a_mean_loss_of_no_tokens_is_named():
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        optimizer = optax.MultiSteps(optimizer, len(micro_batches))
        step = make_step(optimizer)
        opt_state = optimizer.init(params)
        for batch in micro_batches:
            grads, n = sum_and_count(params, batch)
            params, opt_state = step(params, opt_state, scale(grads, 1 / n))
        return params

    micro_batches = with_an_empty_one()
    explanation = audit(run, loss_fn, parameters(0), micro_batches).explanation
    assert "Micro-batches [0], counted from 0, have no tokens" in explanation
    overflow = weighted(np.full(K, np.inf))
    explanation = audit(overflow, loss_fn, parameters(0), cut(make_rows(0))).explanation
    assert "float16 overflow" in explanation


# Other frameworks.


def test_loops_of_flax():
    micro_batches = cut(make_rows(0))
    assert audit(by_linen, loss_fn, parameters(0), micro_batches).passed

    def functional(params: Any, batch: Batch) -> Any:
        return nnx_loss_fn(nnx.merge(GRAPH, params), batch)

    assert audit(by_nnx, functional, NNX_PARAMS, micro_batches).passed
    report = audit(by_nnx_without_counts, functional, NNX_PARAMS, micro_batches)
    assert report.verdict is Verdict.MEAN_OF_MEANS
    assert "embed" in str(report)


def test_the_gallery_in_the_docs_is_this_one():
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")][:3]
        for line in page.split("| loop |")[1].splitlines()[2:]
        if line.startswith("|")
    ]
    expected = [
        [name, broken.mistake, broken.verdict.name]
        for name, broken in broken_loops.GALLERY.items()
    ]
    assert rows[: len(expected)] == expected


# Gradients outside the gallery.


def weighted(weights: Any) -> Any:
    """Return a loop that weights each micro-batch's summed gradient."""

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        grads = scale(params, 0)
        for weight, batch in zip(weights, micro_batches, strict=True):
            share = scale(sum_and_count(params, batch)[0], weight)
            grads = jax.tree.map(jnp.add, grads, share)
        return make_step(optimizer)(params, optimizer.init(params), grads)[0]

    return run


@pytest.mark.parametrize("seed", range(4))
def test_random_scalings_get_their_factor(seed: int):
    random = np.random.default_rng(seed)
    micro_batches = cut(make_rows(seed))
    total = sum(int(batch.mask.sum()) for batch in micro_batches)
    for factor in (2.0, -1.0, float(np.exp(random.normal() * 3))):
        run = weighted(np.full(K, factor / total))
        report = audit(run, loss_fn, parameters(seed), micro_batches)
        assert report.verdict is Verdict.UNKNOWN
        assert report.factor == pytest.approx(factor, rel=report.rtol)
        assert "direction is right, the size is not" in report.explanation


@pytest.mark.parametrize("seed", range(4))
def test_random_mixtures_are_unknown_and_say_their_weights(seed: int):
    random = np.random.default_rng(seed)
    micro_batches = cut(make_rows(seed))
    total = sum(int(batch.mask.sum()) for batch in micro_batches)
    weights = random.uniform(0.5, 1.5, K)
    run = weighted(weights / total)
    report = audit(run, loss_fn, parameters(seed), micro_batches)
    assert report.verdict is Verdict.UNKNOWN
    assert report.factor is None
    np.testing.assert_allclose(report.weights, weights, rtol=100 * report.rtol)
    assert "weighted in a way of their own" in report.explanation


def test_counts_that_are_off_are_named_and_shown():
    micro_batches = cut(make_rows(0))
    counts = [int(batch.mask.sum()) for batch in micro_batches]

    def explanation(run: Any) -> str:
        report = audit(run, loss_fn, parameters(0), micro_batches)
        assert report.verdict is Verdict.UNKNOWN
        return report.explanation

    def shown(counts: list[int]) -> str:
        return ", ".join(map(str, counts[:4]))

    for off in (-2, 2):
        wrong = [n + off for n in counts]
        run = with_counts(mean, lambda batch, off=off: batch.mask.sum() + off)
        expected = f"the proportion of {shown(wrong)} where loss_fn counts"
        assert expected in explanation(run)
        # The same counts as divisors of the losses, averaged by tokens, or all alike.
        for weights in (
            np.divide(1, wrong) * counts / sum(counts),
            np.divide(1, wrong) / K,
        ):
            text = explanation(weighted(weights))
            assert f"wrong counts, by {shown(wrong)} where loss_fn counts" in text
        text = explanation(weighted(np.full(K, 1 / sum(wrong))))
        assert f"a count of {sum(wrong)} tokens where loss_fn counts" in text


def test_wrong_counts_of_equal_micro_batches_are_named():
    micro_batches = cut(make_rows(0, 33, 33))
    counts = itertools.cycle(range(1, 1 + K))
    run = with_counts(mean, lambda batch: next(counts))
    explanation = audit(run, loss_fn, parameters(0), micro_batches).explanation
    assert "averaged with wrong counts" in explanation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_means_over_padding_are_named(dtype: str):
    micro_batches = cut(make_rows(0))
    counts = np.array([batch.mask.sum() for batch in micro_batches])
    run = weighted(counts / counts.sum() / micro_batches[0].mask.size)
    report = audit(run, loss_fn, parameters(0, dtype), micro_batches)
    assert report.verdict is Verdict.UNKNOWN
    assert re.search("divided by wrong counts, by 25[56]", report.explanation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_that_are_averaged_are_named(dtype: str):
    run = weighted(np.full(K, 1 / K))  # as optax.MultiSteps does
    report = audit(run, loss_fn, parameters(0, dtype), cut(make_rows(0)))
    assert "a sum is given where a mean is expected" in report.explanation


@pytest.mark.parametrize("seed", range(4))
def test_clipped_micro_batches_have_no_wrong_counts(seed: int):
    random = np.random.default_rng(seed)
    micro_batches = cut(make_rows(seed))
    counts = np.array([batch.mask.sum() for batch in micro_batches])
    clipped = np.minimum(1, random.uniform(0.6, 1.2, K))
    for weights in (clipped / counts.sum(), clipped / counts / K):
        report = audit(weighted(weights), loss_fn, parameters(seed), micro_batches)
        assert "weighted in a way of their own" in report.explanation


def test_a_small_gradient_in_bfloat16_is_a_movement():
    """A mean loss given to `token_accumulation`: 1/139 of a mean of means."""
    micro_batches = cut(make_rows(0))
    counts = np.array([batch.mask.sum() for batch in micro_batches])
    run = weighted(1 / counts / counts.sum())
    report = audit(run, loss_fn, parameters(0, "bfloat16"), micro_batches)
    assert report.verdict is Verdict.UNKNOWN
    assert "the direction is that of a mean of means" in report.explanation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_gradients_of_large_parameters_are_read(dtype: str):
    """Gradients of 1e-4, too small for `sgd(1.0)` to move bfloat16 parameters of 1."""

    def small_loss_fn(params: Any, batch: Any) -> Any:
        x, mask = batch
        return 1e-4 * jnp.sum(mask * (params * x)), jnp.sum(mask)

    random = np.random.default_rng(0)
    micro_batches = [
        (np.float32(random.normal(size=(8, 5))), np.float32(np.tri(8, 5, i)))
        for i in range(-3, 5)
    ]
    params = jnp.ones(5, dtype)
    gradient = jax.grad(lambda p: small_loss_fn(p, micro_batches[0])[0])(params)
    if dtype == "bfloat16":
        assert (params - gradient == params).all()

    run = with_transformation(small_loss_fn)
    assert audit(run, small_loss_fn, params, micro_batches).passed


@dataclasses.dataclass
class LineLoss:
    """A loss that is an object without a hash, like a mutable dataclass."""

    def __call__(self, params: Any, batch: Any) -> Any:
        return jnp.sum(params["slope"] * batch), batch.size


def test_a_loop_may_return_python_floats_and_a_loss_have_no_hash():
    def run_in_numpy(divide: Any) -> Any:
        def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
            gradient = {"slope": jnp.float32(divide(micro_batches))}
            updates, _ = optimizer.update(gradient, optimizer.init(params), params)
            return {"slope": float(params["slope"]) + float(updates["slope"])}

        return run

    def token_mean(micro_batches: Any) -> Any:
        return np.concatenate(micro_batches).mean()

    def mean_of_means(micro_batches: Any) -> Any:
        return np.mean([batch.mean() for batch in micro_batches])

    micro_batches = [np.full(1, 2.0, np.float32), np.full(9, 10.0, np.float32)]
    for divide, verdict in (
        (token_mean, Verdict.EXACT),
        (mean_of_means, Verdict.MEAN_OF_MEANS),
    ):
        report = audit(run_in_numpy(divide), LineLoss(), {"slope": 1.5}, micro_batches)
        assert report.verdict is verdict


@pytest.mark.parametrize("numbers", [np.array([1.3, 1.1]), [1.3, 1.1]], ids=type)
def test_parameters_that_are_rounded_to_float32_are_read(numbers: Any):
    def line_loss_fn(params: Any, batch: Any) -> Any:
        (slope, offset), (x, mask) = params, batch
        return jnp.sum(mask * (slope * x + offset) ** 2), jnp.sum(mask)

    def mean_loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, num_tokens = line_loss_fn(params, batch)
        return loss_sum / num_tokens, 1

    x = np.arange(4, dtype=np.float32)
    micro_batches = [(x, x < 1), (x, x < 4)]
    for given, verdict in (
        (line_loss_fn, Verdict.EXACT),
        (mean_loss_fn, Verdict.MEAN_OF_MEANS),
    ):
        report = audit(with_train_step(given), line_loss_fn, numbers, micro_batches)
        assert report.verdict is verdict, str(report)
