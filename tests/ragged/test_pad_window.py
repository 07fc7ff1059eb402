"""A planned window as arrays: nothing is lost, and shapes do not depend on the plan."""

import functools
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from ragged_windows import CUT, PADS, ragged_window

from optax_tokenaccum import PlannedWindow, pad_micro_batch, pad_window, plan_window


@pytest.mark.slow
@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 16), min_size=1, max_size=20),
    st.sets(st.integers(1, 15), max_size=3).map(lambda found: sorted(found | {16})),
    st.integers(16, 64),
    st.integers(0, 5),
    st.sampled_from([1, 2, 3]),
)
# This plan ends with its longest shape, which holds the rest in the fewest tokens.
@hypothesis.example([1] * 6, [4, 16], 20, 0, 1)
def test_every_micro_batch_of_the_plan_is_there_once(
    lengths: list[int], buckets: list[int], tokens: int, room: int, multiple: int
):
    random = np.random.default_rng(0)
    sequences = [
        (random.normal(size=(n, 2)).astype(np.float32), {"index": i})
        for i, n in enumerate(lengths)
    ]
    max_tokens, most = tokens * multiple, len(lengths) + room
    cut: dict[str, Any] = {
        "max_tokens": max_tokens,
        "length_buckets": buckets,
        "batch_multiple": multiple,
    }
    window = pad_window(sequences, pad_values=-1, max_sequences=most, **cut)
    assert [length for _, length in window.shapes] == buckets[::-1]
    assert window.capacity == -(-most // (max_tokens // 16 // multiple * multiple))
    assert window.counts.sum() <= window.capacity
    found, i = [], 0
    for shape, count in zip(window.shapes, window.counts, strict=True):
        for _ in range(count):
            batch = window.micro_batch(i, shape)
            found.append((shape, sorted(batch[1]["index"].tolist()), batch))
            i += 1
    for leaf in jax.tree.leaves(window.micro_batches):
        assert (leaf[i:] == -1).all(), "where there is no micro-batch, is padding"
    plans = plan_window(lengths, **cut)
    assert len(plans) == len(found)
    for plan in plans:
        expected = pad_micro_batch(sequences, plan, pad_values=-1)
        key = (plan.num_rows, plan.length), sorted(expected[1]["index"].tolist())
        (match,) = [batch for *k, batch in found if tuple(k) == key]
        chex.assert_trees_all_equal(match, expected)


def test_there_is_room_for_the_plan_that_needs_most():
    window = pad_window([np.ones(17)] * 7, pad_values=0, max_tokens=48)
    assert (window.capacity, window.counts.sum()) == (7, 7)  # the longest bucket is 32
    window = pad_window(
        [np.ones(16)] * 7, pad_values=0, max_tokens=48, length_buckets=[4, 16]
    )
    assert (window.capacity, window.counts.tolist()) == (3, [3, 0])


def test_the_window_is_a_tree_whose_shapes_do_not_depend_on_the_plan():
    windows = [
        pad_window(
            ragged_window(seed, rows)[1], pad_values=PADS, max_sequences=32, **CUT
        )
        for seed, rows in ((0, 32), (1, 9))
    ]
    first, second = (jax.eval_shape(lambda w: w, window) for window in windows)
    assert first.micro_batches == second.micro_batches
    assert jax.tree.structure(first) == jax.tree.structure(second)
    on_device = jax.device_put(windows[0])
    assert isinstance(on_device, PlannedWindow)
    chex.assert_trees_all_equal(on_device, windows[0])
    other = pad_window(
        ragged_window(0)[1], pad_values=PADS, max_tokens=128, length_buckets=[64]
    )
    assert jax.tree.structure(other) != jax.tree.structure(windows[0])


window_of = functools.partial(pad_window, pad_values=0, max_tokens=8)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            TypeError,
            "max_sequences must be an integer",
            lambda: window_of([np.ones(1)], max_sequences=2.0),
        ),
        (
            ValueError,
            "one of 9 tokens at index 1",
            lambda: window_of([np.ones(1), np.ones(9)]),
        ),
        (ValueError, "at least 1: got 0 at index 0", lambda: window_of([np.ones(0)])),
    ],
    ids=["no integer", "too long", "empty"],
)
def test_what_does_not_fit_is_named(error: type, message: str, call: Any):
    with pytest.raises(error, match=message):
        call()
