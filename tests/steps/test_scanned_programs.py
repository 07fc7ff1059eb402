"""Gradients of random programs with scans are those of `jax.grad` in float64."""

import functools
from typing import Any

import hypothesis
import jax
import numpy as np
import optax
import pytest
import scanned_programs
import ways_in
from helpers import relative_error

from optax_tokenaccum import window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass

PARAMS = scanned_programs.params_of()
# The rows of a third of the window have no tokens.
BATCHES = [scanned_programs.batch_of(seed, n) for seed, n in enumerate((8, 0, 3))]
RATE = 2.0**10


def by_value_and_grad(program: Any) -> Any:
    micro_batches = jax.tree.map(lambda *leaves: np.stack(leaves), *BATCHES)
    traced = jax.jit(window_value_and_grad(program)).trace(PARAMS, micro_batches)
    # Without this, the test could pass on whole gradients alone.
    assert ("Ref{" in str(traced.jaxpr)) == BackwardPass.is_supported
    return traced.lower().compile()(PARAMS, micro_batches)[1]


def by_step(way: Any, program: Any) -> Any:
    run = way(program, optax.sgd(RATE), len(BATCHES))
    [after] = run(PARAMS, [BATCHES])
    return jax.tree.map(lambda a, b: (a - np.asarray(b)) / RATE, PARAMS, after)


def check(gradient_of: Any, examples: int) -> None:
    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],  # shrinking takes minutes
    )
    @hypothesis.given(scanned_programs.programs)
    def is_exact(program: scanned_programs.Program) -> None:
        expected = scanned_programs.exact(program, PARAMS, BATCHES)
        assert relative_error(gradient_of(program), expected) < 1e-4

    is_exact()


def test_any_program() -> None:
    check(by_value_and_grad, 20)


STEPS = {
    way.__name__: functools.partial(by_step, way)
    for way in (ways_in.train_step, ways_in.in_one_program, ways_in.window_step)
}


@pytest.mark.slow
@pytest.mark.parametrize("way", STEPS)
def test_any_program_in_every_way(way: str) -> None:
    check(STEPS[way], 30)
