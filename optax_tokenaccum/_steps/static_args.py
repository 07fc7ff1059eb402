"""Keyword arguments of a jitted loss: arrays are traced, the rest is static."""

from typing import Any, NamedTuple

import jax
import numpy as np


class StaticPart(NamedTuple):
    """What is left of a tree without its arrays; hashable, so `jit` can compare it."""

    structure: Any
    leaves: tuple[Any, ...]


def split(tree: Any) -> tuple[list[Any], StaticPart]:
    """Arrays and numbers out of `tree`, and the rest: bools, strings, functions."""
    leaves, structure = jax.tree.flatten(tree)
    traced = [x for x in leaves if _is_traced(x)]
    return traced, StaticPart(
        structure, tuple(_Traced if _is_traced(x) else x for x in leaves)
    )


def join(traced: list[Any], static: StaticPart) -> Any:
    """The tree that `split` took apart."""
    arrays = iter(traced)
    leaves = [next(arrays) if x is _Traced else x for x in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


class _Traced:
    """Marks the place of an array."""


def _is_traced(x: Any) -> bool:
    kinds = (
        jax.Array,
        jax.ShapeDtypeStruct,
        np.ndarray,
        np.generic,
        int,
        float,
        complex,
    )
    return isinstance(x, kinds) and not isinstance(x, bool | np.character)
