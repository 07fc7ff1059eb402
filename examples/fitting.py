"""Chooses the rows of a micro-batch by memory, for `--micro-batch-size auto`.

`optax_tokenaccum.largest_micro_batch` compiles the train step for a few sizes, with one
program for each padded length, and runs none of them.
"""

import re
from argparse import ArgumentTypeError

import numpy as np
from batches import Batch
from transformer import Params

from optax_tokenaccum import MicroBatchFit, TrainStep, largest_micro_batch

UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


class MemoryLimitError(Exception):
    """No micro-batch fits, or the memory of the device is not known."""


def num_bytes(text: str) -> int:
    """Bytes, from text such as 500MB, 2GB or 1.5GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|B)", text)
    if found is None or found[2] not in UNITS:
        raise ArgumentTypeError(
            f"must be a number and one of {', '.join(UNITS)}, like 2GB, got {text!r}"
        )
    return int(float(found[1]) * UNITS[found[2]])


def fit_rows(
    step: TrainStep,
    params: Params,
    frozen: Params,
    lengths: list[int],
    limit_bytes: int | None,
    devices: int = 1,
) -> MicroBatchFit:
    """Finds the most rows that fit, at every length that micro-batches are padded to.

    Args:
      step: the train step of the run.
      params: the parameters to train.
      frozen: the parameters that are not trained.
      lengths: the padded lengths.
      limit_bytes: the memory of a device; `None` where the device tells it.
      devices: the number of devices that share the rows.

    Raises:
      MemoryLimitError: not even a row fits, or the device does not tell its memory.
    """

    def batch_of(rows: int) -> list[Batch]:
        return [
            Batch(
                np.zeros((rows, length), np.int32),
                np.zeros((rows, length), np.int32),
                np.zeros((rows, length), bool),
            )
            for length in lengths
        ]

    try:
        return largest_micro_batch(
            step,
            step.init(params),
            batch_of,
            limit_bytes=limit_bytes,
            multiple_of=devices,
            frozen=frozen,
        )
    except ValueError as error:
        raise MemoryLimitError(
            f"--micro-batch-size, --memory-limit: {error}"
        ) from error
