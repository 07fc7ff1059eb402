"""The promises of the transformation about a window, one per test."""

import sys
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from constant_gradients import PARAMS, grads

from optax_tokenaccum import (
    TokenAccumulationState,
    close_window,
    has_updated,
    token_accumulation,
)


def new(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    optimizer = token_accumulation(*args, **kwargs)
    return optimizer, optimizer.init(PARAMS)


def test_window_divides_the_sum_once_and_the_mean_of_means_differs(maybe_jit: Any):
    optimizer, state = new(optax.sgd(1.0), 2)
    update = maybe_jit(optimizer.update)
    opened, state = update(grads(2.0), state, PARAMS, num_tokens=1)
    chex.assert_trees_all_equal(opened, grads(0.0))
    assert (int(state.mini_step), int(state.gradient_step)) == (1, 0)
    closed, state = update(grads(90.0), state, PARAMS, num_tokens=9)
    chex.assert_trees_all_equal(closed, grads(-9.2))  # figures from torchtitan
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    assert abs((2.0 / 1 + 90.0 / 9) / 2 - 9.2) > 0.01 * 9.2


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_jit_and_eager_agree_over_several_windows(k: int):
    micro_batches = [(grads(float(i * i - 7)), i % 4 + 1) for i in range(3 * k)]
    optimizer, state = new(optax.adam(0.1), k)
    eager = helpers.run_window(optimizer.update, state, PARAMS, micro_batches)
    jitted = helpers.run_window(jax.jit(optimizer.update), state, PARAMS, micro_batches)
    assert helpers.relative_error(jitted[0], eager[0]) < helpers.RTOL["float32"]
    assert int(jitted[1].gradient_step) == int(eager[1].gradient_step) == 3


def test_k_of_1_is_the_bare_optimizer():
    optimizer, state = new(optax.adamw(0.1), 1)
    bare = optax.adamw(0.1)
    bare_state, params = bare.init(PARAMS), PARAMS
    for scale in (1.0, -3.0, 0.2):
        updates, state = optimizer.update(grads(4 * scale), state, params, num_tokens=4)
        expected, bare_state = bare.update(grads(scale), bare_state, params)
        chex.assert_trees_all_equal(updates, expected)
        chex.assert_trees_all_equal(state.inner_opt_state, bare_state)
        params = optax.apply_updates(params, updates)


def test_first_micro_batch_overwrites_what_the_last_window_left():
    optimizer, state = new(optax.sgd(1.0), 1)
    poisoned = state._replace(
        acc_grads=grads(np.nan),
        acc_tokens=jnp.asarray(np.nan),
        acc_value=jnp.asarray(np.nan),
    )
    updates, state = optimizer.update(grads(6.0), poisoned, PARAMS, num_tokens=2)
    chex.assert_trees_all_equal(updates, grads(-3.0))


def test_inner_optimizer_does_not_run_on_an_open_window():
    runs: list[int] = []

    def count(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: runs.append(1))
        return updates, state + 1

    inner = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), count)
    optimizer, state = new(inner, 4)
    update = jax.jit(optimizer.update)
    for i in range(12):
        _, state = update(grads(1.0), state, PARAMS, num_tokens=1)
        jax.effects_barrier()
        assert len(runs) == int(state.inner_opt_state) == (i + 1) // 4


def test_schedule_of_k_follows_gradient_step():
    optimizer, state = new(optax.sgd(1.0), lambda step: jnp.where(step < 2, 1, 3))
    update = jax.jit(optimizer.update)
    closed = []
    for _ in range(8):
        _, state = update(grads(1.0), state, PARAMS, num_tokens=1)
        closed.append(bool(has_updated(state)))
    assert closed == [True, True, False, False, True, False, False, True]


def test_windows_that_never_close_by_themselves(maybe_jit: Any):
    for schedule in ({"every_k_schedule": sys.maxsize}, {"every_n_tokens": 10**12}):
        optimizer = token_accumulation(optax.sgd(1.0), **schedule)
        update, state = maybe_jit(optimizer.update), optimizer.init(PARAMS)
        for mini_step in (1, 2):
            _, state = update(grads(1.0), state, PARAMS, num_tokens=1e9)
            assert state.mini_step == mini_step
        _, state = close_window(optimizer, state, PARAMS)
        assert has_updated(state)


