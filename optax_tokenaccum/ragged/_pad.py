"""Pads a planned micro-batch to arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_tokenaccum.ragged._plan import MicroBatchPlan
from optax_tokenaccum.ragged._sequences import Sequences


def pad_micro_batch(
    sequences: Sequence[Any], plan: MicroBatchPlan, *, pad_values: Any
) -> Any:
    """Pads the sequences of one planned micro-batch to arrays of its shape.

    Padding must carry no weight in the loss, and which values carry no weight depends
    on the loss: a mask of zeros, or labels that the loss ignores. So `pad_values` has
    no default: zeros would count as tokens if the loss ignores another label.

    Args:
      sequences: all sequences of the window, each a pytree whose leaves are
        `[length, ...]`, or scalars for the sequence as a whole. All sequences have the
        same structure.
      plan: one of the plans that `plan_window` made from the lengths of `sequences`.
      pad_values: the values of missing tokens and rows: a number for all leaves, or a
        tree prefix, for example `{"inputs": 0, "labels": -100}`.

    Returns:
      The tree of a sequence with NumPy arrays as leaves: `[num_rows, length, ...]`, or
      `[num_rows]` for a scalar. Their dtypes are the ones that jax keeps (int32 for
      int64, unless x64 is enabled).

    Raises:
      ValueError: if sequences differ in structure, dtype or shape, or do not match the
        plan (the error names index and leaf); or if a leaf cannot hold its pad value.
      TypeError: if a leaf or a pad value is not a number.

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum.ragged import pad_micro_batch, plan_window
      >>> sequences = [{"labels": np.arange(1, n + 1)} for n in (2, 7, 3)]
      >>> long, short = plan_window([2, 7, 3], max_tokens=12, length_buckets=[4, 8])
      >>> print(pad_micro_batch(sequences, short, pad_values=-100)["labels"])
      [[   1    2    3 -100]
       [   1    2 -100 -100]
       [-100 -100 -100 -100]]
    """
    reader = Sequences(sequences, pad_values)
    shape = plan.num_rows, plan.length
    arrays = [leaf.padding(*shape[: 1 + leaf.per_token]) for leaf in reader.leaves]
    fill([array[None] for array in arrays], plan, reader)
    return jax.tree.unflatten(reader.structure, arrays)


def fill(arrays: list[np.ndarray], plan: MicroBatchPlan, reader: Sequences) -> None:
    """Writes each sequence of `plan` to a row of the arrays, `[parts, rows, ...]`."""
    if len(plan.indices) > plan.num_rows:
        raise ValueError(
            "A micro-batch must have a row for each of its sequences: got "
            f"{len(plan.indices)} sequences and num_rows {plan.num_rows}. Plan with "
            "plan_window."
        )
    for row, index in enumerate(map(int, plan.indices)):
        if not 0 <= index < len(reader):
            raise ValueError(
                "The plan must be one of these sequences: got index "
                f"{index} and {len(reader)} sequences. Give all of the window's, in "
                "the order of the lengths that were planned."
            )
        values, length = reader.read(index)
        if length > plan.length:
            raise ValueError(
                "The plan must be one of these sequences: got one of "
                f"{length} tokens at index {index} for a micro-batch of length "
                f"{plan.length}. Give all of the window's, in the order of the lengths "
                "that were planned."
            )
        for array, x in zip(arrays, values, strict=True):
            place = divmod(row, array.shape[1])
            if x.ndim:
                array[place][:length] = x
            else:
                array[place] = x
