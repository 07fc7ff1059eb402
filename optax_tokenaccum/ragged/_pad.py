"""Pads a planned micro-batch to arrays."""

from collections.abc import Sequence

import jax
import numpy as np

from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._steps.pad_values import PadValues
from optax_tokenaccum.ragged._plan import MicroBatchPlan
from optax_tokenaccum.ragged._sequences import Sequences


def pad_micro_batch(
    sequences: Sequence[Batch], plan: MicroBatchPlan, *, pad_values: PadValues
) -> Batch:
    """Pads the sequences of one planned micro-batch to arrays of its shape.

    Padding must carry no weight in the loss, and which values carry none depends on the
    loss: a mask of zeros, or labels that the loss ignores. So `pad_values` has no
    default: zeros would count as tokens if the loss ignores another label.

    Args:
      sequences: all sequences of the window, each a pytree of the same structure whose
        leaves are `[length, ...]`, or scalars for the sequence as a whole.
      plan: one of the plans that `plan_window` made from the lengths of `sequences`.
      pad_values: the values of missing tokens and rows: a number for all leaves, or a
        tree prefix, for example `{"inputs": 0, "labels": -100}`.

    Returns:
      The tree of a sequence with NumPy arrays as leaves: `[num_rows, length, ...]`, or
      `[num_rows]` for a scalar. Their dtypes are the ones that jax keeps (int32 for
      int64, unless x64 is enabled).

    Raises:
      ValueError: sequences differ in structure, dtype or shape, or do not match the
        plan (the error names index and leaf); or a leaf cannot hold its pad value.
      TypeError: a leaf or a pad value is not a number.

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
    return jax.tree.unflatten(reader.structure, pad_plan(reader, plan))


def pad_plan(sequences: Sequences, plan: MicroBatchPlan) -> list[np.ndarray]:
    """The leaves of one planned micro-batch."""
    if len(plan.indices) > plan.num_rows:
        raise ValueError(
            "A micro-batch must have a row for each of its sequences: got "
            f"{len(plan.indices)} sequences and num_rows {plan.num_rows}. Plan with "
            "plan_window."
        )
    shape = plan.num_rows, plan.length
    arrays = [leaf.padding(*shape[: 1 + leaf.per_token]) for leaf in sequences.leaves]
    for row, index in enumerate(map(int, plan.indices)):
        if not 0 <= index < len(sequences):
            raise _not_of_these(f"index {index} and {len(sequences)} sequences")
        values, length = sequences.read(index)
        if length > plan.length:
            raise _not_of_these(
                f"one of {length} tokens at index {index} for a micro-batch of length "
                f"{plan.length}"
            )
        for array, x in zip(arrays, values, strict=True):
            if x.ndim:
                array[row, :length] = x
            else:
                array[row] = x
    return arrays


def _not_of_these(got: str) -> ValueError:
    return ValueError(
        f"The plan must be one of these sequences: got {got}. Give all of the "
        "window's, in the order of the lengths that were planned."
    )
