"""The structure that ragged sequences share, and the padding of their leaves."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_tokenaccum._core.trees import named_leaves
from optax_tokenaccum._steps.pad_values import as_pad, broadcast_pads, is_number


class Leaf(NamedTuple):
    """A leaf that every sequence has."""

    path: str
    per_token: bool  # whether it is [length, ...], and not one number per sequence
    features: tuple[int, ...]  # its shape after the token axis
    dtype: np.dtype  # of the padded array, one that jax keeps
    pad: np.ndarray  # the value of a missing token, of type `dtype`

    def padding(self, *shape: int) -> np.ndarray:
        """An array of this leaf that holds only padding."""
        return np.full((*shape, *self.features), self.pad, self.dtype)

    def expects(self) -> str:
        axes = ", ".join(map(str, ("length", *self.features)))
        return f"{self.dtype.name}[{axes}]" if self.per_token else self.dtype.name


class Sequences:
    """The sequences of a window, each checked against the first when it is read.

    A sequence is a pytree. A leaf with an axis has a row for each token; a scalar
    belongs to the sequence as a whole.
    """

    def __init__(self, sequences: Any, pad_values: Any):
        if isinstance(sequences, Mapping) or not hasattr(sequences, "__getitem__"):
            raise TypeError(
                "sequences must be a list of sequences, each a pytree of arrays "
                f"[length, ...]: got {type(sequences).__name__}."
            )
        if len(sequences) == 0:
            raise ValueError("There must be at least one sequence: got none.")
        self._sequences = sequences
        self.structure = jax.tree.structure(sequences[0])
        pads = jax.tree.leaves(broadcast_pads(pad_values, sequences[0], "a sequence"))
        self.leaves = [
            _as_leaf(path, x, pad)
            for (path, x), pad in zip(named_leaves(sequences[0]), pads, strict=True)
        ]
        if not any(leaf.per_token for leaf in self.leaves):
            raise ValueError(
                "A sequence must have a leaf with an axis, its tokens: got only "
                f"scalars, {self.structure}. A list is a container: give "
                "np.asarray(tokens)."
            )

    def __len__(self) -> int:
        return len(self._sequences)

    def lengths(self) -> list[int]:
        return [self.read(index)[1] for index in range(len(self))]

    def read(self, index: int) -> tuple[list[np.ndarray], int]:
        """The leaves of one sequence, checked against the first, and its length."""
        leaves, structure = jax.tree.flatten(self._sequences[index])
        if structure != self.structure:
            raise ValueError(
                "All sequences must have the structure of the first: expected "
                f"{self.structure}, got {structure} at index {index}. A list is a "
                "container: give np.asarray(tokens)."
            )
        arrays = [np.asarray(x) for x in leaves]
        for leaf, x in zip(self.leaves, arrays, strict=True):
            got = bool(x.ndim), x.shape[1:], jax.dtypes.canonicalize_dtype(x.dtype)
            if got != (leaf.per_token, leaf.features, leaf.dtype):
                raise ValueError(
                    "All sequences must have the dtypes and shapes of the first: at "
                    f"{leaf.path} expected {leaf.expects()}, got {x.dtype} of shape "
                    f"{x.shape} at index {index}."
                )
        first, *others = [
            (len(x), leaf.path)
            for leaf, x in zip(self.leaves, arrays, strict=True)
            if leaf.per_token
        ]
        for other in others:
            if other[0] != first[0]:
                raise ValueError(
                    "The leaves of a sequence must have one length: got "
                    f"{first[0]} at {first[1]} and {other[0]} at {other[1]} of the "
                    f"sequence at index {index}. Cut inputs and labels alike."
                )
        return arrays, first[0]


def _as_leaf(path: str, x: Any, pad: Any) -> Leaf:
    given = np.asarray(x)
    if not is_number(given):
        raise TypeError(
            f"The leaves of a sequence must be numbers: got {given.dtype} at {path} of "
            "the sequence at index 0."
        )
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(given.dtype))
    pad = as_pad(pad, dtype, path)
    return Leaf(path, bool(given.ndim), given.shape[1:], dtype, pad)
