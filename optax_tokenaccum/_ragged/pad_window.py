"""Planning a window of ragged sequences, and padding it for one program."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._ragged.pad import fill
from optax_tokenaccum._ragged.plan import plan_window, shapes_of
from optax_tokenaccum._ragged.planned_window import PlannedWindow, most_of
from optax_tokenaccum._ragged.sequences import Sequences


def pad_window(
    sequences: Sequence[Any],
    *,
    pad_values: Any,
    max_tokens: int,
    length_buckets: Sequence[int] | None = None,
    batch_multiple: int = 1,
    max_sequences: int | None = None,
) -> PlannedWindow:
    """Plans a window of ragged sequences, and lays it out for one program.

    The micro-batches are those of `plan_window`, padded as by `pad_micro_batch`.

    Args:
      sequences: the window's, each a pytree whose leaves are `[length, ...]`, or
        scalars of the sequence as a whole. All have one structure.
      pad_values: what stands where a token or a whole row is missing, see
        `pad_micro_batch`; it must weigh nothing in the loss.
      max_tokens: see `plan_window`.
      length_buckets: see `plan_window`; each is a loop of the program, to be compiled,
        so give the few that `choose_length_buckets` finds.
      batch_multiple: see `plan_window`; the rows are in so many parts, for the devices
        of a step with `data_axes`.
      max_sequences: the most sequences that a window of the run has; by default as many
        as here. Windows with fewer go through the same program only if it is given.

    Returns:
      A `PlannedWindow` of NumPy arrays, with room for the most micro-batches that any
      plan of `max_sequences` needs.

    Raises:
      ValueError: as for `plan_window` and `pad_micro_batch`; more sequences than
        `max_sequences`.
      TypeError: likewise.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from optax_tokenaccum import pad_window, window_value_and_grad
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
    settings: Any = {
        "max_tokens": max_tokens,
        "length_buckets": length_buckets,
        "batch_multiple": batch_multiple,
    }
    lengths = [reader.length_of(i, reader.read(i)) for i in range(len(reader))]
    plans = plan_window(lengths, **settings)
    shapes = tuple(reversed(shapes_of(**settings)))
    # Every micro-batch of a plan but the last is full, and none has fewer rows than
    # those of the longest bucket: so there are never more than this.
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
