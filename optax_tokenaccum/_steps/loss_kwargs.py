"""Keyword arguments of a jitted loss: arrays are traced, the rest is static."""

from typing import Any, NamedTuple

import jax
import numpy as np


class StaticPart(NamedTuple):
    """What is left of a tree without its arrays; hashable, so `jit` can compare it."""

    structure: Any
    leaves: tuple[Any, ...]


def split_arrays(tree: Any) -> tuple[list[Any], StaticPart]:
    """The arrays and numbers of `tree`, and the rest: bools, strings, functions."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if _is_array(x)]
    rest = tuple(_IsArray if _is_array(x) else x for x in leaves)
    return arrays, StaticPart(structure, rest)


def join_arrays(arrays: list[Any], static: StaticPart) -> Any:
    """The tree that `split_arrays` took apart."""
    remaining = iter(arrays)
    leaves = [next(remaining) if x is _IsArray else x for x in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


class _IsArray:
    """Marks the place of an array."""


def _is_array(x: Any) -> bool:
    numbers = np.ndarray, np.generic, int, float, complex
    is_number = isinstance(x, numbers) and not isinstance(x, bool | np.character)
    return is_number or isinstance(x, jax.Array | jax.ShapeDtypeStruct)
