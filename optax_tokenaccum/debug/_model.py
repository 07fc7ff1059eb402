"""A model as a list of arrays that are trained, for `audit` and `check_loss_fn`."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.donation import copy_for_donation


class Model:
    """The float arrays of a pytree or an Equinox module, or an NNX model's `Param`s."""

    def __init__(self, model: Any):
        self._tree, self._merge = _params_of(model)
        self._leaves, self._structure = jax.tree.flatten(self._tree)
        named = enumerate(trees.named_leaves(self._tree))
        found = [(i, p, x) for i, (p, x) in named if _is_array(x) and trees.is_float(x)]
        if not found:
            got = type(model).__name__
            raise TypeError(f"params must hold arrays of floats: got a {got}.")
        self._places, self.names, arrays = zip(*found, strict=True)
        self.trained: list[jax.Array] = copy_for_donation([*arrays])

    def build(self, trained: list[jax.Array]) -> Any:
        """A model like the given one, with copies of these arrays."""
        leaves = copied(self._leaves)
        for i, array in zip(self._places, copy_for_donation(trained), strict=True):
            leaves[i] = array
        return self._merge(self._structure.unflatten(leaves))

    def numbers(self, model: Any) -> np.ndarray:
        """The trained numbers of what a loop made of this model, as float64."""
        tree, _ = _params_of(model)
        got, expected = (
            jax.tree.map(lambda x: np.empty(x.shape) if _is_array(x) else 0, one)
            for one in (tree, self._tree)
        )
        trees.check_same_tree(got, expected, "run must return the parameters, moved")
        leaves = jax.tree.leaves(tree)
        for before, after in zip(self._leaves, leaves, strict=True):
            if isinstance(before, float) and before != after:  # Equinox has constants
                raise TypeError(f"params must be arrays: {before} was trained.")
        return as_vector([leaves[i] for i in self._places])


def _params_of(model: Any) -> tuple[trees.Tree, Callable[[trees.Tree], Any]]:
    """The tree of a model's parameters, and the way back from such a tree."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(model, nnx.Module):
        return model, lambda tree: tree
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params: nnx.merge(graph, params, copied(rest))


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic | jax.Array)


def copied(tree: trees.T) -> trees.T:
    """The tree with copies of its arrays, which may be changed or donated."""
    return jax.tree.map(lambda x: copy.copy(x) if _is_array(x) else x, tree)


def as_vector(arrays: list[Any]) -> np.ndarray:
    """All numbers as float64; a complex one is two."""
    parts = [np.ravel(np.asarray(x)) for x in arrays]
    return np.concatenate([x.view(x.real.dtype).astype(np.float64) for x in parts])
