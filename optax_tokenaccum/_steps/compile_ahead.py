"""Compiles every program of a run before the run begins."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

# Wraps the list of programs to show progress: tqdm.tqdm or rich.progress.track.
Progress = Callable[[list[Any]], Iterable[Any]]


def distinct(batches: Any, name: str) -> list[Any]:
    """Returns one of the `batches` for each distinct `signature`.

    Args:
      batches: a list of batches, or of their shapes.
      name: the name of this argument in errors.

    Raises:
      TypeError: `batches` is not a list.
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
    """Compiles the programs one by one; later calls of `jit` find them."""
    for lower in progress(programs):
        lower().compile()


def signature(tree: Any) -> Any:
    """The properties of `tree` that decide whether `jit` has to compile."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((jax.typeof(x), _placement(x)) for x in leaves)


def _placement(x: Any) -> Any:
    """The sharding to which `x` is bound, or `None`; `jit` compiles for each one."""
    is_placed = isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False)
    return x.sharding if is_placed else None
