"""Checks that a loss counts exactly the tokens that it sums over."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._audit.masks import Mask, Measure, masks_in, rows_of
from optax_tokenaccum._core.trees import Batch

RTOL = 1e-4  # relative error of a float32 loss
MOST_ROWS = 32


def check_count(
    measures: list[Measure],
    batch: Batch,
    batches: list[Batch],
    dims: set[int],
    rtol: float,
) -> tuple[str | None, list[str]]:
    """How the count was checked, or `None` if it could not be; and the findings.

    `measures` are of the loss at the parameters, at zero parameters, and at others.
    `batch` is the one of `batches` with the most tokens. `dims` are the sizes of the
    parameters' axes, including the number of classes.
    """
    how, found, is_sure = _check_masks(measures, batch, rtol)
    if is_sure and not found:
        return how, found
    how_rows, found_in_rows = _check_uniform(measures[1], batches, dims)
    if how_rows and not (found and found_in_rows):
        # Rows are never split, so it is enough that the count of each row is right.
        return how_rows, found_in_rows
    return how, found


def _check_masks(
    measures: list[Measure], batch: Batch, rtol: float
) -> tuple[str | None, list[str], bool]:
    """Removes entries of likely masks: loss and count must change together."""
    likely = [(mask, *mask.gates(measures, batch, rtol)) for mask in masks_in(batch)]
    has_both = any(of_loss and of_count for _, of_loss, of_count in likely)
    paths, found, are_sums = [], [], []
    for mask, of_loss, of_count in likely:
        adds_up = all(_adds_up(mask, measure, batch, rtol) for measure in measures)
        # Without weights, rewards or one-hot labels the loss is zero too. So a leaf
        # that removes only the loss counts as a mask only if no leaf removes both.
        alone = of_count or of_loss and adds_up and not has_both
        if of_loss and of_count or mask.is_mask and alone:
            paths.append(mask.path)
            are_sums.append(adds_up)
            found += _findings(mask, measures, batch, adds_up, rtol)
    how = f"entry by entry of {', '.join(paths)}" if paths else None
    return how, found, bool(paths) and all(are_sums)


def _adds_up(mask: Mask, measure: Measure, batch: Batch, rtol: float) -> bool:
    """Whether the loss is a sum over the entries.

    It is not if the mask is an attention mask: each entry changes many tokens' losses.
    """
    whole, first, second = (loss for loss, _ in mask.in_halves(measure, batch))
    size = max(abs(whole), abs(first), abs(second))
    return not abs(whole - first - second) > rtol / 10 * size


def _findings(
    mask: Mask, measures: list[Measure], batch: Batch, adds_up: bool, rtol: float
) -> Iterator[str]:
    """Yields a finding for entries that change only the count or only the loss.

    Another finding is a count that holds more or less than its entries.
    """
    only_loss, only_count, entries = 0, 0, 0

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
                only_count += not any(
                    changes(measure, *(_moved(x, mask, far) for x in (row, without)))
                    for far in (None, 0, 100)
                    for measure in measures
                )
    if only_count:
        yield (
            f"the count takes in what the loss leaves out: {only_count} of {entries} "
            f"entries of {mask.path} change the count alone. Is it taken from labels "
            "before their shift, or with padding? Count with the mask that the loss is "
            "multiplied by."
        )
    if only_loss:
        yield (
            f"the loss takes in what the count leaves out: {only_loss} of {entries} "
            f"entries of {mask.path} change the loss alone. Is it one per sequence, or "
            "a constant? Count with the mask that the loss is multiplied by; or, if "
            'the loss is a mean over sequences, give check_loss_fn per="sequence".'
        )
    if only_count or only_loss or not adds_up:
        return
    whole, first, second = (count for _, count in mask.in_halves(measures[0], batch))
    more = first + second - whole
    if abs(more) > 1 + rtol * whole:  # maximum(count, 1) may hold 1 more
        yield (
            f"the count is {whole:g} where the entries of {mask.path} add up to "
            f"{whole - more:g}. Is it taken from labels before their shift? Count with "
            "the mask that the loss is multiplied by."
        )


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
) -> tuple[str | None, list[str]]:
    """Checks the count with equal logits, where the loss is proportional to it."""
    rows = [
        rows_of(batch, i, i + 1)
        for batch in batches
        for i in range(len(jax.tree.leaves(batch)[0]))
    ][:MOST_ROWS]
    losses, counts = np.array([measure_at_zero(row) for row in rows]).T
    slack = RTOL * abs(losses).max()
    if not np.isfinite(losses).all() or np.ptp(losses) <= slack:
        return None, []  # rows of equal length tell nothing
    how = "at parameters of zero, where every token costs the same"
    ratio = losses.sum() / counts.sum() if counts.sum() else np.inf
    if (abs(losses - ratio * counts) <= slack).all():
        return how, []
    for classes in dims - {1}:
        # With equal logits, a token costs the log of the number of classes.
        exact = losses / np.log(classes)
        tokens = np.round(exact)
        is_whole = (abs(exact - tokens) <= RTOL * np.maximum(tokens, 1)).all()
        if is_whole and (what := _name(counts, tokens)):
            return how, [
                f"the count is not that of the loss but {what}. Rows with "
                f"{' to '.join(f'{n:g}' for n in tokens[:4])} loss tokens were counted "
                f"as {counts[:4].tolist()}. Count with the mask that the loss is "
                "multiplied by."
            ]
    return None, []


def _name(counts: np.ndarray, tokens: np.ndarray) -> str:
    """What the counts of rows are, if not their tokens; empty if it is not known."""
    if (counts == 1).all():
        return "one per sequence"
    if np.ptp(counts) == 0 and counts[0] >= tokens.max():
        return "the same with any padding"
    if (counts - tokens == 1)[tokens > 0].all():
        return "+1 in every row: labels before their shift?"
    return ""
