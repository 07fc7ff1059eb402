"""Compiling every program of a run before it begins."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

# Wraps the programs, to show how far it is: tqdm.tqdm or rich.progress.track.
Progress = Callable[[list[Any]], Iterable[Any]]


def distinct(batches: Any, name: str) -> list[Any]:
    """One of the `batches` for every structure and every shape and dtype of leaves.

    Raises:
      TypeError: it is no list of them; `name` is for the error.
    """
    is_one = isinstance(batches, Mapping) or hasattr(batches, "dtype")
    if is_one or not isinstance(batches, Iterable):
        raise TypeError(
            f"{name} must be a list, one for each shape of the run: got "
            f"{type(batches).__name__}. Put a single one into a list."
        )
    return list({signature(batch): batch for batch in batches}.values())


def compile_all(
    programs: list[Callable[[], jax.stages.Lowered]], progress: Progress
) -> None:
    """Compiles one after another; `jit` finds each when it is called."""
    for lower in progress(programs):
        lower().compile()


def signature(tree: Any) -> Any:
    """What decides whether `jit` has a program for `tree` already."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((jax.typeof(x), _placement(x)) for x in leaves)


def _placement(x: Any) -> Any:
    """Where `x` must be, if anywhere: `jit` compiles for each placement."""
    is_placed = isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False)
    return x.sharding if is_placed else None
