"""Plans a window of ragged sequences, and pads it for one program."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum.ragged._pad import fill
from optax_tokenaccum.ragged._plan import plan_window, shapes_of
from optax_tokenaccum.ragged._planned_window import PlannedWindow, most_of
from optax_tokenaccum.ragged._sequences import Sequences


def pad_window(
    sequences: Sequence[Any],
    *,
    pad_values: Any,
    max_tokens: int,
    length_buckets: Sequence[int] | None = None,
    batch_multiple: int = 1,
    max_sequences: int | None = None,
    cost: Callable[[int, int], float] | None = None,
) -> PlannedWindow:
    """Plans a window of ragged sequences, and lays it out for one program.

    The window has the micro-batches of `plan_window`, padded as in `pad_micro_batch`.

    Args:
      sequences: the sequences of the window, each a pytree whose leaves are
        `[length, ...]`, or scalars for the sequence as a whole. All sequences have the
        same structure.
      pad_values: the values of missing tokens and rows, see `pad_micro_batch`. They
        must carry no weight in the loss.
      max_tokens: see `plan_window`.
      length_buckets: see `plan_window`. The program compiles one loop per bucket, so
        pass the few buckets that `choose_length_buckets` finds.
      batch_multiple: see `plan_window`. The rows are split into `batch_multiple` parts,
        for the devices of a step with `data_axes`.
      max_sequences: the most sequences in any window of the run; by default the number
        of `sequences`. Set it to use the same program for windows with fewer sequences.
      cost: see `plan_window`.

    Returns:
      A `PlannedWindow` of NumPy arrays, with room for the most micro-batches that any
      plan of `max_sequences` sequences needs.

    Raises:
      ValueError: as in `plan_window` and `pad_micro_batch`, or if there are more
        sequences than `max_sequences`.
      TypeError: as in `plan_window` and `pad_micro_batch`.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from optax_tokenaccum import window_value_and_grad
      >>> from optax_tokenaccum.ragged import pad_window
      >>> def loss_fn(w, batch):
      ...     return jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"])
      >>> sequences = [
      ...     {"x": np.full(n, 1.0 * n), "mask": np.full(n, True)} for n in (2, 7, 1)]
      >>> window = pad_window(sequences, pad_values=0, max_tokens=8)
      >>> f = jax.jit(window_value_and_grad(loss_fn))
      >>> (loss, (num_tokens, _)), grad = f(jnp.asarray(1.0), window)
      >>> print(loss, num_tokens, grad)  # (2 * 2 + 7 * 7 + 1 * 1) / 10
      5.4 10.0 5.4
    """
    reader = Sequences(sequences, pad_values)
    if max_sequences is None:
        max_sequences = len(reader)
    max_sequences = as_count(max_sequences, "max_sequences")
    if len(reader) > max_sequences:
        raise ValueError(
            "max_sequences must be the most sequences of any window: got "
            f"{max_sequences} and a window of {len(reader)}. Raise it, or put fewer "
            "into a window."
        )
    parts = as_count(batch_multiple, "batch_multiple")
    plans = plan_window(
        reader.lengths(),
        max_tokens=max_tokens,
        length_buckets=length_buckets,
        batch_multiple=batch_multiple,
        cost=cost,
    )
    shapes = tuple(reversed(shapes_of(max_tokens, length_buckets, batch_multiple)))
    # Every micro-batch except the last is full, and the longest bucket has the fewest
    # rows. So no plan has more micro-batches than this.
    capacity = math.ceil(max_sequences / shapes[0][0])
    leaves = [
        leaf.padding(capacity, most_of(shapes, leaf.per_token))
        for leaf in reader.leaves
    ]
    plans.sort(key=lambda plan: shapes.index((plan.num_rows, plan.length)))
    for i, plan in enumerate(plans):
        rows = plan.num_rows // parts
        views = []
        for x, leaf in zip(leaves, reader.leaves, strict=True):
            of_each = x[i].reshape(parts, -1, *x.shape[2:])
            row = (plan.length,) if leaf.per_token else ()
            used = of_each[:, : rows * math.prod(row)]
            views.append(used.reshape(parts, rows, *row, *x.shape[2:]))
        fill(views, plan, reader)
    found = [(plan.num_rows, plan.length) for plan in plans]
    return PlannedWindow(
        jax.tree.unflatten(reader.structure, leaves),
        np.array([found.count(shape) for shape in shapes], np.int32),
        shapes,
        tuple(leaf.per_token for leaf in reader.leaves),
        parts,
    )
