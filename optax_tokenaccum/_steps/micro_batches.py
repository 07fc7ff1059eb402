"""Groups the micro-batches of a window by shape, for one loop per group."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._ragged.planned_window import PlannedWindow


class Group(NamedTuple):
    """Consecutive micro-batches of the same shape.

    Attributes:
      start: the index of the first micro-batch in the window.
      stop: the index after the last one.
      pick: returns the micro-batch at an index, which may be traced.
    """

    start: Any
    stop: Any
    pick: Callable[[Any], Any]


def check_micro_batches(micro_batches: Batch, num_micro_batches: Any) -> int:
    """Returns the number of micro-batches that the window has room for.

    Raises:
      ValueError: leading axes differ or are 0; `num_micro_batches` is out of range and
        not an array; or `num_micro_batches` is given with a `PlannedWindow`.
      TypeError: `num_micro_batches` is not an integer.
    """
    if isinstance(micro_batches, PlannedWindow):
        if num_micro_batches is not None:
            raise ValueError(
                "A PlannedWindow holds the number of its micro-batches: got "
                f"num_micro_batches {num_micro_batches} with one. Leave it out; for "
                "less, give pad_window fewer sequences."
            )
        return micro_batches.capacity
    k = trees.leading_axis(micro_batches, "micro_batches")
    is_array = isinstance(num_micro_batches, jax.Array | jax.ShapeDtypeStruct)
    if num_micro_batches is None or is_array:
        return k
    given = checks.as_count(num_micro_batches, "num_micro_batches", least=0)
    if given > k:
        raise ValueError(
            f"num_micro_batches must be at most the {k} micro-batches there are: got "
            f"{given}."
        )
    return k


@contextlib.contextmanager
def explained(micro_batches: Batch, given: Any) -> Iterator[None]:
    """Adds a note with the shapes of micro-batches to any error raised inside.

    Args:
      micro_batches: the micro-batches of a window; a `PlannedWindow` gets no note.
      given: the part of the micro-batches that is used inside.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(micro_batches, PlannedWindow):
            named = trees.named_leaves(given)
            shapes = ", ".join(f"{jnp.shape(x)} at {path}" for path, x in named)
            error.add_note(
                "micro_batches must have leaves [k, micro, ...], and loss_fn is given "
                f"[micro, ...] of these: got shape {shapes}. split_batch(batch, k) "
                "makes them of a batch [k * micro, ...]."
            )
        raise


def groups_of(micro_batches: Batch, num_micro_batches: Any) -> tuple[int, list[Group]]:
    """Returns `(capacity, groups)`, in window order; a stacked tree is one group."""
    capacity = check_micro_batches(micro_batches, num_micro_batches)
    micro_batches = jax.tree.map(jnp.asarray, micro_batches)
    if isinstance(micro_batches, PlannedWindow):
        window, stops = micro_batches, jnp.cumsum(micro_batches.counts)
        return capacity, [
            Group(
                stops[n] - window.counts[n],
                stops[n],
                functools.partial(window.micro_batch, shape=shape),
            )
            for n, shape in enumerate(window.shapes)
        ]

    def pick(i: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), micro_batches
        )

    is_whole = num_micro_batches is None
    stop = capacity if is_whole else _as_bound(num_micro_batches, capacity)
    return capacity, [Group(0, stop, pick)]


def _as_bound(num_micro_batches: Any, k: int) -> jax.Array:
    """Converts the bound to an array, so that all numbers share one program."""
    bound = jnp.asarray(num_micro_batches)
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.integer):
        raise TypeError(
            "num_micro_batches must be an integer scalar: got "
            f"{bound.dtype} of shape {bound.shape}."
        )
    return jnp.clip(bound.astype(jnp.int32), 0, k)
