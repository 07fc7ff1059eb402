"""The promises of the transformation about a window, one per test."""

import sys
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
from helpers import PARAMS, SKIPS, grads

from optax_tokenaccum import (
    close_window,
    has_updated,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_gradient,
)

SGD = optax.sgd(1.0)


def new(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    optimizer = token_accumulation(*args, **kwargs)
    return optimizer, optimizer.init(PARAMS)


def test_window_divides_the_sum_once_and_the_mean_of_means_differs():
    optimizer, state = new(optax.sgd(1.0), 2)
    update = jax.jit(optimizer.update)
    opened, state = update(grads(2.0), state, PARAMS, num_tokens=1)
    chex.assert_trees_all_equal(opened, grads(0.0))
    assert (int(state.mini_step), int(state.gradient_step)) == (1, 0)
    closed, state = update(grads(90.0), state, PARAMS, num_tokens=9)
    chex.assert_trees_all_equal(closed, grads(-9.2))  # figures from torchtitan
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    assert abs((2.0 / 1 + 90.0 / 9) / 2 - 9.2) > 0.01 * 9.2
    for n in (3, 3.0, np.int64(3), np.float32(3), jnp.asarray(3)):  # any number
        _, state = update(grads(6.0), state, PARAMS, num_tokens=n)
        updates, state = close_window(optimizer, state, PARAMS)
        chex.assert_trees_all_equal(updates, grads(-2.0))


def spy() -> tuple[Any, list[Any]]:
    """An inner optimizer that counts its runs, and what it was given in each of them.

    In this order: the gradient of the bias, and the extra arguments `value`, `grad` and
    `num_tokens`.
    """
    seen: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        assert extra.keys() <= {"value", "grad", "num_tokens", "other"}
        assert extra.get("other", "as it is") == "as it is"
        grad = extra.get("grad", {}).get("b")
        given = updates["b"], extra.get("value"), grad, extra["num_tokens"]
        jax.debug.callback(lambda *given: seen.append(jax.device_get(given)), *given)
        return updates, state + 1

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32)

    return optax.GradientTransformationExtraArgs(init, update), seen


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_inner_runs_once_a_window_on_its_means(gradients: Any):
    """`value` and `grad` are a sum or a mean like the gradients, for line searches."""
    inner, seen = spy()
    optimizer, state = new(inner, 2, gradients=gradients)
    for runs in range(2):
        for mean, n in [(2.0, 1), (10.0, 9)]:
            assert len(seen) == int(state.inner_opt_state) == runs
            given = mean * n if gradients == "sum" else mean
            _, state = optimizer.update(
                grads(given),
                state,
                PARAMS,
                num_tokens=n,
                value=2 * given,
                grad=grads(given),
                other="as it is",
            )
            jax.effects_barrier()
    np.testing.assert_allclose(seen, [(9.2, 18.4, 9.2, 10.0)] * 2, rtol=1e-6)
    # A window that is closed early has the value of its micro-batches.
    given = 3.0 if gradients == "mean" else 12.0
    _, state = optimizer.update(grads(given), state, PARAMS, num_tokens=4, value=given)
    close_window(optimizer, state, PARAMS)
    jax.effects_barrier()
    assert seen[-1][:2] == (3.0, 3.0)


@pytest.mark.parametrize(
    ("schedule", "counts", "expected"),
    [
        ({"every_k_schedule": lambda i: jnp.where(i < 2, 1, 3)}, [1] * 8, "11001001"),
        ({"every_n_tokens": 10}, [4, 5, 1, 12, 9, 0, 3], "0011001"),
        ({"every_n_tokens": np.int64(10)}, [4, 5, 1, 12], "0011"),
        ({"every_n_tokens": lambda i: 10 + i}, [4, 5, 1, 12, 9, 0, 3], "0011001"),
        ({"every_k_schedule": sys.maxsize}, [1e9] * 3, "000"),
        ({"every_n_tokens": 10**12}, [1e9] * 3, "000"),
        ({"every_k_schedule": lambda i: np.int64(2**40)}, [1e9] * 3, "000"),
        ({"every_n_tokens": lambda i: np.uint64(2**63)}, [1e9] * 3, "000"),
    ],
)
def test_windows_close_as_scheduled(schedule: Any, counts: Any, expected: str):
    optimizer, state = new(optax.sgd(1.0), **schedule)
    update = jax.jit(optimizer.update)
    for n, closes in zip(counts, map(int, expected), strict=True):
        updates, state = update(grads(2.0 * n), state, PARAMS, num_tokens=n)
        assert has_updated(state) == closes
        chex.assert_trees_all_equal(updates, grads(-2.0 * closes))
    _, state = close_window(optimizer, state, PARAMS)
    assert has_updated(state) == (expected[-1] == "0")


