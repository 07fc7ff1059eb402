"""The main promise of the library: the update does not depend on the cut."""

import functools
from collections.abc import Callable
from typing import Any

import helpers
import nnx_ways
import numpy as np
import optax
import pytest

from optax_tokenaccum import MultiSteps, make_train_step, token_accumulation

KS = [1, 2, 4, 8, 16, 32]
SEEDS = range(9)

# sgd(1.0) that also keeps the gradient it receives. Parameters of size 0.2 round a
# gradient of 1e-2 to 3e-6, which would hide an error 30 times that of the sums.
SGD = optax.sgd(1.0, momentum=0.0)

# Runs a window of micro-batches and returns (parameters, optimizer state).
Run = Callable[[Any, list[Any]], tuple[Any, Any]]


def _loop(optimizer: Any, loss_fn: Any) -> Run:
    step = helpers.micro_step(optimizer, loss_fn)

    def run(params: Any, micro_batches: list[Any]) -> tuple[Any, Any]:
        state = optimizer.init(params)
        for batch in micro_batches:
            params, state = step(params, state, batch)
        return params, state

    return run


def _summed_gradients(k: int) -> Run:
    return _loop(token_accumulation(SGD, k), helpers.loss_sum_fn)


def _mean_gradients(k: int) -> Run:
    return _loop(token_accumulation(SGD, k, gradients="mean"), helpers.loss_mean_fn)


def _multi_steps(k: int) -> Run:
    return _loop(MultiSteps(SGD, k), helpers.loss_mean_fn)


def _train_step(k: int) -> Run:
    return _steps(make_train_step(helpers.loss_sum_fn, SGD, k))


def _train_step_in_one_program(k: int) -> Run:
    return _steps(make_train_step(helpers.loss_sum_fn, SGD, lambda _: k))


def _nnx_train_step(k: int) -> Run:
    return _steps(nnx_ways.make_step(nnx_ways.WAYS[0], helpers.loss_sum_fn, SGD, k))


def _steps(step: Any) -> Run:
    def run(params: Any, micro_batches: list[Any]) -> tuple[Any, Any]:
        state, _ = helpers.run_step(step, step.init(params), micro_batches)
        return state.params, state.opt_state

    return run


def _full_batch(k: int) -> Run:
    return _loop(optax.with_extra_args_support(SGD), helpers.loss_mean_fn)


def _naive(k: int) -> Run:
    multi_steps = optax.MultiSteps(SGD, k)
    without_count = optax.with_extra_args_support(
        optax.GradientTransformation(multi_steps.init, multi_steps.update)
    )
    return _loop(without_count, helpers.loss_mean_fn)


WAYS = {
    "summed_gradients": _summed_gradients,
    "mean_gradients": _mean_gradients,
    "multi_steps": _multi_steps,
    "train_step": _train_step,
    "train_step_in_one_program": _train_step_in_one_program,
    "nnx_train_step": _nnx_train_step,
}


@functools.cache
def _reference(seed: int) -> Any:
    return helpers.float64_gradient(
        helpers.init_params(seed), helpers.ragged_batch(seed)
    )


@functools.cache
def _median_errors(way: Callable[[int], Run], k: int) -> tuple[float, float]:
    """Errors of the gradient given to SGD, and of the one that the parameters show."""
    run, errors = way(k), []
    for seed in SEEDS:
        params = helpers.init_params(seed)
        micro_batches = helpers.cut(helpers.ragged_batch(seed), k)
        after, state = run(params, micro_batches)
        given = optax.tree.get(state, "trace")
        applied = helpers.difference(params, after)
        errors.append(
            [helpers.relative_error(g, _reference(seed)) for g in (given, applied)]
        )
    given_error, applied_error = np.median(errors, axis=0)
    return float(given_error), float(applied_error)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_error_is_that_of_the_full_batch(way: Any, k: int):
    given, applied = _median_errors(way, k)
    full_given, full_applied = _median_errors(_full_batch, 1)
    assert 0 < full_given < helpers.RTOL["float32"]
    assert given <= 2 * full_given
    assert applied <= 2 * full_applied


@pytest.mark.parametrize("k", KS[1:])
def test_mean_of_means_is_off_by_more_than_2_percent(k: int):
    given, _ = _median_errors(_naive, k)
    assert given > 0.02


def test_naive_error_grows_with_the_number_of_micro_batches():
    errors = [_median_errors(_naive, k)[0] for k in (2, 8, 32)]
    assert errors == sorted(errors)
