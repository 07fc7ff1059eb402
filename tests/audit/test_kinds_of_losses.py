"""`check_loss_fn` passes every kind of right loss and finds the wrong ones."""

import re

import jax
import numpy as np
import pytest
from kinds_of_losses import RIGHT, WRONG, Loss, make_batch, make_params

from optax_tokenaccum import LossReport, check_loss_fn

pytestmark = pytest.mark.slow

SEEDS = range(20)


def reports(loss_fn: Loss) -> list[LossReport]:
    """One report per seed, on batches with only the leaves that this loss reads."""
    read: set[str] = set()

    class Reads(dict):
        def __getitem__(self, name: str) -> jax.Array:
            read.add(name)
            return super().__getitem__(name)

        def __or__(self, other: dict) -> "Reads":
            return Reads(super().__or__(other))

    def draw(seed: int) -> tuple[dict, dict]:
        random = np.random.default_rng(seed)
        return make_params(random), make_batch(random)

    params, batch = draw(0)
    loss_fn(params, Reads(batch))
    found, jitted = [], jax.jit(loss_fn)  # compiled once
    for seed in SEEDS:
        params, batch = draw(seed)
        given = {name: batch[name] for name in sorted(read)}
        found.append(check_loss_fn(jitted, params, [given]))
    return found


def test_there_are_forty_kinds():
    assert len(set(RIGHT)) >= 40


@pytest.mark.parametrize("loss_fn", RIGHT, ids=lambda f: f.__name__)
def test_right_losses_pass(loss_fn: Loss):
    for seed, report in enumerate(reports(loss_fn)):
        assert report.passed, f"seed {seed}\n{report}"


@pytest.mark.parametrize("loss_fn", WRONG, ids=lambda f: f.__name__)
def test_wrong_losses_are_found(loss_fn: Loss):
    for seed, report in enumerate(reports(loss_fn)):
        found = "\n".join(report.findings)
        assert re.search(WRONG[loss_fn], found), f"seed {seed}\n{report}"
