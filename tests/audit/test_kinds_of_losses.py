"""`check_loss_fn` passes every kind of right loss and finds the wrong ones."""

import re

import jax
import pytest
from kinds_of_losses import RIGHT, WRONG, Loss, problems

from optax_tokenaccum import LossReport, check_loss_fn

pytestmark = pytest.mark.slow

SEEDS = range(20)


def reports(loss_fn: Loss) -> list[LossReport]:
    jitted = jax.jit(loss_fn)  # compiled once
    return [
        check_loss_fn(jitted, params, [batch])
        for params, batch in problems(loss_fn, SEEDS)
    ]


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
