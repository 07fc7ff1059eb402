"""Keyword arguments of a loss, as an argument of a jitted function."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np


class _IsArray:
    """Marks the position of an array among the leaves."""


@jax.tree_util.register_pytree_node_class
class Keywords(Mapping[str, Any]):
    """A tree whose leaves are the arrays and numbers among the arguments.

    Bools, strings and functions are static: part of its structure, and hashable.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        leaves, self._structure = jax.tree.flatten(dict(arguments))
        self._arrays = [x for x in leaves if _is_array(x)]
        self._static = tuple(_IsArray if _is_array(x) else x for x in leaves)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self._arrays, (self._structure, self._static)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Keywords":
        keywords = cls.__new__(cls)
        keywords._structure, keywords._static = static
        keywords._arrays = list(arrays)
        return keywords

    def _arguments(self) -> dict[str, Any]:
        arrays = iter(self._arrays)
        return self._structure.unflatten(
            next(arrays) if x is _IsArray else x for x in self._static
        )

    def __getitem__(self, name: str) -> Any:
        return self._arguments()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments())

    def __len__(self) -> int:
        return len(self._arguments())


def _is_array(x: Any) -> bool:
    numbers = np.ndarray, np.generic, int, float, complex
    is_number = isinstance(x, numbers) and not isinstance(x, bool | np.character)
    return is_number or isinstance(x, jax.Array | jax.ShapeDtypeStruct)
