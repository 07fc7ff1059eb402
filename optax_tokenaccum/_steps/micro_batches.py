"""The micro-batches of a window in groups of one shape, for a loop over each."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._ragged.planned_window import PlannedWindow


class Group(NamedTuple):
    """Micro-batches of one shape.

    Attributes:
      start: the first one's index in the window.
      stop: the index behind the last one.
      pick: the micro-batch at an index, which may be traced.
    """

    start: Any
    stop: Any
    pick: Callable[[Any], Any]


def check_micro_batches(micro_batches: Any, num_micro_batches: Any) -> int:
    """The micro-batches that there is room for.

    Raises:
      ValueError: leading axes that differ or are 0; a bound outside of them, unless it
        is an array, or one beside a `PlannedWindow`.
      TypeError: a bound that is no integer.
    """
    if isinstance(micro_batches, PlannedWindow):
        if num_micro_batches is not None:
            raise ValueError(
                "A PlannedWindow holds the number of its micro-batches: got "
                f"num_micro_batches {num_micro_batches} beside one. Leave it out; for "
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
def explained(micro_batches: Any, given: Any) -> Iterator[None]:
    """Says in a note of any error inside what a loop over micro-batches made of them.

    Args:
      micro_batches: of a window.
      given: what of them is used inside.
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


def groups_of(micro_batches: Any, num_micro_batches: Any) -> tuple[int, list[Group]]:
    """`(capacity, groups)` in the order of the micro-batches; a stacked tree is one."""
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
    """An array even where it is known, so that all numbers share one program."""
    bound = jnp.asarray(num_micro_batches)
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.integer):
        raise TypeError(
            "num_micro_batches must be an integer scalar: got "
            f"{bound.dtype} of shape {bound.shape}."
        )
    return jnp.clip(bound.astype(jnp.int32), 0, k)
