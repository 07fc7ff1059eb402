"""Keyword arguments of a loss, as an argument of a jitted function."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike


class _IsArray:
    """Marks the position of an array among the leaves."""


# The structure of all arguments, and in their order the static ones and `_IsArray`.
Static = tuple[PyTreeDef, tuple[Hashable, ...]]


@jax.tree_util.register_pytree_node_class
class Keywords(Mapping[str, Any]):
    """A tree whose leaves are the arrays and numbers among the arguments.

    Bools, strings and functions are static: part of its structure, and hashable.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        leaves, structure = jax.tree.flatten(dict(arguments))
        self._arrays = [x for x in leaves if _is_array(x)]
        static = tuple(_IsArray if _is_array(x) else x for x in leaves)
        self._static: Static = structure, static

    def tree_flatten(self) -> tuple[list[ArrayLike], Static]:
        return self._arrays, self._static

    @classmethod
    def tree_unflatten(cls, static: Static, arrays: Iterable[ArrayLike]) -> "Keywords":
        keywords = cls({})
        keywords._arrays, keywords._static = list(arrays), static
        return keywords

    def _arguments(self) -> dict[str, Any]:
        arrays, (structure, leaves) = iter(self._arrays), self._static
        return structure.unflatten(next(arrays) if x is _IsArray else x for x in leaves)

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
