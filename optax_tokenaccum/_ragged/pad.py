"""A planned micro-batch as arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_tokenaccum._ragged.plan import MicroBatchPlan
from optax_tokenaccum._ragged.sequences import Sequences


def pad_micro_batch(
    sequences: Sequence[Any], plan: MicroBatchPlan, *, pad_values: Any
) -> Any:
    """One planned micro-batch as arrays, padded to its shape.

    Padding must weigh nothing, and what weighs nothing depends on the loss: a mask of
    zeros, or labels that it ignores. So `pad_values` has no default: zeros would count
    as tokens wherever labels are ignored by another number.

    Args:
      sequences: all of the window's, each a pytree whose leaves are `[length, ...]`,
        or scalars of the sequence as a whole. All have one structure.
      plan: one of those that `plan_window` made of their lengths.
      pad_values: what stands where a token or a whole row is missing: a number for all
        leaves, or a tree prefix, `{"inputs": 0, "labels": -100}` say.

    Returns:
      The same tree of NumPy arrays, `[num_rows, length, ...]`, and `[num_rows]` for a
      scalar, in the dtypes that jax keeps (int32 for int64, unless x64 is enabled).

    Raises:
      ValueError: sequences that differ in structure, dtype or shape, or are not those
        of the plan, named by index and leaf; a pad value that its leaf cannot hold.
      TypeError: a leaf or a pad value that is no number.

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum import pad_micro_batch, plan_window
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
    """Writes the sequences of `plan`, a row each, into arrays `[parts, rows, ...]`."""
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
        values = reader.read(index)
        length = reader.length_of(index, values)
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
