"""Keyword arguments of a jitted loss: arrays are traced, the rest is static."""

from typing import Any, NamedTuple

import jax
import numpy as np


class StaticPart(NamedTuple):
    """A tree without its arrays; hashable, so that `jit` can compare it."""

    structure: Any
    leaves: tuple[Any, ...]


def split_arrays(tree: Any) -> tuple[list[Any], StaticPart]:
    """Splits `tree` into arrays and numbers, and bools, strings and functions."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if _is_array(x)]
    rest = tuple(_IsArray if _is_array(x) else x for x in leaves)
    return arrays, StaticPart(structure, rest)


def join_arrays(arrays: list[Any], static: StaticPart) -> Any:
    """The inverse of `split_arrays`."""
    remaining = iter(arrays)
    leaves = [next(remaining) if x is _IsArray else x for x in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


class _IsArray:
    """Marks the position of an array among the leaves."""


def _is_array(x: Any) -> bool:
    numbers = np.ndarray, np.generic, int, float, complex
    is_number = isinstance(x, numbers) and not isinstance(x, bool | np.character)
    return is_number or isinstance(x, jax.Array | jax.ShapeDtypeStruct)
