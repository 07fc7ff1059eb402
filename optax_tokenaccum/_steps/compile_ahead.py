"""Compiles every program of a run before the run begins."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from optax_tokenaccum._core.trees import Batch, T

# Wraps the list of programs to show progress: tqdm.tqdm or rich.progress.track.
Progress = Callable[[list[T]], Iterable[T]]


class Lowering(NamedTuple):
    """A program that is not compiled yet."""

    lowered: jax.stages.Lowered
    arguments: tuple[Any, ...]  # trees of arrays or of their shapes


class Programs(NamedTuple):
    """All programs of a run.

    Attributes:
      state: the state that they run on.
      for_batch: the program for batches of the shapes of a given batch.
      others: the programs that no batch is given to.
      in_one_call: whether a call of the step runs `others` after `for_batch`.
    """

    state: Any
    for_batch: Callable[[Batch], Lowering]
    others: tuple[Callable[[], Lowering], ...] = ()
    in_one_call: bool = False


def compile_all(
    programs: Programs, batches: Iterable[T], name: str, progress: Progress
) -> None:
    """Compiles the programs for all shapes of batches, called `name` in errors.

    Later calls of `jit` find them.
    """
    distinct = distinct_batches(batches, name)
    lowerings = [partial(programs.for_batch, batch) for batch in distinct]
    for lowering in progress([*lowerings, *programs.others]):
        lowering().lowered.compile()


def distinct_batches(batches: Iterable[T], name: str) -> list[T]:
    """One batch of each shape."""
    is_one = isinstance(batches, Mapping) or hasattr(batches, "dtype")
    if is_one or not isinstance(batches, Iterable):
        raise TypeError(
            f"{name} must be a list, one for each shape of the run: got "
            f"{type(batches).__name__}. Put a single one into a list."
        )
    return [*{signature(batch): batch for batch in batches}.values()]


def signature(tree: T) -> Hashable:
    """The properties of `tree` that decide whether `jit` has to compile."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((jax.typeof(x), _placement(x)) for x in leaves)


def _placement(x: ArrayLike | jax.ShapeDtypeStruct) -> jax.sharding.Sharding | None:
    """The sharding to which `x` is bound, or `None`."""
    is_placed = isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False)
    return getattr(x, "sharding", None) if is_placed else None