def test_line_search_is_given_the_gradient_of_the_window():
    """`grad` is the micro-batch's gradient, like the gradients and `value`."""

    def loss_fn(params: Any, batch: Any) -> Any:
        errors = (params * batch[0] - batch[1]) ** 2
        return jnp.sum(errors), errors.size

    def mean_fn(params: Any) -> Any:
        loss_sum, n = loss_fn(params, full)
        return loss_sum / n

    search = optax.scale_by_backtracking_linesearch(
        20, decrease_factor=0.9, slope_rtol=0.3
    )
    inner = optax.chain(optax.sgd(1.0), search)
    rng = np.random.default_rng(0)
    batches = [np.float32(rng.normal(size=(2, n))) + 2 for n in (1, 9, 2, 4)]
    full, params = np.concatenate(batches, axis=1), jnp.float32(0.0)
    value, grad = jax.value_and_grad(mean_fn)(params)
    given = {"value": value, "grad": grad, "value_fn": mean_fn}
    expected, _ = inner.update(grad, inner.init(params), params, **given)

    def last_update(optimizer: Any, gives_count: bool) -> Any:
        state = optimizer.init(params)
        for batch in batches:
            (value, n), grad = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
            if gives_count:
                given = {"num_tokens": n}
            else:
                value, grad, given = value / n, grad / n, {}
            given |= {"value": value, "grad": grad, "value_fn": mean_fn}
            update, state = optimizer.update(grad, state, params, **given)
        return update

    got = last_update(token_accumulation(inner, len(batches)), True)
    np.testing.assert_allclose(got, expected, rtol=helpers.RTOL["float32"])
    naive = last_update(optax.MultiSteps(inner, len(batches)), False)
    assert abs(naive / expected - 1) > 0.01


@pytest.mark.parametrize("budget", [10, np.int64(10), lambda _: 10], ids=type)
def test_token_budget_closes_on_the_micro_batch_that_reaches_it(
    budget: Any, maybe_jit: Any
):
    optimizer, state = new(optax.sgd(1.0), every_n_tokens=budget)
    update = maybe_jit(optimizer.update)
    closed = []
    for n in (4, 5, 1, 12, 9, 0, 3):
        updates, state = update(grads(2.0 * n), state, PARAMS, num_tokens=n)
        closed.append(bool(has_updated(state)))
        chex.assert_trees_all_equal(updates, grads(-2.0 if closed[-1] else 0.0))
    assert closed == [False, False, True, True, False, False, True]


def test_token_budget_does_not_close_on_the_tokens_of_the_last_window():
    """A rejection at the start of a window finds stale sums of over 10 tokens."""
    optimizer, state = new(
        optax.sgd(1.0), every_n_tokens=10, should_skip_update_fn=optax.skip_not_finite
    )
    _, state = optimizer.update(grads(1.0), state, PARAMS, num_tokens=12)
    updates, state = optimizer.update(grads(np.nan), state, PARAMS, num_tokens=3)
    assert (int(state.gradient_step), bool(has_updated(state))) == (1, False)
    chex.assert_trees_all_equal(updates, grads(0.0))


@pytest.mark.parametrize("flag", [bool, jnp.asarray], ids=["python", "traced"])
def test_close_window_closes_and_its_false_never_postpones(flag: Any, maybe_jit: Any):
    optimizer, state = new(optax.sgd(1.0), 2)
    update = maybe_jit(optimizer.update) if flag is jnp.asarray else optimizer.update
    asked = [False, False, True, False, False]
    closed = []
    for ask in asked:
        updates, state = update(
            grads(6.0), state, PARAMS, num_tokens=3, close_window=flag(ask)
        )
        closed.append(bool(has_updated(state)))
        chex.assert_trees_all_equal(updates, grads(-2.0 if closed[-1] else 0.0))
    assert closed == [False, True, True, False, True]


