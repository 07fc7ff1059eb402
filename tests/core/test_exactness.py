"""The main promise of the library: the update does not depend on the cut."""

import functools
from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest
from ways_in import optax_multi_steps, train_step, transformation, window_step

SEEDS = range(9)

# Parameters of size 0.2 round a gradient of 1e-2 to 3e-6, which would hide an error 30
# times that of the sums. After so long a step, they are the gradient.
RATE = 2.0**20


@functools.cache
def reference(seed: int) -> Any:
    return helpers.float64_gradient(
        helpers.init_params(seed), helpers.ragged_batch(seed)
    )


def any_cut(batch: Any, k: int, seed: int) -> list[Any]:
    """Give every row to one of `k` micro-batches, of which the last but one has none.

    The rows of the others are masked there.
    """
    numbers = np.delete(np.arange(k), k - 2)
    number = np.random.default_rng(seed).choice(numbers, len(batch["mask"]))
    return [batch | {"mask": batch["mask"] & (number == i)[:, None]} for i in range(k)]


@functools.cache
def median_error(way: Any, k: int, any_rows: bool = False) -> float:
    """The error of the gradient of a window of `k` micro-batches."""
    run, errors = way(helpers.loss_sum_fn, optax.sgd(RATE), k), []
    for seed in SEEDS:
        params, batch = helpers.init_params(seed), helpers.ragged_batch(seed)
        window = any_cut(batch, k, seed) if any_rows else helpers.cut(batch, k)
        (after,) = run(params, [window])
        gradient = jax.tree.map(lambda x: x / RATE, helpers.difference(params, after))
        errors.append(helpers.relative_error(gradient, reference(seed)))
    return float(np.median(errors))


@pytest.mark.parametrize("way", [transformation, train_step, window_step])
def test_error_is_that_of_the_full_batch(way: Any):
    full = median_error(optax_multi_steps, 1)
    assert 0 < full < helpers.RTOL["float32"]
    assert median_error(way, 8, any_rows=True) <= 2 * full


def test_mean_of_means_is_off_by_more_than_2_percent_and_grows_with_k():
    errors = [median_error(optax_multi_steps, k) for k in (2, 32)]
    assert 0.02 < errors[0] < errors[1]
