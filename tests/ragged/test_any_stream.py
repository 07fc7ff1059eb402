"""Random streams, bit for bit: window closes and rejections."""

from typing import Any, NamedTuple

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    TokenAccumulationState,
    make_train_step,
    make_window_step,
    token_accumulation,
)

pytestmark = pytest.mark.slow

PARAMS = {"w": jnp.array([0.5, -0.25, 1.0]), "b": jnp.array(0.125)}
INNER = optax.adamw(0.1)
MOST = 8

streams = st.lists(st.integers(1, 64), min_size=1, max_size=MOST)


class MicroBatch(NamedTuple):
    x: Any
    num_tokens: Any


def stream_of(counts: list[int]) -> list[MicroBatch]:
    """Return micro-batches with a different gradient at every position."""
    x = np.random.default_rng(0).normal(size=(len(counts), 4)).astype(np.float32)
    n = np.array(counts, np.float32)
    return [MicroBatch(*pair) for pair in zip(x * n[:, None], n, strict=True)]


def loss_fn(params: Any, batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
    flat = jnp.append(params["w"], params["b"])
    loss_sum = jnp.sum(flat * batch.x) + jnp.sum(flat**2) * batch.num_tokens
    return loss_sum, batch.num_tokens


gradient_of = jax.jit(jax.grad(loss_fn, has_aux=True))


def what_matters(tree: Any) -> Any:
    """Drop the sums of an empty window, and the last decision."""

    def of_node(node: Any) -> Any:
        if not isinstance(node, TokenAccumulationState):
            return node
        node = node._replace(skip_state=None, has_updated=None)
        if node.mini_step > 0:
            return node
        return node._replace(acc_grads=None, acc_tokens=None, acc_value=None)

    return jax.tree.map(
        of_node, tree, is_leaf=lambda x: isinstance(x, TokenAccumulationState)
    )


def assert_same(got: Any, expected: Any) -> None:
    chex.assert_trees_all_equal(what_matters(got), what_matters(expected))


def run_transformation(
    optimizer: Any, stream: list[MicroBatch], closes: list[Any]
) -> list[Any]:
    """Return parameters and state after every micro-batch."""
    params, state, passed = PARAMS, optimizer.init(PARAMS), []
    for batch, flag in zip(stream, closes, strict=True):
        gradient, n = gradient_of(params, batch)
        updates, state = optimizer.update(
            gradient, state, params, num_tokens=n, close_window=flag
        )
        params = optax.apply_updates(params, updates)
        passed.append((params, state))
    return passed


def run_step(step: Any, stream: list[MicroBatch]) -> tuple[Any, list[Any]]:
    state, metrics = step.init(PARAMS), []
    for batch in stream:
        state, metric = step(state, batch)
        metrics.append(metric)
    return state, metrics


def run_halves(stream: list[MicroBatch], ends: list[bool]) -> tuple[Any, list[Any]]:
    state, metrics = HALVES.init(PARAMS), []
    for batch, is_last in zip(stream, ends, strict=True):
        state, metric = HALVES.accumulate(state, batch)
        if is_last:
            state, metric = HALVES.close_window(state)
        metrics.append(metric)
    return state, metrics


def run_window_step(step: Any, stream: list[MicroBatch]) -> tuple[Any, Any]:
    """Run the stream as one window, followed by NaNs that must never be read."""
    unread = [MicroBatch(np.full(4, np.nan, np.float32), np.float32(1))]
    padded = helpers.stack(stream + unread * (MOST - len(stream)))
    return step(step.init(PARAMS), padded, num_micro_batches=len(stream))


HALVES = make_train_step(loss_fn, INNER)


# Windows that close at the same place.


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(streams, st.lists(st.booleans(), min_size=MOST, max_size=MOST))
def test_k_token_budget_and_close_window_agree_where_they_close_at_the_same_place(
    counts: list[int], flags: list[bool]
):
    closes = [*flags[: len(counts) - 1], True]
    windows = np.split(counts, np.flatnonzero(closes)[:-1] + 1)
    sizes = jnp.array([len(window) for window in windows])
    budgets = jnp.array([window.sum() for window in windows])
    ways = [
        (token_accumulation(INNER), closes),
        (token_accumulation(INNER, 99), closes),
        (token_accumulation(INNER, lambda i: sizes[i]), [None] * len(counts)),
        (
            token_accumulation(INNER, every_n_tokens=lambda i: budgets[i]),
            [None] * len(counts),
        ),
    ]
    stream = stream_of(counts)
    first, *others = [run_transformation(tx, stream, flags) for tx, flags in ways]
    for other in others:
        assert_same(other, first)
    assert [bool(state.has_updated) for _, state in first] == closes
    halves, _ = run_halves(stream, closes)
    error = helpers.relative_error(halves.params, first[-1][0])
    assert error < helpers.RTOL["float32"]


# Rejected micro-batches.


def with_bad(
    counts: list[int], bad: list[bool]
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Return a stream with NaN micro-batches, and the stream without these."""
    pairs = list(zip(stream_of(counts), bad, strict=False))
    stream = [
        batch._replace(x=batch.x * np.float32(np.nan)) if is_bad else batch
        for batch, is_bad in pairs
    ]
    return stream, [batch for batch, is_bad in pairs if not is_bad]


SKIP: Any = {"should_skip_update_fn": optax.skip_not_finite}
SKIPPING = token_accumulation(INNER, 3, **SKIP)
SKIPPING_STEP = make_train_step(loss_fn, INNER, 3, **SKIP)
SKIPPING_WINDOW_STEP = make_window_step(loss_fn, INNER, **SKIP)
which_bad = st.lists(st.booleans(), min_size=MOST, max_size=MOST)


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(streams, which_bad)
def test_a_rejected_micro_batch_anywhere_leaves_the_state_of_a_run_that_never_saw_it(
    counts: list[int], bad: list[bool]
):
    stream, good = with_bad(counts, bad)
    hypothesis.assume(good)
    seen = run_transformation(SKIPPING, stream, [None] * len(stream))
    unseen = run_transformation(SKIPPING, good, [None] * len(good))
    assert_same(seen[-1], unseen[-1])

    state, metrics = run_step(SKIPPING_STEP, stream)
    expected, expected_metrics = run_step(SKIPPING_STEP, good)
    assert_same(state, expected)
    chex.assert_trees_all_equal([m for m in metrics if not m.skipped], expected_metrics)
    assert [bool(m.skipped) for m in metrics] == bad[: len(stream)]

    state, metrics = run_window_step(SKIPPING_WINDOW_STEP, stream)
    expected, expected_metrics = run_window_step(SKIPPING_WINDOW_STEP, good)
    chex.assert_trees_all_equal(state, expected)
    assert metrics.skipped == any(bad[: len(stream)])
    chex.assert_trees_all_equal(
        metrics._replace(skipped=None), expected_metrics._replace(skipped=None)
    )


def test_without_a_skip_function_the_same_stream_is_lost():
    stream, _ = with_bad([3, 5, 7], [False, True, False])
    state, _ = run_step(make_train_step(loss_fn, INNER, 3), stream)
    assert not np.isfinite(state.params["w"]).any()
