"""Cuts a batch into micro-batches, and fills up what is missing."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._core.trees import Batch, is_key, leading_axis, named_leaves

Leaf = jax.Array | np.ndarray
# A number for all leaves of a tree, or a tree prefix of such numbers.
PadValues = ArrayLike | Mapping | Sequence | None


def split_batch(batch: Batch, k: int, *, pad_values: PadValues = None) -> Batch:
    """Splits a batch into `k` micro-batches, for a loop over their leading axis.

    Row `j` goes to micro-batch `j % k`. Every device that holds a part of the rows then
    holds the same part of each micro-batch, and no row moves between devices. Splitting
    the rows into contiguous blocks would move nearly all of them. The update does not
    depend on the order of the rows, unless a coupled loss does: rows that belong
    together must be one row.

    Args:
      batch: a pytree of arrays `[rows, ...]`.
      k: the number of micro-batches.
      pad_values: values of the rows that fill the batch up until `k` divides their
        number, for example the last batch of an epoch: a number for all leaves, or a
        tree prefix, such as `{"inputs": 0, "mask": False}`. These rows must have no
        tokens, and what has none depends on the loss. Random keys are filled up with
        the first one. By default `k` must divide the rows.

    Returns:
      The same tree with leaves `[k, micro, ...]`.

    Raises:
      ValueError: `k` is below 1, or does not divide the number of rows and there are no
        `pad_values`; the leaves have different numbers of rows (the error names the
        leaf); or `pad_values` do not match the batch.

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum import split_batch
      >>> print(split_batch({"x": np.arange(6)}, 2)["x"])
      [[0 2 4]
       [1 3 5]]
      >>> print(split_batch({"labels": np.arange(5)}, 2, pad_values=-100)["labels"])
      [[   0    2    4]
       [   1    3 -100]]
    """
    k = as_count(k, "k")
    rows = leading_axis(batch, "batch")
    missing = -rows % k
    if missing and pad_values is None:
        (path, _), *_ = named_leaves(batch)
        raise ValueError(
            f"k must divide the rows of the batch: got k = {k} and {rows} rows at "
            f"{path}. Give pad_values, or drop some rows."
        )

    def fill_up(path: str, x: Leaf, pad: ArrayLike) -> Leaf:
        if is_key(x):
            keys = jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))
            return jnp.concatenate([x, keys])
        xp = np if isinstance(x, np.ndarray) else jnp
        pad = fitted_pad(pad, x.dtype, path)
        return xp.concatenate([x, xp.full((missing, *x.shape[1:]), pad, x.dtype)])

    if missing:
        leaves = [fill_up(*leaf) for leaf in with_pads(batch, pad_values)]
        batch = jax.tree.unflatten(jax.tree.structure(batch), leaves)
    # optax.microbatching.reshape_batch_axis cuts alike, but copies NumPy arrays, to
    # Fortran order.
    return jax.tree.map(
        lambda x: x.reshape(len(x) // k, k, *x.shape[1:]).swapaxes(0, 1), batch
    )


def with_pads(tree: Batch, pad_values: PadValues) -> list[tuple[str, Leaf, ArrayLike]]:
    """`(path, leaf, pad value)` for every leaf of `tree`."""
    pads = jax.tree.leaves(jax.tree.broadcast(pad_values, tree))
    leaves = named_leaves(tree)
    return [(path, leaf, pad) for (path, leaf), pad in zip(leaves, pads, strict=True)]


def fitted_pad(pad: ArrayLike, dtype: np.dtype, path: str) -> np.ndarray:
    advice = "Give each leaf its own, such as {'inputs': 0, 'mask': False}."
    return fitted(pad, dtype, f"The pad value of {path}", advice)


def fitted(x: ArrayLike, dtype: np.dtype, name: str, advice: str) -> np.ndarray:
    """`x` as an array of `dtype`; raises `ValueError` if that changes its values."""
    given = np.asarray(x)
    if given.dtype == dtype:
        return given
    with np.errstate(all="ignore"):
        kept = given.astype(dtype)
    # Rounding is fine, except to an integer; overflow is not.
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    rtol, atol = (0.1, float(jnp.finfo(dtype).tiny)) if is_inexact else (0, 0)
    if not np.isclose(kept, given, rtol, atol, equal_nan=True).all():
        got = repr(x) if given.ndim == 0 else given.dtype
        raise ValueError(f"{name} must fit its dtype, {dtype}: got {got}. {advice}")
    return kept
