"""Sequences in a Grain dataset, and the settings with which tests cut them."""

from typing import Any

import grain
import helpers
import numpy as np

from optax_tokenaccum.grain import PlannedMicroBatch, planned_micro_batches

ROWS, WINDOW = 37, 8
PLAN: Any = {"max_tokens": 144, "length_buckets": (16, 64), "batch_multiple": 2}
SETTINGS: Any = {"window_size": WINDOW, **PLAN}
PADS = {"tokens": 0, "labels": 0, "mask": False, "row": -1}

BATCH = helpers.ragged_batch(0, ROWS)
SEQUENCES = [
    {name: x[i, :n] for name, x in BATCH.items()} | {"row": np.int32(i)}
    for i, n in enumerate(BATCH["mask"].sum(1))
]
DATA = grain.MapDataset.source(SEQUENCES).shuffle(seed=3)
ORDER = [int(sequence["row"]) for sequence in DATA]


def planned(dataset: Any = DATA, **settings: Any) -> grain.IterDataset:
    return planned_micro_batches(dataset, pad_values=PADS, **SETTINGS | settings)


def rows_of(micro_batch: PlannedMicroBatch) -> list[int]:
    return [row for row in micro_batch.batch["row"].tolist() if row >= 0]
