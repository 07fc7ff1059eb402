"""Keywords of a loss as an argument of a jitted function."""

import dataclasses
import sys
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from optax_tokenaccum._core.trees import Leaf, Tree, named_leaves

# The structure of the keywords, and the index of each static leaf with its value.
Static = tuple[Any, tuple[tuple[int, Hashable], ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Keywords:
    """Arrays and Python numbers are traced, every other leaf is static.

    That is the rule of `equinox.filter_jit`, except for numbers.
    """

    traced: list[Leaf]
    static: Static = dataclasses.field(metadata={"static": True})

    def build(self) -> dict[str, Tree]:
        """The keywords, in new containers, which a loss may assign to."""
        structure, kept = self.static
        leaves = [*self.traced]
        for i, x in kept:
            leaves.insert(i, x)
        return structure.unflatten(leaves)


def as_keywords(given: dict[str, Tree]) -> Keywords:
    _check_no_nnx_object(given)
    leaves, structure = jax.tree.flatten(given)
    kept = [(i, x) for i, x in enumerate(leaves) if not _is_traced(x)]
    for i, x in kept:
        if not isinstance(x, Hashable):
            raise TypeError(
                "In a keyword of loss_fn, what is no array or number is static, and "
                f"must be hashable: got a {type(x).__name__} at "
                f"{named_leaves(given)[i][0]}."
            )
    traced = [x for x in leaves if _is_traced(x)] if kept else leaves
    return Keywords(traced, (structure, tuple(kept)))


def _is_traced(x: Leaf) -> bool:
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, arrays) or type(x) in (int, float, complex)


def _check_no_nnx_object(given: dict[str, Tree]) -> None:
    """Raises: what a loss changes in one, such as a count of keys, would be lost."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not given:
        return

    def is_object(x: Any) -> bool:
        return isinstance(x, nnx.Pytree)

    for path, x in jax.tree_util.tree_leaves_with_path(given, is_leaf=is_object):
        if is_object(x):
            raise TypeError(
                "A keyword of loss_fn must not be an NNX object, whose changes would "
                f"be lost: got {type(x).__name__} at {keystr(path)}. Keep nnx.Rngs in "
                "the model; update metrics after the call; pass the graphdef and state "
                "of nnx.split(model)."
            )
