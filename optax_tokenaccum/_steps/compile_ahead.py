"""Compiles every program of a run before the run begins."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax

# Wraps the list of programs to show progress: tqdm.tqdm or rich.progress.track.
Progress = Callable[[list[Any]], Iterable[Any]]


def compile_all(
    lower: Callable[[Any], jax.stages.Lowered],
    batches: Any,
    name: str,
    progress: Progress,
    *others: Callable[[], jax.stages.Lowered],
) -> None:
    """Compiles `lower(batch)` for all shapes of batches, called `name` in errors.

    Later calls of `jit` find the programs. `others` are compiled last.
    """
    is_one = isinstance(batches, Mapping) or hasattr(batches, "dtype")
    if is_one or not isinstance(batches, Iterable):
        raise TypeError(
            f"{name} must be a list, one for each shape of the run: got "
            f"{type(batches).__name__}. Put a single one into a list."
        )
    distinct = {signature(batch): batch for batch in batches}.values()
    for program in progress([*(partial(lower, x) for x in distinct), *others]):
        program().compile()


def signature(tree: Any) -> Any:
    """The properties of `tree` that decide whether `jit` has to compile."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((jax.typeof(x), _placement(x)) for x in leaves)


def _placement(x: Any) -> Any:
    """The sharding to which `x` is bound, or `None`."""
    is_placed = isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False)
    return x.sharding if is_placed else None
