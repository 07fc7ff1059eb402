"""A planned micro-batch holds its sequences, and padding without weight."""

from typing import Any

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import MicroBatchPlan, pad_micro_batch, plan_window

PADS = {"ids": -1, "deep": (7, {"mask": False, "score": -2.0})}


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


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 16), min_size=1, max_size=20),
    st.sets(st.integers(1, 15), max_size=3).map(lambda found: sorted(found | {16})),
    st.integers(16, 64),
)
def test_every_sequence_stands_once_and_the_rest_is_padding(
    lengths: list[int], buckets: list[int], max_tokens: int
):
    sequences = sequences_of(lengths)
    plans = plan_window(lengths, max_tokens=max_tokens, length_buckets=buckets)
    found = []
    for plan in plans:
        batch = pad_micro_batch(sequences, plan, pad_values=PADS)
        assert jax.tree.structure(batch) == jax.tree.structure(sequences[0])
        assert batch["ids"].shape == (plan.num_rows, plan.length)
        assert batch["deep"][0].shape == (plan.num_rows, plan.length, 2)
        assert batch["deep"][1]["score"].shape == (plan.num_rows,)
        for row, index in enumerate(plan.indices):
            n = lengths[index]
            expected = sequences[index]
            for array, values, pad in zip(
                *map(jax.tree.leaves, (batch, expected, PADS)), strict=True
            ):
                assert array.dtype == values.dtype
                if values.ndim:
                    np.testing.assert_array_equal(array[row, :n], values)
                    assert (array[row, n:] == pad).all()
                else:
                    assert array[row] == values
        rows = len(plan.indices)
        for array, pad in zip(*map(jax.tree.leaves, (batch, PADS)), strict=True):
            assert (array[rows:] == pad).all()
        found += batch["deep"][1]["score"][:rows].astype(int).tolist()
    assert sorted(found) == list(range(len(lengths)))


PLAN = MicroBatchPlan(np.array([1, 0]), 3, 4)


@pytest.mark.parametrize("x64", [False, True], ids=["default", "x64"])
@pytest.mark.parametrize("dtype", ["int64", "float64", "uint8", "bool", "bfloat16"])
def test_dtypes_are_those_that_jax_keeps(dtype: str, x64: bool):
    sequences = [np.ones(n, jnp.dtype(dtype)) for n in (2, 4)]
    with jax.enable_x64(x64):
        batch = pad_micro_batch(sequences, PLAN, pad_values=0)
        assert isinstance(batch, np.ndarray)
        assert batch.dtype == jnp.asarray(sequences[0]).dtype
    assert batch.astype(int).tolist() == [[1] * 4, [1, 1, 0, 0], [0] * 4]


def test_python_numbers_and_jax_arrays_are_leaves():
    sequences = [(jnp.arange(2), 3, True), (jnp.arange(4), 5, False)]
    ids, number, flag = pad_micro_batch(sequences, PLAN, pad_values=(9, -1, True))
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 9, 9], [9] * 4]
    assert (number.dtype, number.tolist()) == (np.int32, [5, 3, -1])
    assert (flag.dtype, flag.tolist()) == (np.bool_, [False, True, True])


def test_a_plan_without_sequences_has_the_shapes_of_its_micro_batch():
    shapes = [(2, 8), (4, 4)]
    for num_rows, length in shapes:
        plan = MicroBatchPlan(np.array([], int), num_rows, length)
        batch = pad_micro_batch(sequences_of([9]), plan, pad_values=PADS)
        assert batch["ids"].shape == (num_rows, length)
        assert not batch["deep"][1]["mask"].any()


