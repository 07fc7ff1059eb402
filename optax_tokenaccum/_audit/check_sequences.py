"""Checks that a loss that is a mean over sequences counts its sequences."""

from collections.abc import Iterator

from optax_tokenaccum._audit.masks import Mask, Measure, masks_in
from optax_tokenaccum._core.trees import Batch


def check_sequences(
    measures: list[Measure], batch: Batch, rtol: float
) -> tuple[str | None, list[str]]:
    """How the count was checked, or `None` if it could not be; and the findings.

    A row may hold several sequences. So the count of a row is not known, but it must
    not change with every token of the row.

    `measures` are of the loss at the parameters, at zero parameters, and at others.
    """
    masks = [m for m in masks_in(batch) if all(m.gates(measures, batch, rtol))]
    found = [x for mask in masks for x in _findings(mask, measures, batch)]
    paths = ", ".join(mask.path for mask in masks)
    return f"row by row of {paths}" if masks else None, found


def _findings(mask: Mask, measures: list[Measure], batch: Batch) -> Iterator[str]:
    """Yields a finding for rows whose count is not one of sequences."""
    by_token, left_out, parts = [], 0, 0
    for row, without_one in mask.rows_without_one(batch):
        count = measures[0](row)[1]
        parts += count != round(count)
        left_out += count == 0 and any(measure(row)[0] != 0 for measure in measures)
        if len(without_one) > 1:
            by_token.append(all(measures[0](x)[1] != count for x in without_one))
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
    if left_out:
        yield (
            f"the loss takes in sequences that the count leaves out: {left_out} rows "
            "have a loss and a count of 0. Count 1 for each sequence that has tokens."
        )