@pytest.mark.parametrize("flag", [bool, jnp.asarray], ids=["python", "traced"])
def test_close_window_closes_and_its_false_never_postpones(flag: Any):
    optimizer, state = new(optax.sgd(1.0), 2, **SKIPS)
    update = jax.jit(optimizer.update) if flag is jnp.asarray else optimizer.update
    closed = []
    for scale, ask in [(6, 0), (6, 0), (6, 1), (6, 0), (np.nan, 1), (6, 0), (6, 0)]:
        updates, state = update(
            grads(scale), state, PARAMS, num_tokens=3, close_window=flag(bool(ask))
        )
        closed.append(bool(has_updated(state)))
        chex.assert_trees_all_equal(updates, grads(-2.0 if closed[-1] else 0.0))
    # A rejected micro-batch closes the window with what is there.
    assert closed == [False, True, True, False, True, False, True]


def test_without_a_schedule_the_caller_closes():
    optimizer, state = new(optax.sgd(1.0))
    for close in (False, False, True):
        updates, state = optimizer.update(
            grads(4.0), state, PARAMS, num_tokens=2, close_window=close
        )
    chex.assert_trees_all_equal(updates, grads(-2.0))
    with pytest.raises(ValueError, match="close_window=True or False to every update"):
        optimizer.update(grads(4.0), state, PARAMS, num_tokens=2)


def test_impossible_count_raises_concrete_and_adds_nothing_traced():
    optimizer, start = new(optax.sgd(1.0), 3)
    update = jax.jit(optimizer.update)
    for count in (-1, np.nan, np.inf, -np.inf, 1e39):
        with pytest.raises(ValueError, match="be finite, in float32, and at least 0"):
            optimizer.update(grads(1.0), start, PARAMS, num_tokens=count)
        counts = 1.0, float(count), 2.0
        micro_batches = list(zip(map(grads, (2.0, 7.0, 4.0)), counts, strict=True))
        params, _ = helpers.run_window(update, start, PARAMS, micro_batches)
        chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p - 2.0, PARAMS))


def test_rejected_micro_batch_never_happened():
    optimizer, start = new(optax.adam(0.1), 2, gradients="mean", **SKIPS)
    update = jax.jit(optimizer.update)
    good = [(grads(float(i + 1)), i + 1) for i in range(4)]
    clean = helpers.run_window(update, start, PARAMS, good)
    of_last_call = {"skip_state": (), "has_updated": ()}
    for position in range(5):
        spoilt = list(good)
        spoilt.insert(position, (grads(np.nan), 5))
        params, state = helpers.run_window(update, start, PARAMS, spoilt)
        chex.assert_trees_all_equal(params, clean[0])
        chex.assert_trees_all_equal(
            state._replace(**of_last_call), clean[1]._replace(**of_last_call)
        )


def test_skip_function_sees_the_mean_and_is_not_asked_without_tokens():
    """A threshold on the norm means the same for 1 token and for 100."""
    seen: list[float] = []

    def skip(updates: Any, gradient_step: Any, params: Any) -> Any:
        seen.append(float(updates["b"]))
        return updates["b"] > 5.0, updates["b"]

    optimizer, state = new(optax.sgd(1.0), 9, should_skip_update_fn=skip)
    for scale, n in [(3.0, 1), (300.0, 100), (60.0, 10), (99.0, 0)]:
        _, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=n)
    assert seen[1:4] == [3.0, 3.0, 6.0]
    assert int(state.mini_step) == 3  # the third was rejected; the fourth counts
    assert float(state.skip_state) == 6.0  # kept from the third


def test_close_window_uses_the_denominator_of_the_partial_window():
    optimizer = optax.chain(token_accumulation(optax.sgd(1.0), 8))
    close = jax.jit(lambda state, params: close_window(optimizer, state, params))
    state = optimizer.init(PARAMS)
    untouched, state = close(state, PARAMS)
    chex.assert_trees_all_equal(untouched, grads(0.0))
    assert not has_updated(state)
    for scale, n in [(2.0, 1), (90.0, 9)]:
        _, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=n)
    updates, state = close(state, PARAMS)
    chex.assert_trees_all_equal(updates, grads(-9.2))
    assert has_updated({"a": [state, optax.adam(0.1).init(PARAMS)]})  # however deep
    for _ in range(8):
        updates, state = optimizer.update(grads(6.0), state, PARAMS, num_tokens=3)
    chex.assert_trees_all_equal(updates, grads(-2.0))


def test_window_gradient_of_states_without_an_open_window():
    with pytest.raises(ValueError, match="got 0 in a"):
        window_gradient(SGD.init(PARAMS))
    step = make_window_step(problems.linear_loss, SGD)
    with pytest.raises(ValueError, match="got that of a window step"):
        window_gradient(step.init(problems.PARAMS))
    train = make_train_step(problems.linear_loss, SGD, 4, **meshes.over("8"))
    with pytest.raises(ValueError, match="needs the parameters"):
        window_gradient(
            train.init(problems.PARAMS).opt_state
        )  # whose sums are of each device
    none_yet = window_gradient(token_accumulation(SGD, 2).init(jnp.ones(3)))
    np.testing.assert_array_equal(none_yet, np.zeros(3))
