"""Planned micro-batches hold their sequences, and padding."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import split_batch
from optax_tokenaccum.ragged import MicroBatchPlan, pad_micro_batch, plan_window

PAD_VALUES = {"ids": -1, "deep": (7, {"mask": False, "score": -2.0})}
PLAN = MicroBatchPlan(np.array([1, 0]), 3, 4)


def sequences_of(lengths: list[int]) -> list[Any]:
    """Return trees with two features per token, and a number per sequence."""
    random = np.random.default_rng(len(lengths))
    return [
        {
            "ids": random.integers(0, 99, n).astype(np.int32),
            "deep": (
                random.normal(size=(n, 2)).astype(np.float32),
                {"mask": random.random(n) < 0.5, "score": np.float32(index)},
            ),
        }
        for index, n in enumerate(lengths)
    ]


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(
    st.lists(st.integers(1, 16), min_size=1, max_size=20),
    st.sets(st.integers(1, 15), max_size=3).map(lambda found: sorted(found | {16})),
    st.integers(16, 64),
    st.sampled_from([1, 2, 3]),
)
# This plan ends with its longest shape, which holds the rest in the fewest tokens.
@hypothesis.example([1] * 6, [4, 16], 20, 1)
def test_every_sequence_stands_once_and_the_rest_is_padding(
    lengths: list[int], buckets: list[int], tokens: int, multiple: int
):
    sequences = sequences_of(lengths)
    cut: dict[str, Any] = {
        "max_tokens": tokens * multiple,
        "length_buckets": buckets,
        "batch_multiple": multiple,
    }
    plans = plan_window(lengths, **cut)
    assert repr(plan_window(np.array(lengths), **cut)) == repr(plans)
    found = []
    for plan in plans:
        assert plan.length in buckets and len(plan.indices)
        assert plan.num_rows == tokens * multiple // plan.length // multiple * multiple
        batch = pad_micro_batch(sequences, plan, pad_values=PAD_VALUES)
        assert jax.tree.structure(batch) == jax.tree.structure(sequences[0])
        assert batch["deep"][0].shape == (plan.num_rows, plan.length, 2)
        assert batch["deep"][1]["score"].shape == (plan.num_rows,)
        for row, index in enumerate(plan.indices):
            n = lengths[index]
            for array, values, pad in zip(
                *map(jax.tree.leaves, (batch, sequences[index], PAD_VALUES)),
                strict=True,
            ):
                assert array.dtype == values.dtype
                if values.ndim:
                    np.testing.assert_array_equal(array[row, :n], values)
                    assert (array[row, n:] == pad).all()
                else:
                    assert array[row] == values
        rows = len(plan.indices)
        for array, pad in zip(*map(jax.tree.leaves, (batch, PAD_VALUES)), strict=True):
            assert (array[rows:] == pad).all()
        scores = batch["deep"][1]["score"]
        found += scores[:rows].astype(int).tolist()
    assert sorted(found) == list(range(len(lengths)))


@pytest.mark.parametrize("x64", [False, True])
def test_leaves_are_numpy_arrays_of_the_dtypes_that_jax_keeps(x64: bool):
    sequences = [(np.ones(n), jnp.arange(n), n, n == 4) for n in (2, 4)]
    with jax.enable_x64(x64):
        found = pad_micro_batch(sequences, PLAN, pad_values=(0, 9, -1, True))
        kept = [jnp.asarray(x).dtype for x in sequences[0]]
    assert all(isinstance(x, np.ndarray) for x in found)
    assert [x.dtype for x in found] == kept
    ones, ids, number, flag = (x.tolist() for x in found)
    assert ones == [[1] * 4, [1, 1, 0, 0], [0] * 4]
    assert ids == [[0, 1, 2, 3], [0, 1, 9, 9], [9] * 4]
    assert (number, flag) == ([4, 2, -1], [True, False, True])


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("uint8", -1, False),
        ("int32", 100.5, False),
        ("int32", -100.0, True),
        ("float32", -np.inf, True),
        ("float32", 1e39, False),
        ("bfloat16", -1e9, True),
    ],
    ids=str,
)
def test_pad_values_fit_their_leaf_or_are_refused(dtype: str, value: Any, fits: bool):
    sequences = [np.zeros(n, jnp.dtype(dtype)) for n in (2, 4)]
    if not fits:
        with pytest.raises(ValueError, match="pad value of the root must fit its"):
            pad_micro_batch(sequences, PLAN, pad_values=value)
        return
    batch = pad_micro_batch(sequences, PLAN, pad_values=value)
    expected = np.asarray(value).astype(batch.dtype)
    np.testing.assert_array_equal(batch[2], np.full(4, expected))


@pytest.mark.parametrize(
    ("x", "fits"),
    [
        (np.array([2**31 - 1, -(2**31)]), True),
        (np.array([1, 2**40 + 7]), False),
        (np.array([-(2**63)]), False),
        (np.array([2**32], np.uint64), False),
        (np.array([1e-50, 0.1, np.inf, np.nan, 1e38]), True),
        (np.array([1e39]), False),
    ],
    ids=str,
)
def test_values_survive_the_dtype_that_jax_keeps_or_are_refused(x: Any, fits: bool):
    plan = MicroBatchPlan(np.array([0]), 1, 5)
    if fits:
        found = pad_micro_batch([{"x": x}], plan, pad_values=0)["x"]
        np.testing.assert_allclose(found[0, : len(x)], x, rtol=1e-6, atol=1e-40)
    else:
        with pytest.raises(ValueError, match=r"leaf \['x'\] of sequence 0 must fit"):
            pad_micro_batch([{"x": x}], plan, pad_values=0)
    with jax.enable_x64(True):
        found = pad_micro_batch([{"x": x}], plan, pad_values=0)["x"]
    np.testing.assert_array_equal(found[0, : len(x)], x)


def test_keys_are_padded_by_any_key():
    batch = {"key": jax.random.split(jax.random.key(0), 3), "x": np.ones(3)}
    found = split_batch(batch, 5, pad_values=0)
    assert found["key"].shape == found["x"].shape == (5, 1)
    assert (found["key"][:3, 0] == batch["key"]).all()
