"""Checks that a loss counts exactly the tokens that it sums over."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Batch

# batch -> (loss_sum, num_tokens), at fixed parameters.
Measure = Callable[[Any], tuple[float, float]]

RTOL = 1e-4  # relative error of a float32 loss
MOST_PROBES = 32  # mask entries or rows to look at


class Mask(NamedTuple):
    """Leaves of a batch that may be its mask, and agree on which entries count."""

    path: str  # of the first of these leaves
    places: list[int]  # of these leaves among all leaves of the batch
    nothing: list[Any]  # for each leaf, the value that removes an entry
    there: np.ndarray  # which entries are present, bools of the leaves' shape
    is_mask: bool  # whether they can only be a mask, not weights or one-hot labels

    def kept(self, batch: Batch, keep: Any) -> Any:
        """The batch with only the entries where `keep` is true."""
        leaves, structure = jax.tree.flatten(batch)
        for place, nothing in zip(self.places, self.nothing, strict=True):
            leaves[place] = np.where(keep, leaves[place], nothing)
        return structure.unflatten(leaves)

    def among(self, batch: Batch, far: float) -> Any:
        """The batch with nonzero values in all float leaves outside the mask.

        Values that are not zero move away from zero by `far`. A token has no loss if
        its weight or reward is zero, or if the model predicts its target exactly.
        """
        leaves, structure = jax.tree.flatten(batch)
        for place, leaf in enumerate(leaves):
            if place not in self.places and jnp.issubdtype(leaf.dtype, jnp.floating):
                moved = np.where(leaf == 0, 1, leaf) + far * np.sign(leaf)
                leaves[place] = moved.astype(leaf.dtype)
        return structure.unflatten(leaves)


def check_count(
    measures: list[Measure], batches: list[Any], dims: set[int], rtol: float
) -> tuple[str | None, list[str]]:
    """How the count was checked, or `None` if it could not be; and the findings.

    `measures` are of the loss at the parameters, at zero parameters, and at others.
    `dims` are the sizes of the parameters' axes, including the number of classes.
    """
    how, found, is_sure = _check_masks(measures, batches, rtol)
    if is_sure and not found:
        return how, found
    how_rows, found_in_rows = _check_uniform(measures[1], batches, dims)
    if how_rows and not (found and found_in_rows):
        # Rows are never split, so it is enough that the count of each row is right.
        return how_rows, found_in_rows
    return how, found


def rows_of(batch: Batch, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: x[start:stop], batch)


def _check_masks(
    measures: list[Measure], batches: list[Any], rtol: float
) -> tuple[str | None, list[str], bool]:
    """Removes entries of likely masks: loss and count must change together."""
    batch = max(batches, key=lambda batch: measures[0](batch)[1])
    masks: dict[tuple[bool, bool], list[Mask]] = {}
    for mask in masks_in(batch):
        masks.setdefault(gates(mask, measures, batch, rtol), []).append(mask)
    of_both, of_count = masks.get((True, True), []), masks.get((False, True), [])
    # Without weights, rewards or one-hot labels the loss is zero too. So a leaf that
    # removes only the loss counts as a mask only if no leaf removes loss and count.
    of_loss = [] if of_both else masks.get((True, False), [])
    of_loss = [m for m in of_loss if m.is_mask and _adds_up(m, measures, batch, rtol)]
    of_count = [m for m in of_count if m.is_mask]
    looked_at = [*of_both, *of_count, *of_loss]
    how = f"entry by entry of {', '.join(m.path for m in looked_at)}"
    sure = [_adds_up(mask, measures, batch, rtol) for mask in of_both]
    found = []
    for mask in looked_at:
        adds_up = mask not in of_both or sure[of_both.index(mask)]
        found += _findings(mask, measures, batch, adds_up, rtol)
    return how if looked_at else None, found, bool(looked_at) and all(sure)


def masks_in(batch: Batch) -> Iterator[Mask]:
    """Yields likely masks: bools, 0s and 1s, weights, labels with an ignore index."""
    named = trees.named_leaves(batch)
    seen: list[Mask] = []
    for place, (path, leaf) in enumerate(named):
        nothing = _value_of_nothing(leaf)
        if nothing is None:
            continue
        there = leaf != nothing
        values = np.unique(leaf).tolist()
        sums = there.sum(-1) if leaf.ndim > 1 else np.full(1, 2)
        # A one-hot label has a single nonzero entry.
        is_mask = set(values) <= {0, 1} and sums.max() > 1 or nothing < 0
        same = (m for m in seen if np.array_equal(m.there, there))
        if (twin := next(same, None)) is None:
            seen.append(Mask(path, [place], [nothing], there, is_mask))
        else:
            twin.places.append(place)
            twin.nothing.append(nothing)
    yield from seen


def _value_of_nothing(leaf: Any) -> Any:
    """The value that removes a mask entry; `None` for any other leaf."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or not leaf.size:  # PRNG keys
        return None
    low, zero = np.min(leaf), np.zeros((), leaf.dtype)
    if leaf.dtype == jnp.bool_ or set(np.unique(leaf).tolist()) == {0, 1}:
        return zero
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return zero if low == 0 or 0 < low < 1 else None
    return low if low < 0 and jnp.issubdtype(leaf.dtype, jnp.integer) else None


def gates(
    mask: Mask, measures: list[Measure], batch: Batch, rtol: float
) -> tuple[bool, bool]:
    """Whether the loss, and whether the count, is zero without any entry."""
    nothing = mask.kept(batch, False)
    pairs = [(measure(batch)[0], measure(nothing)[0]) for measure in measures]
    told = [abs(after) <= rtol * abs(before) for before, after in pairs if before]
    _, count = measures[0](nothing)
    return bool(told) and all(told), count == 0


