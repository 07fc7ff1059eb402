"""The structure that ragged sequences share, and the padding of their leaves."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._steps.pad_values import PadValues, as_pad, is_number, with_pads


class Leaf(NamedTuple):
    """A leaf that every sequence has."""

    path: str
    per_token: bool  # whether it is [length, ...], and not one number per sequence
    features: tuple[int, ...]  # its shape after the token axis
    pad: np.ndarray  # the value of a missing token, in a dtype that jax keeps

    def padding(self, *shape: int) -> np.ndarray:
        """An array of this leaf that holds only padding."""
        return np.full((*shape, *self.features), self.pad)

    def expects(self) -> str:
        axes = ", ".join(map(str, ("length", *self.features)))
        return f"{self.pad.dtype}[{axes}]" if self.per_token else f"{self.pad.dtype}"


class Sequences:
    """The sequences of a window, each checked against the first when it is read."""

    def __init__(self, sequences: Sequence[Batch], pad_values: PadValues):
        if isinstance(sequences, Mapping) or not hasattr(sequences, "__getitem__"):
            raise TypeError(
                "sequences must be a list of sequences, each a pytree of arrays "
                f"[length, ...]: got {type(sequences).__name__}."
            )
        if len(sequences) == 0:
            raise ValueError("There must be at least one sequence: got none.")
        self._sequences = sequences
        self.structure = jax.tree.structure(sequences[0])
        given = with_pads(sequences[0], pad_values, "a sequence")
        self.leaves = [_as_leaf(*leaf) for leaf in given]
        if not any(leaf.per_token for leaf in self.leaves):
            raise ValueError(
                "A sequence must have a leaf with an axis, its tokens: got only "
                f"scalars, {self.structure}. A list is a container: give "
                "np.asarray(tokens)."
            )

    def __len__(self) -> int:
        return len(self._sequences)

    def read(self, index: int) -> tuple[list[np.ndarray], int]:
        """The leaves of one sequence, checked against the first, and its length."""
        leaves, structure = jax.tree.flatten(self._sequences[index])
        if structure != self.structure:
            raise ValueError(
                "All sequences must have the structure of the first: expected "
                f"{self.structure}, got {structure} at index {index}. A list is a "
                "container: give np.asarray(tokens)."
            )
        arrays, lengths = [np.asarray(x) for x in leaves], []
        for leaf, x in zip(self.leaves, arrays, strict=True):
            got = x.ndim > 0, x.shape[1:], jax.dtypes.canonicalize_dtype(x.dtype)
            if got != (leaf.per_token, leaf.features, leaf.pad.dtype):
                raise ValueError(
                    "All sequences must have the dtypes and shapes of the first: at "
                    f"{leaf.path} expected {leaf.expects()}, got {x.dtype} of shape "
                    f"{x.shape} at index {index}."
                )
            if leaf.per_token:
                lengths.append((leaf.path, len(x)))
        (first, length), *others = lengths
        for path, other in others:
            if other != length:
                raise ValueError(
                    f"The leaves of a sequence must have one length: got {length} at "
                    f"{first} and {other} at {path} of the sequence at index {index}. "
                    "Cut inputs and labels alike."
                )
        return arrays, length


def _as_leaf(path: str, x: Any, pad: Any) -> Leaf:
    given = np.asarray(x)
    if not is_number(given):
        raise TypeError(
            f"The leaves of a sequence must be numbers: got {given.dtype} at {path} of "
            "the sequence at index 0."
        )
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(given.dtype))
    return Leaf(path, given.ndim > 0, given.shape[1:], as_pad(pad, dtype, path))
