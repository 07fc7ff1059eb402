"""Each promise once, over a cover of problems x ways x layouts x options.

The cover has every pair of these; `-m slow` has every problem, way and layout.
"""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import problems
import pytest
from problems import PARAMS, WINDOWS, K, Run

from optax_tokenaccum import make_train_step, make_window_step

SGD = optax.sgd(1.0)

COVER = [*problems.cover(problems.ALL)]
OTHERS = [x for x in problems.ALL if x not in COVER and x[-1] == "plain"]
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


CASES = [*map(case, COVER), *(case(x, True) for x in OTHERS)]


@pytest.fixture(scope="module", params=CASES)
def step(request: Any) -> Run:
    return problems.of_step(*request.param)


def only(*words: str) -> Any:
    """The cases with one of these problems or ways."""
    cases = [x for x in CASES if {*words} & {*x.values[0]}]
    return pytest.mark.parametrize("step", cases, indirect=True, scope="module")


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


def check_so_far(run: Run) -> None:
    expected = run.answer(0, K - 1).gradient
    assert helpers.relative_error(run.so_far, expected) < 3e-6


@only("two programs", "one program", "nnx two programs")
def test_the_gradient_so_far_is_that_of_the_open_window(step: Run):
    check_so_far(step)


@pytest.mark.parametrize(
    "loop",
    [case(x) for x in LOOPS if x[1] in ("transformation", "MultiSteps", "linen")],
    indirect=True,
    scope="module",
)
def test_the_gradient_so_far_is_in_any_state_of_an_optimizer(loop: Run):
    check_so_far(loop)


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
        weights = [batch["weights"] for batch in step.windows[i]]
        if step.name == "anchors":
            weights = [x > 0 for x in weights]
        so_far = np.cumsum([np.sum(x) for x in weights])
        rejected = [bool(m.skipped) for m in metrics]
        if "window" in step.way:
            assert rejected == [step.option == "skips"]
        else:
            where = i % K if step.option == "skips" else None
            assert rejected == [j == where for j in range(len(metrics))]
            counted = np.cumsum([not x for x in rejected])[:-1]
            assert [int(m.mini_step) for m in opening] == counted.tolist()
            tokens = np.append(0, so_far)[counted]
            np.testing.assert_allclose([m.num_tokens for m in opening], tokens)


@only("keys")
def test_keys_are_folded_with_the_update_the_micro_batch_and_the_device(step: Run):
    """As aux tells. A rejected micro-batch has a key of its own."""
    updates = 0
    for i, metrics in enumerate(step.metrics):
        devices = step.devices
        rows = problems.ROWS // devices
        keys = [
            [problems.key_of(updates, j, d, devices) for d in range(devices)]
            for j in range(K + (step.option == "skips"))
        ]
        masks = [[problems.drawn(key, rows) for key in x] for x in keys]
        expected = np.array(masks if devices > 1 else [mask for [mask] in masks])
        found = metrics[0].aux if "window" in step.way else [m.aux for m in metrics]
        np.testing.assert_array_equal(found, expected)
        updates += i not in EMPTY


@only("state")
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
    assert step.deleted == [{step.option != "kept"}] * len(WINDOWS)
    before, after = step.placements
    if step.layout == "8, no mesh":  # else the compiler may choose
        before, after = before[0], after[0]
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


def test_with_the_switch_every_gradient_is_added_after(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPTAX_TOKENACCUM_ADD_AFTER", "1")
    for case in COVER:
        if case[0] in ("layered", "anchors") and case[1] == "two programs":
            check_updates(problems.of_step.__wrapped__(*case))


@pytest.mark.parametrize("over", ["1", "8"])
@pytest.mark.parametrize("count", [-1.0, np.nan, np.inf])
def test_a_count_that_cannot_be_adds_nothing(count: float, over: str):
    """A micro-batch, or the first device, has it."""

    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = problems.linear_loss(params, batch)
        return loss_sum, jnp.where(batch["is_wrong"].any(), count, n)

    good, bad = (problems.batch_of(i, [1.0] * 8) for i in range(2))
    is_wrong = np.arange(8) == 0
    batches = [good | {"is_wrong": is_wrong & False}, bad | {"is_wrong": is_wrong}]
    step = make_train_step(loss_fn, SGD, 2, **meshes.over(over))
    state, _ = helpers.run_step(step, step.init(PARAMS), batches)
    rest = {name: x[1 if over == "8" else 8 :] for name, x in bad.items()}
    expected = problems.exact(PARAMS, good, rest)
    got = helpers.difference(PARAMS, state.params)
    assert helpers.relative_error(got, expected) < 3e-6
    assert helpers.relative_error(problems.exact(PARAMS, good, bad), expected) > 0.01


@pytest.mark.parametrize("make", [make_train_step, make_window_step])
def test_a_nan_shows_and_reaches_no_later_window(make: Any):
    """optax 0.2.8 resets sums by multiplying them by 0, which leaves a NaN."""
    good = problems.batch_of(0, [1.0] * 8)
    nan = good | {"y": np.full(8, np.nan, np.float32)}
    for inner, moves in ((SGD, False), (optax.apply_if_finite(SGD, 9), True)):
        of_window = make is make_window_step
        step = make(problems.linear_loss, inner, *([] if of_window else [1]))
        state = step.init(PARAMS)
        for batch in (nan, good):
            state, _ = step(state, helpers.stack([batch]) if of_window else batch)
        got = helpers.difference(PARAMS, state.params)
        if moves:
            assert helpers.relative_error(got, problems.exact(PARAMS, good)) < 3e-6
        else:
            assert np.isnan(got["w"]).all()


def test_a_skip_function_of_a_window_step_is_told_the_update():
    def skip(gradient: Any, gradient_step: Any, params: Any) -> Any:
        return gradient_step >= 1, ()

    step = make_window_step(problems.linear_loss, SGD, should_skip_update_fn=skip)
    state, window = step.init(PARAMS), helpers.stack([problems.batch_of(0, [1.0] * 8)])
    updated = []
    for _ in range(2):
        state, metrics = step(state, window)
        updated.append(bool(metrics.updated))
    assert updated == [True, False]


def test_a_window_step_keeps_two_things_between_calls_and_no_sums():
    adam = optax.adam(0.1)
    step = make_window_step(problems.linear_loss, adam)
    shapes, state = jax.eval_shape(step.init, PARAMS), step.init(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    chex.assert_trees_all_equal(state.opt_state.inner_opt_state, adam.init(PARAMS))
    assert state.opt_state._fields == ("gradient_step", "inner_opt_state")
    assert state.opt_state.gradient_step.shape == ()