def _adds_up(mask: Mask, measures: list[Measure], batch: Batch, rtol: float) -> bool:
    """Whether the loss is a sum over the entries.

    It is not if the mask is an attention mask: each entry changes many tokens' losses.
    """
    for measure in measures:
        whole, first, second = (
            measure(mask.kept(batch, keep))[0] for keep in (True, *_halves(mask))
        )
        size = max(abs(whole), abs(first), abs(second))
        if abs(whole - first - second) > rtol / 10 * size:
            return False
    return True


def _halves(mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Every other entry, so that neighboring tokens of a sequence are separated."""
    half = np.cumsum(mask.there).reshape(mask.there.shape) % 2 == 0
    return half, ~half


def _findings(
    mask: Mask, measures: list[Measure], batch: Batch, adds_up: bool, rtol: float
) -> Iterator[str]:
    """Yields a finding for entries that change only the count or only the loss.

    Another finding is a count that holds more or less than its entries.
    """
    only_loss, only_count, both = 0, 0, 0
    for entry in _entries(mask.there):
        row = rows_of(batch, entry[0], entry[0] + 1)
        keep = np.ones((1, *mask.there.shape[1:]), bool)
        keep[0, *entry[1:]] = False

        def changes(measure: Measure, row: Any, keep: Any = keep) -> bool:
            before, after = measure(row)[0], measure(mask.kept(row, keep))[0]
            return abs(after - before) > 1e-6 * abs(before)  # false for NaN

        counts = measures[0](row)[1] != measures[0](mask.kept(row, keep))[1]
        given = [changes(measure, row) for measure in measures[: 1 if counts else None]]
        if not counts:
            # A token that is only attended to does not change the loss at zero params.
            only_loss += adds_up and all(given)
        elif any(given) or any(
            # The token's loss may be zero for these parameters or values only.
            changes(measure, other)
            for other in (row, mask.among(row, 0), mask.among(row, 100))
            for measure in measures
        ):
            both += 1
        else:
            only_count += 1
    if only_count:
        yield (
            f"the count takes in what the loss leaves out: {only_count} of "
            f"{both + only_count + only_loss} entries of {mask.path} change the count "
            "alone. Is it taken from labels before their shift, or with padding? "
            "Count with the mask that the loss is multiplied by."
        )
    if only_loss:
        yield (
            f"the loss takes in what the count leaves out: {only_loss} of "
            f"{both + only_count + only_loss} entries of {mask.path} change the loss "
            "alone. Is it one per sequence, or a constant? Count with the mask "
            "that the loss is multiplied by; or, if the loss is a mean over sequences, "
            'give check_loss_fn per="sequence".'
        )
    if only_count or only_loss or not adds_up:
        return
    whole, first, second = (
        measures[0](mask.kept(batch, keep))[1] for keep in (True, *_halves(mask))
    )
    more = first + second - whole
    if abs(more) > 1 + rtol * whole:  # maximum(count, 1) may hold 1 more
        yield (
            f"the count is {whole:g} where the entries of {mask.path} add up to "
            f"{whole - more:g}. Is it taken from labels before their shift? Count with "
            "the mask that the loss is multiplied by."
        )


def _entries(there: np.ndarray) -> np.ndarray:
    """Samples the present entries of a mask, including the first and the last."""
    places = np.argwhere(there)
    rows = np.unique(places[:, 0], return_index=True)[1] if len(places) else []
    chosen = np.linspace(0, len(places) - 1, min(len(places), MOST_PROBES)).astype(int)
    return places[np.union1d(chosen, rows[: MOST_PROBES // 2]).astype(int)]


def _check_uniform(
    measure_at_zero: Measure, batches: list[Any], dims: set[int]
) -> tuple[str | None, list[str]]:
    """Checks the count with equal logits, where the loss is proportional to it."""
    rows = [
        rows_of(batch, i, i + 1)
        for batch in batches
        for i in range(jax.tree.leaves(batch)[0].shape[0])
    ][:MOST_PROBES]
    losses, counts = np.array([measure_at_zero(row) for row in rows]).T
    if not np.isfinite(losses).all() or np.ptp(losses) <= RTOL * abs(losses).max():
        return None, []  # rows of equal length tell nothing
    how = "at parameters of zero, where every token costs the same"
    ratio = losses.sum() / counts.sum() if counts.sum() else np.inf
    if (abs(losses - ratio * counts) <= RTOL * abs(losses).max()).all():
        return how, []
    for classes in dims - {1}:
        # With equal logits, a token costs the log of the number of classes.
        exact = losses / np.log(classes)
        tokens = np.round(exact)
        if (abs(exact - tokens) > RTOL * np.maximum(tokens, 1)).any():
            continue
        if np.ptp(counts) == 0 and counts[0] == 1:
            what = "one per sequence"
        elif np.ptp(counts) == 0 and counts[0] >= tokens.max():
            what = "the same with any padding"
        elif (counts - tokens == 1)[tokens > 0].all():
            what = "+1 in every row: labels before their shift?"
        else:
            continue
        return how, [
            f"the count is not that of the loss but {what}. Rows with "
            f"{' to '.join(f'{n:g}' for n in tokens[:4])} loss tokens were counted as "
            f"{counts[:4].tolist()}. Count with the mask that the loss is multiplied "
            "by."
        ]
    return None, []
