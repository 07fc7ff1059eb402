"""Checks that a loss that is a mean over sequences counts its sequences."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from optax_tokenaccum._audit.check_count import Mask, Measure, gates, masks_in, rows_of
from optax_tokenaccum._core.trees import Batch

MOST_ROWS = 32


def check_sequences(
    measures: list[Measure], batches: list[Any], rtol: float
) -> tuple[str | None, list[str]]:
    """How the count was checked, or `None` if it could not be; and the findings.

    A row may hold several sequences. So the count of a row is not known, but it must
    not change with every token of the row.

    `measures` are of the loss at the parameters, at zero parameters, and at others.
    """
    batch = max(batches, key=lambda batch: measures[0](batch)[1])
    masks = [
        mask
        for mask in masks_in(batch)
        if gates(mask, measures, batch, rtol) == (True, True)
    ]
    if not masks:
        return None, []
    paths = ", ".join(mask.path for mask in masks)
    found = [x for mask in masks for x in _findings(mask, measures, batch)]
    return f"row by row of {paths}", found


def _findings(mask: Mask, measures: list[Measure], batch: Batch) -> Iterator[str]:
    """Yields a finding for rows whose count is not one of sequences."""
    tokens, longer, left_out, parts = 0, 0, 0, 0
    rows = np.linspace(0, len(mask.there) - 1, min(len(mask.there), MOST_ROWS))
    for i in np.unique(rows.astype(int)):
        row, there = rows_of(batch, i, i + 1), mask.there[i]
        count = measures[0](row)[1]
        parts += count != round(count)
        left_out += count == 0 and any(measure(row)[0] != 0 for measure in measures)
        if there.sum() > 1:
            longer += 1
            tokens += all(
                measures[0](mask.kept(row, keep))[1] != count
                for keep in _without_one(there)
            )
    if longer and tokens == longer:
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
    if left_out:
        yield (
            f"the loss takes in sequences that the count leaves out: {left_out} rows "
            "have a loss and a count of 0. Count 1 for each sequence that has tokens."
        )


def _without_one(there: np.ndarray) -> Iterator[np.ndarray]:
    """The entries of a row without the first, one in the middle, or the last."""
    places = np.argwhere(there)
    for place in {0, len(places) // 2, len(places) - 1}:
        keep = np.ones((1, *there.shape), bool)
        keep[0, *places[place]] = False
        yield keep
