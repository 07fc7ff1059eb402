"""A ragged window as arrays of one shape, whatever its plan: one program for a run."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._ragged.pad import fill
from optax_tokenaccum._ragged.plan import plan_window, shapes_of
from optax_tokenaccum._ragged.sequences import Sequences


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

    micro_batches: Any
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
            here = self.parts * x.shape[1] // _most(self.shapes, per_token)
            size = num_rows // self.parts * (length if per_token else 1)
            x = x.reshape(len(x), here, -1, *x.shape[2:])
            # A slice of all micro-batches would be copied before the loop.
            first = (i, *[jnp.zeros_like(i)] * (x.ndim - 1))
            flat = jax.lax.dynamic_slice(x, first, (1, here, size, *x.shape[3:]))
            return flat.reshape(-1, *[length] * per_token, *x.shape[3:])

        leaves, structure = jax.tree.flatten(self.micro_batches)
        return jax.tree.unflatten(structure, map(read, leaves, self.per_token))


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
        leaf.padding(capacity, _most(shapes, leaf.per_token)) for leaf in reader.leaves
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


def _most(shapes: tuple[tuple[int, int], ...], per_token: bool) -> int:
    """The tokens, or the rows, of the largest of the shapes."""
    return max(rows * length if per_token else rows for rows, length in shapes)
