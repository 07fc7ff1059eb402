"""`split_batch` fills up rows that k does not divide."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import split_batch, window_value_and_grad


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("rows", [1, 5, 6, 7])
def test_missing_rows_hold_the_pad_values(xp: Any, rows: int):
    batch = {
        "x": xp.arange(2.0 * rows).reshape(rows, 2),
        "labels": xp.arange(rows, dtype=np.int32),
        "mask": xp.ones(rows, bool),
    }
    pads = {"x": 0, "labels": -100, "mask": False}
    split = split_batch(batch, 3, pad_values=pads)
    size = -(-rows // 3)
    for name, leaf in split.items():
        assert isinstance(leaf, type(batch[name]))
        assert leaf.dtype == batch[name].dtype
        assert leaf.shape[:2] == (3, size)
        back = np.swapaxes(leaf, 0, 1).reshape(3 * size, *leaf.shape[2:])
        np.testing.assert_array_equal(back[:rows], batch[name])
        assert (back[rows:] == pads[name]).all()


def test_pad_values_change_nothing_where_k_divides_the_rows():
    batch = np.arange(6)
    np.testing.assert_array_equal(
        split_batch(batch, 2, pad_values=-1), split_batch(batch, 2)
    )


@pytest.mark.parametrize(
    ("pad", "error"), [(0.5, ValueError), (None, ValueError), ("x", TypeError)]
)
def test_a_pad_value_that_a_leaf_cannot_hold(pad: Any, error: Any):
    with pytest.raises(error):
        split_batch({"labels": np.arange(5)}, 2, pad_values={"labels": pad})


def test_a_window_of_any_number_of_rows_is_the_full_batch():
    params = helpers.init_params(0)
    window = jax.tree.map(lambda x: x[:-3], helpers.ragged_batch(0))
    rows = len(window["mask"])
    assert rows % 4
    gradient = jax.jit(window_value_and_grad(helpers.loss_sum_fn))
    (_, (num_tokens, _)), got = gradient(params, split_batch(window, 4, pad_values=0))
    exact = helpers.float64_gradient(params, window)
    assert helpers.relative_error(got, exact) < helpers.RTOL["float32"]
    assert float(num_tokens) == window["mask"].sum()
    whole = jax.tree.map(lambda x: x[: rows // 4 * 4], window)
    _, dropped = gradient(params, split_batch(whole, 4))
    assert helpers.relative_error(dropped, exact) > 1e-3
