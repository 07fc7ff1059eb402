"""Checks that a loss counts exactly the tokens that it sums over."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._audit.masks import Mask, Measure, masks_in, rows_of
from optax_tokenaccum._core.trees import Batch

RTOL = 1e-4  # relative error of a float32 loss
MOST_ROWS = 32


class CountCheck(NamedTuple):
    """What a check of the count found."""

    how: str | None  # `None` if the count was not checked
    findings: list[str]
    note: str | None = None  # why it was not, or what the check leaves open


def check_count(
    measures: list[Measure],
    batch: Batch,
    batches: list[Batch],
    dims: set[int],
    rtol: float,
) -> CountCheck:
    """Checks a count of tokens.

    `measures` are of the loss at the parameters, at zero parameters, and at others.
    `batch` is the one of `batches` with the most tokens. `dims` are the sizes of the
    parameters' axes, including the number of classes.
    """
    by_entry = _check_masks(measures, batch, rtol)
    if by_entry.how and not by_entry.findings and not by_entry.note:
        return by_entry
    by_row = _check_uniform(measures[1], batches, dims)
    if by_row.how and not (by_entry.findings and by_row.findings):
        # Rows are never split, so it is enough that the count of each row is right.
        return by_row
    return by_entry


def _check_masks(measures: list[Measure], batch: Batch, rtol: float) -> CountCheck:
    """Removes entries of likely masks: loss and count must change together."""
    likely = [(mask, *mask.gates(measures, batch, rtol)) for mask in masks_in(batch)]
    has_both = any(of_loss and of_count for _, of_loss, of_count in likely)
    checked, unchanged, found, are_sums = [], [], [], []
    for mask, of_loss, of_count in likely:
        adds_up = all(_adds_up(mask, measure, batch, rtol) for measure in measures)
        # Without weights, rewards or one-hot labels the loss is zero too. So a leaf
        # that removes only the loss counts as a mask only if no leaf removes both.
        alone = of_count or of_loss and adds_up and not has_both
        if of_loss and of_count or mask.is_mask and alone:
            changes, findings = _findings(mask, measures, batch, adds_up, rtol)
            (checked if changes or findings else unchanged).append(mask.path)
            are_sums.append(adds_up)
            found += findings
    note = None
    if not checked:
        what = "no leaf looks like a mask"
        if unchanged:
            what = f"no single entry of {', '.join(unchanged)} changes it"
        note = f"{what}, and the loss is not uniform at parameters of zero."
        if unchanged:
            note += ' If it is one of sequences, give check_loss_fn per="sequence".'
    elif not all(are_sums) and not found:
        note = (
            "Without one entry, the loss of others changes: attention does that, and a "
            "mean over sequences. If the loss is such a mean, give check_loss_fn "
            'per="sequence", because a count of tokens passes here.'
        )
    how = f"entry by entry of {', '.join(checked)}" if checked else None
    return CountCheck(how, found, note)


def _adds_up(mask: Mask, measure: Measure, batch: Batch, rtol: float) -> bool:
    """Whether the loss is a sum over the entries.

    It is not if the mask is an attention mask: each entry changes many tokens' losses.
    """
    whole, first, second = (loss for loss, _ in mask.in_halves(measure, batch))
    size = max(abs(whole), abs(first), abs(second))
    return not abs(whole - first - second) > rtol / 10 * size


def _findings(
    mask: Mask, measures: list[Measure], batch: Batch, adds_up: bool, rtol: float
) -> tuple[bool, list[str]]:
    """Whether any entry changes the count, and the findings.

    There is one for entries that change only the count or only the loss, and one for a
    count that holds more or less than its entries.
    """
    only_loss, only_count, both, entries = 0, 0, False, 0

    def changes(measure: Measure, row: Batch, without: Batch) -> bool:
        before, after = measure(row)[0], measure(without)[0]
        return abs(after - before) > 1e-6 * abs(before)  # false for NaN

    for row, without_one in mask.rows_without_one(batch):
        for without in without_one:
            entries += 1
            if measures[0](row)[1] == measures[0](without)[1]:
                # A token that is only attended to has no loss at zero parameters.
                only_loss += adds_up and all(
                    changes(measure, row, without) for measure in measures
                )
            else:
                # The token's loss may be zero for these parameters or values only.
                is_lost = not any(
                    changes(measure, *(_moved(x, mask, far) for x in (row, without)))
                    for far in (None, 0, 100)
                    for measure in measures
                )
                only_count, both = only_count + is_lost, both or not is_lost
    found = []
    if only_count:
        found.append(
            f"the count takes in what the loss leaves out: {only_count} of {entries} "
            f"entries of {mask.path} change the count alone. Is it taken from labels "
            "before their shift, or with padding? Count with the mask that the loss is "
            "multiplied by."
        )
    if only_loss:
        found.append(
            f"the loss takes in what the count leaves out: {only_loss} of {entries} "
            f"entries of {mask.path} change the loss alone. Is it one per sequence, or "
            "a constant? Count with the mask that the loss is multiplied by; or, if "
            'the loss is a mean over sequences, give check_loss_fn per="sequence".'
        )
    if found or not adds_up:
        return both, found
    whole, first, second = (count for _, count in mask.in_halves(measures[0], batch))
    more = first + second - whole
    if abs(more) > 1 + rtol * whole:  # maximum(count, 1) may hold 1 more
        found.append(
            f"the count is {whole:g} where the entries of {mask.path} add up to "
            f"{whole - more:g}. Is it taken from labels before their shift? Count with "
            "the mask that the loss is multiplied by."
        )
    return both, found


def _moved(batch: Batch, mask: Mask, far: float | None) -> Batch:
    """The batch with nonzero values in all float leaves outside the mask.

    Values that are not zero move away from zero by `far`. A token has no loss if its
    weight or reward is zero, or if the model predicts its target exactly.
    """
    leaves, structure = jax.tree.flatten(batch)
    for place, leaf in enumerate(leaves):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        if far is not None and is_float and place not in mask.nothing:
            moved = np.where(leaf == 0, 1, leaf) + far * np.sign(leaf)
            leaves[place] = moved.astype(leaf.dtype)
    return structure.unflatten(leaves)


def _check_uniform(
    measure_at_zero: Measure, batches: list[Batch], dims: set[int]
) -> CountCheck:
    """Checks the count with equal logits, where the loss is proportional to it."""
    rows = [
        rows_of(batch, i, i + 1)
        for batch in batches
        for i in range(len(jax.tree.leaves(batch)[0]))
    ][:MOST_ROWS]
    losses, counts = np.array([measure_at_zero(row) for row in rows]).T
    slack = RTOL * abs(losses).max()
    if not np.isfinite(losses).all() or np.ptp(losses) <= slack:
        return CountCheck(None, [])  # rows of equal length tell nothing
    at_zero = "at parameters of zero, where"
    ratio = losses.sum() / counts.sum() if counts.sum() else np.inf
    if (abs(losses - ratio * counts) <= slack).all():
        how = f"{at_zero} the loss of a row is proportional to its count"
        return CountCheck(how, [])
    for classes in dims - {1}:
        # With equal logits, a token costs the log of the number of classes.
        exact = losses / np.log(classes)
        tokens = np.round(exact)
        is_whole = (abs(exact - tokens) <= RTOL * np.maximum(tokens, 1)).all()
        if is_whole and (what := _name(counts, tokens)):
            finding = (
                f"the count is not that of the loss but {what}. Rows with "
                f"{' to '.join(f'{n:g}' for n in tokens[:4])} loss tokens were counted "
                f"as {counts[:4].tolist()}. Count with the mask that the loss is "
                "multiplied by."
            )
            return CountCheck(f"{at_zero} every token costs the same", [finding])
    return CountCheck(None, [])


def _name(counts: np.ndarray, tokens: np.ndarray) -> str:
    """What the counts of rows are, if not their tokens; empty if it is not known."""
    if (counts == 1).all():
        return "one per sequence"
    if np.ptp(counts) == 0 and counts[0] >= tokens.max():
        return "the same with any padding"
    if (counts - tokens == 1)[tokens > 0].all():
        return "+1 in every row: labels before their shift?"
    return ""
