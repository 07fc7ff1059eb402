"""A ragged window as arrays whose shapes do not depend on its plan."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PlannedWindow:
    """A window whose micro-batches have several shapes, from `pad_window`.

    `make_window_step` and `window_value_and_grad` take it in place of micro-batches of
    one shape. Its own shapes do not depend on the plan, so every window of a run with
    the same settings goes through one program.

    Attributes:
      micro_batches: the tree of a sequence. A leaf of tokens is `[capacity, most tokens
        of any shape, ...]`, a micro-batch `[num_rows, length, ...]` of it flat in the
        beginning of a row; a leaf of scalars `[capacity, most rows of any shape]`. With
        several parts each is so in its part of the row.
      counts: how many micro-batches have each shape, int32 `[len(shapes)]`; they stand
        in the order of `shapes`.
      shapes: every `(num_rows, length)` that the settings allow, the longest first.
      per_token: of each leaf, whether it is one of tokens.
      parts: equal parts that the rows of a micro-batch are in, `batch_multiple`: so
        devices that divide them can share the window, along its second axis.

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum import pad_window
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
        """The micro-batches that there is room for."""
        return jax.tree.leaves(self.micro_batches)[0].shape[0]

    def micro_batch(self, i: Any, shape: tuple[int, int]) -> Any:
        """The micro-batch at `i`, which may be traced, given that it has this shape."""
        num_rows, length = shape

        def read(x: Any, per_token: bool) -> Any:
            # One device of several sees some parts of the micro-batch.
            here = self.parts * x.shape[1] // most_of(self.shapes, per_token)
            size = num_rows // self.parts * (length if per_token else 1)
            x = x.reshape(len(x), here, -1, *x.shape[2:])
            # A slice of all micro-batches would be copied before the loop.
            first = (i, *[jnp.zeros_like(i)] * (x.ndim - 1))
            flat = jax.lax.dynamic_slice(x, first, (1, here, size, *x.shape[3:]))
            return flat.reshape(-1, *[length] * per_token, *x.shape[3:])

        leaves, structure = jax.tree.flatten(self.micro_batches)
        return jax.tree.unflatten(structure, map(read, leaves, self.per_token))


def most_of(shapes: tuple[tuple[int, int], ...], per_token: bool) -> int:
    """The tokens, or the rows, of the largest of the shapes."""
    return max(rows * length if per_token else rows for rows, length in shapes)
