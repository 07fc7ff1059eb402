"""A ragged window in arrays whose shapes do not depend on the plan."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._steps.micro_batches import Group, GroupedWindow


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
      parts: the number of equal parts that the rows of a micro-batch are split into,
        `batch_multiple`. If the number of devices divides `parts`, the devices can
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
    counts: Any
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

    def micro_batch(self, i: Any, shape: tuple[int, int]) -> Any:
        """Returns micro-batch `i`, which must have this shape; `i` may be traced."""
        num_rows, length = shape

        def read(x: Any, per_token: bool) -> Any:
            # With several devices, each device sees some parts of the micro-batch.
            here = self.parts * x.shape[1] // most_of(self.shapes, per_token)
            size = num_rows // self.parts * (length if per_token else 1)
            x = x.reshape(len(x), here, -1, *x.shape[2:])
            # Slice one micro-batch: a slice of all would be copied before the loop.
            first = (i, *[jnp.zeros_like(i)] * (x.ndim - 1))
            flat = jax.lax.dynamic_slice(x, first, (1, here, size, *x.shape[3:]))
            return flat.reshape(-1, *[length] * per_token, *x.shape[3:])

        leaves, structure = jax.tree.flatten(self.micro_batches)
        return jax.tree.unflatten(structure, map(read, leaves, self.per_token))


def most_of(shapes: tuple[tuple[int, int], ...], per_token: bool) -> int:
    """The most tokens, or the most rows, of any of the shapes."""
    return max(rows * length if per_token else rows for rows, length in shapes)
