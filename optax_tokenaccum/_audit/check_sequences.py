"""Checks that a loss that is a mean over sequences counts its sequences."""

from collections.abc import Iterator

import jax
import numpy as np

from optax_tokenaccum._audit.check_count import CountCheck
from optax_tokenaccum._audit.masks import Mask, Measure, masks_in, some_rows
from optax_tokenaccum._core.trees import Batch


def check_sequences(measures: list[Measure], batch: Batch, rtol: float) -> CountCheck:
    """Checks a count of sequences.

    A row may hold several sequences. So the count of a row is not known, but it must
    not change with every token of the row.

    `measures` are of the loss at the parameters, at zero parameters, and at others.
    """
    masks = [m for m in masks_in(batch) if all(m.gates(measures, batch, rtol))]
    found = [x for mask in masks for x in _findings(mask, measures[0], batch)]
    found += _left_out(measures, batch, rtol)
    if masks:
        return CountCheck(f"row by row of {', '.join(m.path for m in masks)}", found)
    if found:
        return CountCheck("row by row", found)
    note = "no leaf, set to zero, removes both the loss and the count."
    return CountCheck(None, found, note)


def _findings(mask: Mask, measure: Measure, batch: Batch) -> Iterator[str]:
    """Yields a finding for rows whose count is not one of sequences."""
    by_token, parts = [], 0
    for row, without_one in mask.rows_without_one(batch):
        count = measure(row)[1]
        parts += count != round(count)
        if len(without_one) > 1:
            by_token.append(all(measure(x)[1] != count for x in without_one))
    if by_token and all(by_token):
        yield (
            f"the count is not one of sequences: it changes with every entry of "
            f"{mask.path}. Count 1 for each sequence that has tokens, or leave "
            'per="sequence" out if the loss is a mean over tokens.'
        )
    if parts:
        yield (
            f"the count must be a whole number of sequences: {parts} rows have "
            "another. Return the number of sequences, and the sum of their losses."
        )


def _left_out(measures: list[Measure], batch: Batch, rtol: float) -> Iterator[str]:
    """Yields a finding for rows with a loss that the count leaves out.

    Alone in a micro-batch, such a row adds nothing, so the update depends on the cut.
    """
    rows = [row for _, row in some_rows(batch, len(jax.tree.leaves(batch)[0]))]
    losses = abs(np.array([[measure(row)[0] for measure in measures] for row in rows]))
    counts = np.array([measures[0](row)[1] for row in rows])
    has_loss = (losses > rtol * losses.sum(0)).any(1)  # false for NaN
    if left_out := np.sum(has_loss & (counts == 0)):
        yield (
            f"the loss takes in sequences that the count leaves out: {left_out} of "
            f"{len(rows)} rows have a loss and a count of 0. Count 1 for each sequence "
            "that has tokens, and leave the loss of other rows out."
        )
