"""Which leaves of a batch are its mask, and the batch without some of their entries."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Batch

# batch -> (loss_sum, num_tokens), at fixed parameters.
Measure = Callable[[Batch], tuple[float, float]]

MOST_ROWS = 32  # to remove entries from
MOST_ENTRIES = 48  # to remove from all rows together, or 3 from each


class Mask(NamedTuple):
    """Leaves of a batch that may be its mask, and agree on which entries count."""

    path: str  # of the first of these leaves
    there: np.ndarray  # which entries are present, bools of the leaves' shape
    is_mask: bool  # whether they can only be a mask, not weights or one-hot labels
    # The place of each of these leaves in the batch, and the value that removes an
    # entry from it.
    nothing: dict[int, np.ndarray]

    def kept(self, batch: Batch, keep: np.ndarray | bool) -> Batch:
        """The batch with only the entries where `keep` is true."""
        leaves, structure = jax.tree.flatten(batch)
        for place, nothing in self.nothing.items():
            leaves[place] = np.where(keep, leaves[place], nothing)
        return structure.unflatten(leaves)

    def in_halves(self, measure: Measure, batch: Batch) -> list[tuple[float, float]]:
        """Measures all entries, and both halves of them.

        A half is every other entry, so neighboring tokens of a sequence are separated.
        """
        half = np.cumsum(self.there).reshape(self.there.shape) % 2 == 0
        return [measure(self.kept(batch, keep)) for keep in (True, half, ~half)]

    def gates(
        self, measures: list[Measure], batch: Batch, rtol: float
    ) -> tuple[bool, bool]:
        """Whether the loss, and whether the count, is zero without any entry."""
        nothing = self.kept(batch, False)
        pairs = [(measure(batch)[0], measure(nothing)[0]) for measure in measures]
        told = [abs(after) <= rtol * abs(before) for before, after in pairs if before]
        _, count = measures[0](nothing)
        return bool(told) and all(told), count == 0

    def rows_without_one(self, batch: Batch) -> Iterator[tuple[Batch, list[Batch]]]:
        """Some rows, each also without one of its entries: the first, the last, ..."""
        rows = [*some_rows(batch, len(self.there))]
        for i, row in rows:
            there = self.there[i : i + 1]
            places = np.argwhere(there)
            without = []
            for j in _some(len(places), max(3, MOST_ENTRIES // len(rows))):
                keep = np.ones(there.shape, bool)
                keep[*places[j]] = False
                without.append(self.kept(row, keep))
            yield row, without


def masks_in(batch: Batch) -> list[Mask]:
    """Likely masks: bools, 0s and 1s, weights, labels with an ignore index."""
    masks: dict[Any, Mask] = {}
    for place, (path, leaf) in enumerate(trees.named_leaves(batch)):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        is_int = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)
        if not leaf.size or not (is_float or is_int):
            continue
        low, high = leaf.min(), leaf.max()
        is_likely = 0 <= low < 1 if is_float else low < 0 or high <= 1
        if is_likely:
            nothing = np.asarray(min(low, 0), leaf.dtype)
            there = leaf != nothing
            # A one-hot label has a single nonzero entry.
            is_one_hot = leaf.ndim > 1 and there.sum(-1).max() <= 1
            is_mask = low < 0 or ((leaf == 0) | (leaf == 1)).all() and not is_one_hot
            mask = Mask(path, there, bool(is_mask), {})
            mask = masks.setdefault((there.shape, there.tobytes()), mask)
            mask.nothing[place] = nothing
    return list(masks.values())


def rows_of(batch: Batch, start: int, stop: int | None) -> Batch:
    return jax.tree.map(lambda x: x[start:stop], batch)


def some_rows(batch: Batch, n: int) -> Iterator[tuple[int, Batch]]:
    """Some of the `n` rows of a batch, with their places."""
    return ((int(i), rows_of(batch, i, i + 1)) for i in _some(n, MOST_ROWS))


def _some(n: int, most: int) -> np.ndarray:
    """Up to `most` of the numbers below `n`, with the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))
