"""Each promise once, over a cover of problems x ways x layouts x options.

The cover has every pair of these; `-m slow` runs every other combination.
"""

from typing import Any

import chex
import helpers
import jax
import numpy as np
import problems
import pytest
from problems import WINDOWS, K, Run

COVER = [*problems.cover(problems.ALL)]
OTHERS = [x for x in problems.ALL if x not in COVER]
LOOPS = [
    (name, way)
    for way in problems.LOOPS
    for name, problem in problems.PROBLEMS.items()
    if not problem.key and problem.state is None
    # The mean of a micro-batch without tokens is 0/0, whatever its loss.
    if not (problem.real and way in ("MultiSteps", "function of means"))
]
EMPTY = [i for i, x in enumerate(WINDOWS) if not any(x)]


def case(x: tuple[str, ...], slow: bool = False) -> Any:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(x, id="-".join(x), marks=marks)


@pytest.fixture(
    scope="module",
    params=[*map(case, COVER), *(case(x, True) for x in OTHERS)],
)
def step(request: Any) -> Run:
    return problems.of_step(*request.param)


@pytest.fixture(scope="module", params=map(case, LOOPS))
def loop(request: Any) -> Run:
    return problems.of_loop(*request.param)


def check_updates(run: Run) -> None:
    """Of each window: the gradient in float64, and what the optimizer is told of it."""
    runs = 0
    for i in range(len(WINDOWS)):
        expected, inner = run.answer(i), run.inner[i + 1]
        before, after = run.params[i : i + 2]
        if i in EMPTY:
            chex.assert_trees_all_equal((after, inner), (before, run.inner[i]))
            continue
        runs += 1
        error = helpers.relative_error(inner["gradient"], expected.gradient)
        assert error < 3e-6, (i, error)
        moved = jax.tree.map(
            lambda p, g: p - problems.RATE * g, before, inner["gradient"]
        )
        chex.assert_trees_all_close(after, moved, rtol=1e-6, atol=1e-6)
        told = runs, expected.tokens, expected.loss
        np.testing.assert_allclose(inner["given"], told, rtol=1e-5)


def test_a_step_gives_the_update_of_all_tokens_once_a_window(step: Run):
    check_updates(step)


def test_a_loop_gives_the_update_of_all_tokens_once_a_window(loop: Run):
    check_updates(loop)


def test_sums_are_zeros_between_windows(step: Run):
    assert not any(np.any(x) for x in jax.tree.leaves(step.sums))


def test_sums_of_loops_are_zeros_between_windows(loop: Run):
    assert not any(np.any(x) for x in jax.tree.leaves(loop.sums))


def test_metrics_describe_the_window(step: Run):
    updates = 0
    for i, metrics in enumerate(step.metrics):
        *opening, last = metrics
        expected = step.answer(i)
        updates += i not in EMPTY
        assert (last.updated, last.mini_step) == (i not in EMPTY, 0)
        assert last.gradient_step == updates
        np.testing.assert_allclose(last.num_tokens, expected.tokens, rtol=1e-6)
        np.testing.assert_allclose(last.loss, expected.loss, rtol=1e-5)
        norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(expected.gradient)))
        np.testing.assert_allclose(last.grad_norm, norm, rtol=1e-5)
        assert not any(m.updated or m.grad_norm for m in opening)
        rejected = [bool(m.skipped) for m in metrics]
        if "window" in step.way:
            assert rejected == [step.option == "skips"]
        else:
            where = i % K if step.option == "skips" else None
            assert rejected == [j == where for j in range(len(metrics))]
            counted = np.cumsum([not x for x in rejected])[:-1]
            assert [int(m.mini_step) for m in opening] == counted.tolist()


def test_a_model_state_is_that_of_a_loop_without_rejected_micro_batches(step: Run):
    for i, state in enumerate(step.states[1:]):
        expected = step.answer(i).state
        assert state["calls"] == expected["calls"] == K * (i + 1)
        for name in ("mean", "var"):
            assert helpers.relative_error(state[name], expected[name]) < 2e-6


def test_programs_are_compiled_once(step: Run):
    # The host knows k, unless micro-batches may be rejected.
    two = step.way.endswith("two programs") and step.option != "skips"
    first, *others = step.compilations
    assert not any(others)
    # The first call of a new model also makes the zeros of its sums.
    assert first == 1 + two or (step.way.startswith("nnx") and first > 1 + two)


def test_the_state_is_updated_in_place_and_stays_where_it_is(step: Run):
    assert step.deleted == [step.option != "kept"] * len(WINDOWS)
    before, after = step.placements
    named = jax.tree_util.tree_leaves_with_path(before)
    for (path, x), y in zip(named, jax.tree.leaves(after), strict=True):
        assert x == y or x.is_equivalent_to(y, 3), path
    chex.assert_trees_all_equal(step.given, problems.PROBLEMS[step.name].params)


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_a_mean_of_means_is_another_gradient(name: str):
    problem = problems.PROBLEMS[name]
    for window, tokens in zip(problems.windows_of(problem), WINDOWS, strict=True):
        params, state = problem.params, problem.state
        exact = problems.answer(name, params, state, window, 0).gradient
        means = [
            problems.answer(name, params, state, [batch], 0).gradient
            for batch, n in zip(window, tokens, strict=True)
            if n
        ]
        if means:
            naive = jax.tree.map(lambda *g: sum(g) / len(g), *means)
            assert helpers.relative_error(naive, exact) > 0.01
