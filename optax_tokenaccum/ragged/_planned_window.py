"""A ragged window in arrays whose shapes do not depend on the plan."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._steps.micro_batches import Group, GroupedWindow
from optax_tokenaccum._steps.pad_values import PadValues
from optax_tokenaccum.ragged._pad import pad_plan
from optax_tokenaccum.ragged._plan import plan_window, shapes_of
from optax_tokenaccum.ragged._sequences import Sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PlannedWindow(GroupedWindow):
    """A window whose micro-batches have several shapes, from `pad_window`.

    `make_window_step` and `window_value_and_grad` take a `PlannedWindow` instead of
    micro-batches of one shape. The shapes of its arrays do not depend on the plan, so
    one program runs every window of a run with the same settings.

    Attributes:
      micro_batches: the tree of a sequence. A leaf with tokens is `[capacity, most
        tokens of any shape, ...]`: each row starts with one flattened micro-batch
        `[num_rows, length, ...]`. A leaf of scalars is `[capacity, most rows of any
        shape]`. With several parts, a row is split into equal parts, and each part
        starts with its part of the micro-batch.
      counts: the number of micro-batches of each shape, int32 `[len(shapes)]`. The
        micro-batches are in the order of `shapes`.
      shapes: every `(num_rows, length)` that the settings allow, longest first.
      per_token: for each leaf, whether it has tokens.
      parts: `batch_multiple`. If the number of devices divides it, the devices can
        share the window along the second axis of its arrays.

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum.ragged import pad_window
      >>> sequences = [np.ones(n) for n in (2, 7, 3)]
      >>> window = pad_window(
      ...     sequences, pad_values=0, max_tokens=12, length_buckets=[4, 8])
      >>> print(window.shapes, window.counts, window.micro_batches.shape)
      ((1, 8), (3, 4)) [1 1] (3, 12)
    """

    micro_batches: Batch
    counts: jax.Array | np.ndarray
    shapes: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    per_token: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The number of micro-batches that there is room for."""
        return jax.tree.leaves(self.micro_batches)[0].shape[0]

    def groups(self) -> list[Group]:
        stops = jnp.cumsum(self.counts)
        return [
            Group(
                stops[n] - self.counts[n],
                stops[n],
                functools.partial(self.micro_batch, shape=shape),
            )
            for n, shape in enumerate(self.shapes)
        ]

    def micro_batch(self, i: int | jax.Array, shape: tuple[int, int]) -> Batch:
        """Returns micro-batch `i`, which must have this shape; `i` may be traced."""
        num_rows, length = shape

        def read(x: jax.Array, per_token: bool) -> jax.Array:
            # With several devices, each device sees some parts of the micro-batch.
            here = self.parts * x.shape[1] // _most_of(self.shapes, per_token)
            size = num_rows // self.parts * (length if per_token else 1)
            x = x.reshape(len(x), here, -1, *x.shape[2:])
            # Slice one micro-batch: a slice of all would be copied before the loop.
            first = (i, *[jnp.zeros_like(i)] * (x.ndim - 1))
            flat = jax.lax.dynamic_slice(x, first, (1, here, size, *x.shape[3:]))
            return flat.reshape(-1, *[length] * per_token, *x.shape[3:])

        leaves, structure = jax.tree.flatten(self.micro_batches)
        return jax.tree.unflatten(structure, map(read, leaves, self.per_token))


def pad_window(
    sequences: Sequence[Batch],
    *,
    pad_values: PadValues,
    max_tokens: int,
    length_buckets: Sequence[int] | None = None,
    batch_multiple: int = 1,
    max_sequences: int | None = None,
    cost: Callable[[int, int], float] | None = None,
) -> PlannedWindow:
    """Plans a window of ragged sequences, and lays it out for one program.

    The window has the micro-batches of `plan_window`, padded as in `pad_micro_batch`.

    Args:
      sequences: the sequences of the window, see `pad_micro_batch`.
      pad_values: the values of missing tokens and rows, see `pad_micro_batch`.
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
      ValueError: as in `plan_window` and `pad_micro_batch`, or there are more sequences
        than `max_sequences`.
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
    plans = plan_window(
        reader.lengths(),
        max_tokens=max_tokens,
        length_buckets=length_buckets,
        batch_multiple=batch_multiple,
        cost=cost,
    )
    plans.sort(key=lambda plan: -plan.length)
    shapes = tuple(reversed(shapes_of(max_tokens, length_buckets, batch_multiple)))
    # Every micro-batch except the last is full, and the longest bucket has the fewest
    # rows. So no plan has more micro-batches than this.
    capacity = math.ceil(max_sequences / shapes[0][0])
    per_token = tuple(leaf.per_token for leaf in reader.leaves)
    arrays = [
        leaf.padding(capacity, _most_of(shapes, leaf.per_token))
        for leaf in reader.leaves
    ]
    parts = as_count(batch_multiple, "batch_multiple")
    for i, plan in enumerate(plans):
        for array, x in zip(arrays, pad_plan(reader, plan), strict=True):
            in_parts = parts, -1, *array.shape[2:]
            x = x.reshape(in_parts)
            array[i].reshape(in_parts)[:, : x.shape[1]] = x
    lengths = [plan.length for plan in plans]
    return PlannedWindow(
        jax.tree.unflatten(reader.structure, arrays),
        np.array([lengths.count(length) for _, length in shapes], np.int32),
        shapes,
        per_token,
        parts,
    )


def _most_of(shapes: tuple[tuple[int, int], ...], per_token: bool) -> int:
    """The most tokens, or the most rows, of any of the shapes."""
    return max(rows * length if per_token else rows for rows, length in shapes)
