"""The audit in low precision, and of loops that move parameters without a gradient."""

import functools
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from audited_loops import (
    GALLERY,
    MICRO_BATCHES,
    K,
    init_params,
    of_weights,
    tokens_of,
)
from audited_loops import loss_sum_fn as loss_fn
from helpers import loss_sum_fn as big_loss_fn

from optax_tokenaccum import Verdict, audit

N = tokens_of(MICRO_BATCHES)
EXACT, MEAN_OF_MEANS = np.ones(K), N.mean() / N


@functools.cache
def rounded_to(dtype: str) -> Any:
    """Compute `loss_fn` in `dtype`, whatever the dtype of the parameters."""

    def rounded(params: Any, batch: Any) -> Any:
        return loss_fn(jax.tree.map(lambda x: x.astype(dtype), params), batch)

    return rounded


# Three of them have a token in each row, of a thousand in the window.
SHORT = [
    batch | {"mask": batch["mask"] & (np.arange(64) < 1)} if i in (1, 3, 5) else batch
    for i, batch in enumerate(helpers.cut(helpers.ragged_batch(0), K))
]
UNLIKE = np.ones(K)
UNLIKE[[1, 5]], UNLIKE[3] = 0, 2


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (UNLIKE, "of the 8 micro-batches, 2 count for nothing and 1 twice"),
        (EXACT, "the exact mean of the window, by loss_fn's count"),
    ],
    ids=["two lost, one twice", "right"],
)
def test_weights_tell_what_rounding_hides(weights: Any, says: str):
    run, params = of_weights(weights, big_loss_fn), helpers.init_params(0, "bfloat16")
    report = audit(run, big_loss_fn, params, SHORT)
    # By the relative error alone, all of them would pass.
    assert report.relative_error < report.rtol or not (weights == 1).all()
    assert report.passed == (weights == 1).all(), str(report)
    assert says in report.explanation, str(report)


@pytest.mark.slow
def test_a_loop_in_lower_precision_than_loss_fn_needs_a_tolerance():
    run = of_weights(EXACT, rounded_to("bfloat16"))
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert "lower precision than in loss_fn (give rtol)" in report.explanation
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES, rtol=0.05)
    assert report.passed and report.relative_error > 1e-4
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES, rtol=1e-4)
    assert report.verdict is Verdict.UNKNOWN and report.rtol == 1e-4


def test_float32_is_as_strict_as_ever():
    """An error of 1e-3 is not noise: it repeats at other parameters."""
    for run in (
        of_weights(EXACT, foreign=1e-3),
        of_weights(1 + 1e-3 * np.arange(K)),
    ):
        report = audit(run, loss_fn, init_params(), MICRO_BATCHES)
        assert 1e-4 < report.relative_error < 1e-2
        assert report.verdict is Verdict.UNKNOWN, str(report)
        assert report.rtol == pytest.approx(1e-4, rel=0.1)


def test_what_moves_without_a_gradient_is_no_step():
    """Weight decay before the update."""

    def drifting(run: Any) -> Any:
        def around(optimizer: Any, params: Any, micro_batches: Any) -> Any:
            decayed = jax.tree.map(lambda p: 0.99 * p, params)
            return run(optimizer, decayed, micro_batches)

        return around

    for run, verdict in (
        (of_weights(EXACT), Verdict.EXACT),
        (GALLERY["not wrapped"].run, Verdict.STEPPED_EVERY_MICRO_BATCH),
        (of_weights(np.zeros(K)), Verdict.DISCARDED),
    ):
        report = audit(drifting(run), loss_fn, init_params(), MICRO_BATCHES)
        assert report.verdict is verdict, str(report)
