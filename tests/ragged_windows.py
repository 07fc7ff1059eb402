"""Ragged windows for tests: padded as a batch, as sequences, and as planned."""

from typing import Any

import helpers
import jax

from optax_tokenaccum.ragged import pad_micro_batch, plan_window

PADS = {"tokens": 0, "labels": 0, "mask": False}
CUT: dict[str, Any] = {"max_tokens": 128, "length_buckets": [8, 24, 40, 64]}


def ragged_window(seed: int, rows: int = helpers.ROWS) -> tuple[Any, list[Any]]:
    """Return a padded batch, and its rows as sequences without padding."""
    batch = helpers.ragged_batch(seed, rows)
    lengths = batch["mask"].sum(1)
    # Every other sequence begins with a token that is not a label.
    batch["mask"][::2, 0] = False
    sequences = [
        jax.tree.map(lambda x, row=row, n=n: x[row, :n], batch)
        for row, n in enumerate(lengths)
    ]
    return batch, sequences


def planned(sequences: list[Any], pads: Any = PADS, **cut: Any) -> list[Any]:
    """Return micro-batches of several shapes, one per call."""
    lengths = [len(jax.tree.leaves(sequence)[0]) for sequence in sequences]
    plans = plan_window(lengths, **(cut or CUT))
    return [pad_micro_batch(sequences, plan, pad_values=pads) for plan in plans]