@pytest.mark.parametrize("weigh", ["mask", "ignore_index"])
def test_padding_weighs_nothing_where_the_loss_is_told_and_much_where_not(weigh: str):
    params = helpers.init_params(0)
    batch = helpers.ragged_batch(0)
    lengths = batch["mask"].sum(1)
    plan = plan_window(lengths, max_tokens=3 * 64, length_buckets=[64])[-1]
    assert len(plan.indices) < plan.num_rows, "there must be a missing row"
    keys = ["tokens", "labels", *(["mask"] if weigh == "mask" else [])]
    sequences = [
        {key: batch[key][row, :n] for key in keys} for row, n in enumerate(lengths)
    ]

    def count(pad_values: Any) -> tuple[float, float]:
        padded = pad_micro_batch(sequences, plan, pad_values=pad_values)
        loss_sum, n = helpers.softmax_cross_entropy_sum(
            helpers.logits_of(params, padded["tokens"]),
            padded["labels"],
            padded.get("mask"),
            ignore_index=-100,
        )
        return float(loss_sum), float(n)

    right = {"tokens": 0, "labels": -100}
    wrong = {"tokens": 0, "labels": 0}
    if weigh == "mask":
        right = {"tokens": 0, "labels": 0, "mask": False}
        wrong |= {"mask": True}
    expected = helpers.loss_sum_fn(
        params, {key: batch[key][plan.indices] for key in batch}
    )
    np.testing.assert_allclose(count(right), expected, rtol=1e-6)
    assert count(wrong)[1] == plan.num_rows * plan.length > 1.2 * float(expected[1])


def ids(*lengths: int) -> list[Any]:
    return [{"ids": np.arange(n)} for n in lengths]


def pad(sequences: Any, plan: Any = PLAN, pad_values: Any = 0) -> Any:
    return pad_micro_batch(sequences, plan, pad_values=pad_values)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "list of sequences.*got map", lambda: pad(map(int, "12"))),
        (
            ValueError,
            r"at \['ids'\] expected int32\[length\], got float64 of shape \(4,\) at "
            "index 1",
            lambda: pad([*ids(2), {"ids": np.ones(4)}]),
        ),
        (
            ValueError,
            r"at \['ids'\] expected int32\[length\], got int64 of shape \(4, 1\)",
            lambda: pad([*ids(2), {"ids": np.ones((4, 1), np.int64)}]),
        ),
        (
            ValueError,
            r"at \['n'\] expected int32, got float64 of shape \(1,\) at index 1",
            lambda: pad(
                [{"ids": np.arange(2), "n": 1}, {"ids": np.arange(2), "n": np.ones(1)}]
            ),
        ),
        (
            ValueError,
            r"the leaves \['ids'\], and pad_values for \['mask'\]",
            lambda: pad(ids(2, 4), pad_values={"mask": 0}),
        ),
        (
            TypeError,
            "must be a number.*'ids'",
            lambda: pad(ids(2, 4), pad_values={"ids": np.zeros(2)}),
        ),
        (ValueError, "pad_values must be", lambda: pad(ids(2, 4), pad_values=None)),
    ],
    ids=[
        "an iterator",
        "dtype",
        "features",
        "scalar",
        "prefix",
        "array as pad",
        "None as pad",
    ],
)
def test_what_does_not_fit_is_named(error: type, message: str, call: Any):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("bool", 0, True),
        ("bool", 1.0, True),
        ("bool", -100, False),
        ("uint8", -1, False),
        ("uint8", 255, True),
        ("int32", 2**31, False),
        ("int32", 0.5, False),
        ("int32", np.nan, False),
        ("int32", -100.0, True),
        ("int32", True, True),
        ("float32", np.nan, True),
        ("float32", -np.inf, True),
        ("float32", 0.1, True),
        ("float32", 1e39, False),
        ("float32", 1j, False),
        ("bfloat16", -1e9, True),
        ("float16", 1e5, False),
        ("complex64", 1j, True),
    ],
    ids=str,
)
def test_pad_values_fit_their_leaf_or_are_refused(dtype: str, value: Any, fits: bool):
    sequences = [np.zeros(n, jnp.dtype(dtype)) for n in (2, 4)]
    if fits:
        batch = pad(sequences, pad_values=value)
        expected = np.asarray(value).astype(batch.dtype)
        np.testing.assert_array_equal(batch[2], np.full(4, expected))
        return
    with pytest.raises(ValueError, match="must fit the dtype.*for the root of"):
        pad(sequences, pad_values=value)
