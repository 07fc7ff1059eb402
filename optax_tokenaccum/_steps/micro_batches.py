"""Groups the micro-batches of a window by shape, and runs one loop per group."""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.once import as_returned
from optax_tokenaccum._core.trees import Batch

Carry = TypeVar("Carry")  # what a loop hands on
Aux = TypeVar("Aux")
Bound = ArrayLike | None  # of the micro-batches that run
Index = int | jax.Array
Pick = Callable[[Index], Batch]  # the micro-batch at an index, which may be traced

STACK = (
    "A list of micro-batches must be stacked into one tree: jax.tree.map(lambda *xs: "
    "jnp.stack(xs), *micro_batches). For different shapes use pad_window, or "
    "make_train_step, which takes one micro-batch per call."
)


class Group(NamedTuple):
    """Consecutive micro-batches of the same shape, from index `start` to `stop`."""

    start: Index
    stop: Index
    pick: Pick


class GroupedWindow(abc.ABC):
    """A window of micro-batches of several shapes, which hands them out in groups."""

    @property
    @abc.abstractmethod
    def parts(self) -> int:
        """The number of equal parts that the rows of a micro-batch are in."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """The number of micro-batches that there is room for."""

    @abc.abstractmethod
    def groups(self) -> list[Group]:
        """The micro-batches, in window order; those of a group have one shape."""


def check_micro_batches(micro_batches: Batch, num_micro_batches: Bound) -> int:
    """The number of micro-batches that the window has room for."""
    if isinstance(micro_batches, GroupedWindow):
        if num_micro_batches is not None:
            raise ValueError(
                "A PlannedWindow holds the number of its micro-batches: got "
                f"num_micro_batches {num_micro_batches} with one. Leave it out; for "
                "less, give pad_window fewer sequences."
            )
        return micro_batches.capacity
    try:
        k = trees.leading_axis(micro_batches, "micro_batches")
    except ValueError as error:
        if _is_list_of_trees(micro_batches):
            error.add_note(STACK)
        raise
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
def explained(micro_batches: Batch, given: Batch) -> Iterator[None]:
    """Adds a note with the shapes of `given`, a part of a stacked window, to errors."""
    try:
        yield
    except Exception as error:
        if not isinstance(micro_batches, GroupedWindow):
            named = trees.named_leaves(given)
            shapes = ", ".join(f"{jnp.shape(x)} at {path}" for path, x in named)
            error.add_note(
                "micro_batches must have leaves [k, micro, ...], and loss_fn is given "
                f"[micro, ...] of these: got shape {shapes}. split_batch(batch, k) "
                "makes them of a batch [k * micro, ...]."
            )
            if _is_list_of_trees(micro_batches):
                error.add_note(STACK)
        raise


def _is_list_of_trees(micro_batches: Batch) -> bool:
    """Whether this may be a list of micro-batches; it may also be a batch of trees."""
    if not isinstance(micro_batches, list | tuple) or hasattr(micro_batches, "_fields"):
        return False
    structures = {jax.tree.structure(x) for x in micro_batches}
    return len(structures) == 1 and not jax.tree_util.treedef_is_leaf(*structures)


def groups_of(
    micro_batches: Batch, num_micro_batches: Bound
) -> tuple[int, list[Group]]:
    """Returns `(capacity, groups)`, in window order; a stacked tree is one group."""
    capacity = check_micro_batches(micro_batches, num_micro_batches)
    micro_batches = jax.tree.map(jnp.asarray, micro_batches)
    if isinstance(micro_batches, GroupedWindow):
        return capacity, micro_batches.groups()

    def pick(i: Index) -> Batch:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), micro_batches
        )

    if num_micro_batches is None:
        return capacity, [Group(0, capacity, pick)]
    bound = jnp.asarray(num_micro_batches)  # all numbers share one program
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.integer):
        raise TypeError(
            "num_micro_batches must be an integer scalar: got "
            f"{bound.dtype} of shape {bound.shape}."
        )
    return capacity, [Group(0, jnp.clip(bound.astype(jnp.int32), 0, capacity), pick)]


def for_each(
    groups: list[Group],
    add: Callable[[Batch, Carry], tuple[Carry, Aux]],
    carry: Carry,
    aux_of: Callable[[Batch], Aux] | None,
    capacity: int,
) -> tuple[Carry, Aux | None]:
    """Runs `add(micro_batch, carry) -> (carry, aux)` in window order.

    Args:
      groups: from `groups_of`.
      add: is called once for each micro-batch.
      carry: before the first.
      aux_of: `aux_of(micro_batch)` has the shapes of `aux`, and is never computed;
        `None` if there is no `aux`.
      capacity: number of micro-batches that the window has room for.

    Returns:
      `(carry, aux)`, `aux` stacked `[capacity, ...]`, or `None`.
    """
    auxes = None
    if aux_of is not None:
        auxes = jax.tree.map(
            lambda x: jnp.zeros((capacity, *x.shape), x.dtype),
            _shapes_of(aux_of, groups),
        )

    def body(pick: Pick, i: Index, so_far: tuple[Carry, Any]) -> Any:
        carry, auxes = so_far
        carry, aux = add(pick(i), carry)
        auxes = jax.tree.map(
            lambda xs, x: xs.at[i].set(x, mode="promise_in_bounds"), auxes, aux
        )
        return carry, auxes

    return loop(groups, body, (carry, auxes))


def loop(
    groups: list[Group], body: Callable[[Pick, Index, Carry], Carry], carry: Carry
) -> Carry:
    """Runs `body(pick, i, carry) -> carry` for each micro-batch."""
    for group in groups:
        own = functools.partial(body, group.pick)
        carry = as_returned(functools.partial(own, 0), carry)
        carry = jax.lax.fori_loop(group.start, group.stop, own, carry)
    return carry


def _shapes_of(aux_of: Callable[[Batch], Aux], groups: list[Group]) -> Aux:
    rule = (
        "aux must have the same shapes in micro-batches of every length, for it is "
        "stacked (reduce what is per row or per token in loss_fn)"
    )
    shapes = [jax.eval_shape(lambda g=g: aux_of(g.pick(0))) for g in groups]
    for other in shapes:
        trees.check_same_tree(other, shapes[0], rule)
    return shapes[0]
