"""Is the count of a loss the count of the tokens that the loss is a sum over?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum import _checks

# (loss_sum, num_tokens) of some rows.
Measure = Callable[[Any], tuple[float, float]]

RTOL = 1e-4  # of a loss in float32, or of one in bfloat16 that is summed in float32
MOST_PROBES = 32  # positions of a mask that are looked at


def check_count(
    measure: Measure, measure_at_zero: Measure, batches: list[Any]
) -> tuple[str | None, list[str]]:
    """How it was checked, `None` where it could not be, and what was found.

    Args:
      measure: of some rows, at the parameters.
      measure_at_zero: the same at parameters of zero.
      batches: micro-batches whose leaves share an axis of rows.
    """
    how, found = _check_masks(measure, batches)
    return _check_uniform(measure_at_zero, batches) if how is None else (how, found)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Some rows of a batch."""
    return jax.tree.map(lambda x: x[start:stop], batch)


def _check_masks(measure: Measure, batches: list[Any]) -> tuple[str | None, list[str]]:
    """Takes entries of what looks like a mask away: loss and count change together."""
    batch = max(batches, key=lambda batch: measure(batch)[1])
    leaves, structure = jax.tree.flatten(batch)
    found, looked_at = [], []
    for place, (path, leaf) in enumerate(_checks.named_leaves(batch)):
        without = _value_of_nothing(leaf)
        if without is None:
            continue

        def measure_with(leaf: jax.Array, place: int = place) -> tuple[float, float]:
            changed = [*leaves[:place], leaf, *leaves[place + 1 :]]
            return measure(structure.unflatten(changed))

        if all(measure_with(jnp.full_like(leaf, without))):
            continue  # labels of 0 and 1, say: nothing is without loss or count
        before = measure_with(leaf)
        only_loss, only_count, both = 0, 0, 0
        for entry in _entries(leaf, without):
            after = measure_with(leaf.at[tuple(entry)].set(without))
            loss_changed, count_changed = (
                x != y for x, y in zip(before, after, strict=True)
            )
            both += loss_changed and count_changed
            only_loss += loss_changed and not count_changed
            only_count += count_changed and not loss_changed
        looked_at.append(path)
        if only_count:
            found.append(
                f"the count takes in what the loss leaves out: {only_count} of "
                f"{both + only_count + only_loss} entries of {path} change the count "
                "alone. Is it taken from labels before their shift, or with padding? "
                "Count with the mask that the loss is multiplied by."
            )
        if only_loss:
            found.append(
                f"the loss takes in what the count leaves out: {only_loss} of "
                f"{both + only_count + only_loss} entries of {path} change the loss "
                "alone. Is it one per sequence, or a constant? Count with the mask "
                "that the loss is multiplied by."
            )
    how = f"entry by entry of {', '.join(looked_at)}" if looked_at else None
    return how, found


def _value_of_nothing(leaf: jax.Array) -> Any:
    """What takes an entry of a mask away, or `None` where a leaf is no mask."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # keys
        return None
    values = np.unique(np.asarray(leaf)) if leaf.ndim else np.zeros(0)
    if leaf.dtype == jnp.bool_ or set(values.tolist()) == {0, 1}:
        return np.zeros((), leaf.dtype)
    is_labels = jnp.issubdtype(leaf.dtype, jnp.integer) and values.size
    return values[0] if is_labels and values[0] < 0 else None


def _entries(leaf: jax.Array, without: Any) -> np.ndarray:
    """Entries of a mask that are there: the first, the last, and some between."""
    there = np.argwhere(np.asarray(leaf) != without)
    rows = np.unique(there[:, 0], return_index=True)[1] if len(there) else []
    chosen = np.linspace(0, len(there) - 1, min(len(there), MOST_PROBES)).astype(int)
    return there[np.union1d(chosen, rows[: MOST_PROBES // 2]).astype(int)]


def _check_uniform(
    measure_at_zero: Measure, batches: list[Any]
) -> tuple[str | None, list[str]]:
    """With equal logits every token costs the same: the loss is a count itself."""
    rows = [
        rows_of(batch, i, i + 1)
        for batch in batches
        for i in range(jax.tree.leaves(batch)[0].shape[0])
    ][:MOST_PROBES]
    losses, counts = np.array([measure_at_zero(row) for row in rows]).T
    if not np.isfinite(losses).all() or not losses.any():
        return None, []
    how = "at parameters of zero, where every token costs the same"
    if np.ptp(losses) <= RTOL * abs(losses).max():
        if np.ptp(counts) == 0:
            return None, []  # rows of equal lengths tell nothing
    elif _proportional(losses, counts):
        return how, []
    ratios = _ratios_of_uniform(losses)
    if ratios is None:
        return None, []
    slope, offset = np.polyfit(counts, losses, 1) if np.ptp(counts) else (0, 0)
    if np.ptp(counts) == 0:
        what = "one per sequence" if counts[0] == 1 else "the same with any padding"
    elif _proportional(losses, counts + offset / slope):
        what = f"{-offset / slope:+.3g} in every row: labels before their shift?"
    else:
        what = "another mask's"
    return how, [
        f"the count is not that of the loss but {what}. Rows whose loss tokens are as "
        f"{' to '.join(f'{r:g}' for r in ratios[:4])} were counted as "
        f"{counts[:4].tolist()}. Count with the mask that the loss is multiplied by."
    ]


def _proportional(losses: np.ndarray, counts: np.ndarray) -> bool:
    ratio = losses.sum() / counts.sum() if counts.sum() else np.inf
    return bool((abs(losses - ratio * counts) <= RTOL * abs(losses).max()).all())


def _ratios_of_uniform(losses: np.ndarray) -> np.ndarray | None:
    """The rows' tokens up to a factor, if losses are multiples of the log of a number.

    That of the classes, or of one that they are a power of.
    """
    cost = np.log(np.arange(2, 300_000))[:, None]
    tokens = losses / cost
    near = abs(tokens - np.round(tokens)) <= RTOL * np.maximum(tokens, 1)
    fits = near.all(1) & (np.ptp(np.round(tokens), axis=1) > 0)
    fits &= RTOL * tokens.max(1) < 0.05  # many tokens are near to anything
    return np.round(tokens[np.flatnonzero(fits)[-1]]) if fits.any() else None