def test_without_a_schedule_the_caller_closes():
    optimizer, state = new(optax.sgd(1.0))
    for close in (False, False, True):
        updates, state = optimizer.update(
            grads(4.0), state, PARAMS, num_tokens=2, close_window=close
        )
    chex.assert_trees_all_equal(updates, grads(-2.0))
    with pytest.raises(ValueError, match="close_window=True or False to every update"):
        optimizer.update(grads(4.0), state, PARAMS, num_tokens=2)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf], ids=str)
def test_micro_batch_without_tokens_counts_and_adds_nothing(
    position: int, bad: float, maybe_jit: Any
):
    optimizer, state = new(optax.sgd(1.0), 3, gradients="mean")
    micro_batches = [(grads(2.0), 1), (grads(10.0), 9)]
    micro_batches.insert(position, (grads(bad), 0))
    params, state = helpers.run_window(
        maybe_jit(optimizer.update), state, PARAMS, micro_batches
    )
    expected = jax.tree.map(lambda p: p - np.float32(9.2), PARAMS)
    chex.assert_trees_all_equal(params, expected)
    assert int(state.gradient_step) == 1


@pytest.mark.parametrize("count", [-1, np.nan, np.inf, -np.inf, 1e39], ids=str)
def test_impossible_count_raises_concrete_and_adds_nothing_traced(count: float):
    optimizer, state = new(optax.sgd(1.0), 3)
    with pytest.raises(ValueError, match="must be finite, in float32, and at least 0"):
        optimizer.update(grads(1.0), state, PARAMS, num_tokens=count)
    micro_batches = [(grads(2.0), 1.0), (grads(7.0), float(count)), (grads(4.0), 2.0)]
    params, state = helpers.run_window(
        jax.jit(optimizer.update), state, PARAMS, micro_batches
    )
    chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p - 2.0, PARAMS))


def test_window_without_tokens_closes_without_an_update(maybe_jit: Any):
    optimizer, state = new(optax.adamw(0.1), 2)
    update = maybe_jit(optimizer.update)
    params, state = helpers.run_window(
        update, state, PARAMS, [(grads(np.nan), 0), (grads(np.nan), 0)]
    )
    chex.assert_trees_all_equal(params, PARAMS)
    chex.assert_trees_all_equal(
        state.inner_opt_state, optimizer.init(PARAMS).inner_opt_state
    )
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 0)
    assert not has_updated(state)
    params, state = helpers.run_window(
        update, state, params, [(grads(1.0), 1), (grads(1.0), 1)]
    )
    chex.assert_tree_all_finite((params, state))
    assert int(state.gradient_step) == 1


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_rejected_micro_batch_never_happened(
    position: int, gradients: Any, maybe_jit: Any
):
    optimizer, state = new(
        optax.adam(0.1),
        2,
        gradients=gradients,
        should_skip_update_fn=optax.skip_not_finite,
    )
    update = maybe_jit(optimizer.update)
    good = [(grads(float(i + 1)), i + 1) for i in range(4)]
    clean = helpers.run_window(update, state, PARAMS, good)
    spoilt = list(good)
    spoilt.insert(position, (grads(np.nan), 5))
    params, state = helpers.run_window(update, state, PARAMS, spoilt)
    chex.assert_trees_all_equal(params, clean[0])
    of_last_call = {"skip_state": (), "has_updated": ()}
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


def test_close_window_on_a_rejected_micro_batch_closes_with_what_is_there():
    optimizer, state = new(
        optax.sgd(1.0), 4, should_skip_update_fn=optax.skip_not_finite
    )
    _, state = optimizer.update(grads(6.0), state, PARAMS, num_tokens=3)
    updates, state = optimizer.update(
        grads(np.nan), state, PARAMS, num_tokens=3, close_window=True
    )
    chex.assert_trees_all_equal(updates, grads(-2.0))
    assert has_updated(state)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_value_reaches_inner_as_the_token_mean_of_the_window(gradients: Any):
    seen: list[float] = []

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        assert extra.keys() == {"value", "other"} and extra["other"] == "as it is"
        jax.debug.callback(lambda value: seen.append(float(value)), extra["value"])
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer, state = new(inner, 2, gradients=gradients)
    for mean, n in [(2.0, 1), (10.0, 9)]:
        value = mean * n if gradients == "sum" else mean
        _, state = optimizer.update(
            grads(1.0), state, PARAMS, num_tokens=n, value=value, other="as it is"
        )
    jax.effects_barrier()
    assert seen == [pytest.approx(9.2)]


