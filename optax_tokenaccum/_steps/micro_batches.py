"""The stacked micro-batches of a window, and the loop over them."""

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
    "jnp.stack(xs), *micro_batches). For different shapes use make_train_step, which "
    "takes one micro-batch per call."
)


class Stack(NamedTuple):
    """The micro-batches that run.

    Attributes:
      capacity: how many there is room for.
      stop: how many run.
      pick: `pick(i)` is one of them.
    """

    capacity: int
    stop: Index
    pick: Pick


def check_micro_batches(micro_batches: Batch, num_micro_batches: Bound) -> int:
    """The number of micro-batches that the window has room for."""
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


def stack_of(micro_batches: Batch, num_micro_batches: Bound) -> Stack:
    """Checks the micro-batches of a window."""
    capacity = check_micro_batches(micro_batches, num_micro_batches)
    micro_batches = jax.tree.map(jnp.asarray, micro_batches)

    def pick(i: Index) -> Batch:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), micro_batches
        )

    if num_micro_batches is None:
        return Stack(capacity, capacity, pick)
    bound = jnp.asarray(num_micro_batches)  # all numbers share one program
    if bound.shape != () or not jnp.issubdtype(bound.dtype, jnp.integer):
        raise TypeError(
            "num_micro_batches must be an integer scalar: got "
            f"{bound.dtype} of shape {bound.shape}."
        )
    return Stack(capacity, jnp.clip(bound.astype(jnp.int32), 0, capacity), pick)


def for_each(
    stack: Stack,
    add: Callable[[Batch, Carry], tuple[Carry, Aux]],
    carry: Carry,
    aux_of: Callable[[Batch], Aux] | None,
) -> tuple[Carry, Aux | None]:
    """Runs `add(micro_batch, carry) -> (carry, aux)` in window order.

    Args:
      stack: the micro-batches.
      add: is called once for each of them.
      carry: before the first.
      aux_of: `aux_of(micro_batch)` has the shapes of `aux`, and is never computed;
        `None` if there is no `aux`.

    Returns:
      `(carry, aux)`, `aux` stacked `[capacity, ...]`, or `None`.
    """
    auxes = None
    if aux_of is not None:
        auxes = jax.tree.map(
            lambda x: jnp.zeros((stack.capacity, *x.shape), x.dtype),
            jax.eval_shape(lambda: aux_of(stack.pick(0))),
        )

    def body(i: Index, so_far: tuple[Carry, Any]) -> Any:
        carry, auxes = so_far
        carry, aux = add(stack.pick(i), carry)
        auxes = jax.tree.map(
            lambda xs, x: xs.at[i].set(x, mode="promise_in_bounds"), auxes, aux
        )
        return carry, auxes

    begun = as_returned(functools.partial(body, 0), (carry, auxes))
    return jax.lax.fori_loop(0, stack.stop, body, begun)
