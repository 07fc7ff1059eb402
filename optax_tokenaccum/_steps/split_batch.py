"""Splits a batch into micro-batches without moving rows between devices."""

from typing import Any

import jax

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.trees import Batch


def split_batch(batch: Batch, k: int) -> Any:
    """Splits a batch into `k` micro-batches, for a loop over their leading axis.

    Row `j` goes to micro-batch `j % k`. Every device that holds a part of the rows then
    holds the same part of each micro-batch, and no row moves between devices. Splitting
    the rows into contiguous blocks would move nearly all of them. The update does not
    depend on the order of the rows.

    Args:
      batch: a pytree of arrays `[k * micro, ...]`.
      k: the number of micro-batches.

    Returns:
      The same tree with leaves `[k, micro, ...]`.

    Raises:
      ValueError: `k` is below 1 or does not divide the number of rows, or the leaves
        have different numbers of rows; the error names the leaf.

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum import split_batch
      >>> print(split_batch({"x": np.arange(6)}, 2)["x"])
      [[0 2 4]
       [1 3 5]]
    """
    k = checks.as_count(k, "k")
    rows = trees.leading_axis(batch, "batch")
    if rows % k:
        (path, _), *_ = trees.named_leaves(batch)
        raise ValueError(
            f"k must divide the rows of the batch: got k = {k} and {rows} rows at "
            f"{path}. Pad the batch with rows of no tokens, or drop some."
        )

    # optax.microbatching.reshape_batch_axis cuts alike, but copies NumPy arrays, to
    # Fortran order.
    def split(x: Any) -> Any:
        return x.reshape(rows // k, k, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)