def test_polyak_sgd_takes_the_step_of_the_full_batch():
    inner = optax.polyak_sgd(max_learning_rate=10.0)
    optimizer, state = new(inner, 2)
    for scale, n, loss_sum in [(2.0, 1, 4.0), (30.0, 15, 60.0)]:
        updates, state = jax.jit(optimizer.update)(
            grads(scale), state, PARAMS, num_tokens=n, value=loss_sum
        )
    expected, _ = inner.update(grads(2.0), inner.init(PARAMS), PARAMS, value=4.0)
    assert helpers.relative_error(updates, expected) < helpers.RTOL["float32"]
    with pytest.raises(TypeError, match="value"):
        optimizer.update(grads(1.0), state, PARAMS, num_tokens=1)


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: optax.chain(t)], ids=["alone", "chain"]
)
def test_close_window_uses_the_denominator_of_the_partial_window(
    wrap: Any, maybe_jit: Any
):
    optimizer = wrap(token_accumulation(optax.sgd(1.0), 8))
    close = maybe_jit(lambda state, params: close_window(optimizer, state, params))
    state = optimizer.init(PARAMS)
    untouched, state = close(state, PARAMS)
    chex.assert_trees_all_equal(untouched, grads(0.0))
    assert not has_updated(state)
    for scale, n in [(2.0, 1), (90.0, 9)]:
        _, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=n)
    updates, state = close(state, PARAMS)
    chex.assert_trees_all_equal(updates, grads(-9.2))
    assert has_updated(state)
    for _ in range(8):
        updates, state = optimizer.update(grads(6.0), state, PARAMS, num_tokens=3)
    chex.assert_trees_all_equal(updates, grads(-2.0))


def test_close_window_gives_inner_the_value_of_the_micro_batches():
    inner = optax.polyak_sgd(max_learning_rate=10.0)
    optimizer, state = new(inner, 8)
    _, state = optimizer.update(grads(8.0), state, PARAMS, num_tokens=4, value=12.0)
    updates, _ = close_window(optimizer, state, PARAMS)
    expected, _ = inner.update(grads(2.0), inner.init(PARAMS), PARAMS, value=3.0)
    assert helpers.relative_error(updates, expected) < helpers.RTOL["float32"]


def test_clipping_inside_sees_the_window():
    optimizer, state = new(optax.chain(optax.clip(1.0), optax.sgd(1.0)), 2)
    for scale in (-30.0, 32.0):
        updates, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=1)
    chex.assert_trees_all_equal(updates, grads(-1.0))  # clipped before: 0


def test_counts_may_be_any_kind_of_number():
    optimizer, state = new(optax.sgd(1.0), 1)
    update = jax.jit(optimizer.update)
    for n in (3, 3.0, np.int64(3), np.float32(3), jnp.asarray(3), jnp.asarray(3.0)):
        updates, _ = optimizer.update(grads(6.0), state, PARAMS, num_tokens=n)
        chex.assert_trees_all_equal(updates, grads(-2.0))
        updates, _ = update(grads(6.0), state, PARAMS, num_tokens=n)
        chex.assert_trees_all_equal(updates, grads(-2.0))


def test_state_fields_are_those_of_multi_steps_where_they_mean_the_same():
    fields = TokenAccumulationState._fields
    assert fields == (
        "mini_step",
        "gradient_step",
        "inner_opt_state",
        "acc_grads",
        "acc_tokens",
        "acc_value",
        "has_updated",
        "skip_state",
    )
    assert set(optax.MultiStepsState._fields) < set(fields)


def test_has_updated_finds_the_accumulation_however_deep():
    optimizer, before = new(optax.sgd(1.0), 1)
    _, after = optimizer.update(grads(1.0), before, PARAMS, num_tokens=1)
    for state, expected in ((before, False), (after, True)):
        deep = {"a": [(state, optax.adam(0.1).init(PARAMS))]}
        assert bool(has_updated(deep)) is expected
