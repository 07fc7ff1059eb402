"""Values that fill missing tokens and rows."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_tokenaccum._core.trees import T, named_leaves

# A number for all leaves of a tree, or a tree prefix of such numbers.
PadValues = ArrayLike | Mapping | Sequence | None


def with_pads(
    tree: T, pad_values: PadValues, name: str
) -> list[tuple[str, jax.Array | np.ndarray, ArrayLike]]:
    """`(path, leaf, pad value)` for every leaf of `tree`; errors call it `name`."""
    try:
        pads = jax.tree.leaves(jax.tree.broadcast(pad_values, tree))
    except ValueError as error:
        raise ValueError(
            f"pad_values must be one number for all leaves of {name}, or a number "
            f"for each, or for each subtree: got {name} with the leaves "
            f"{_leaf_names(tree)}, and pad_values for {_leaf_names(pad_values)}."
        ) from error
    leaves = named_leaves(tree)
    return [(path, leaf, pad) for (path, leaf), pad in zip(leaves, pads, strict=True)]


def _leaf_names(tree: T) -> str:
    return ", ".join(path for path, _ in named_leaves(tree)) or "none"


def as_pad(pad: ArrayLike, dtype: np.dtype, path: str) -> np.ndarray:
    """The pad value of the leaf at `path`, which must be able to hold it."""
    given = np.asarray(pad)
    if given.shape != () or not is_number(given):
        raise TypeError(
            f"A pad value must be a number: got {pad!r} for {path}. What weighs "
            "nothing depends on the loss: for example False for a mask, or -100 for "
            "labels with ignore_index=-100."
        )
    is_complex = [jnp.issubdtype(d, jnp.complexfloating) for d in (given.dtype, dtype)]
    if is_complex != [True, False]:
        with np.errstate(all="ignore"):
            cast = given.astype(dtype)
        if jnp.issubdtype(dtype, jnp.inexact):
            # Rounding is fine; overflow and a change to or from NaN are not.
            fits = np.isfinite(cast) == np.isfinite(given)
            fits &= np.isnan(cast) == np.isnan(given)
        else:
            fits = cast == given
        if fits:
            return cast
    raise ValueError(
        f"A pad value must fit the dtype of its leaf: got {pad!r} for {path} of "
        f"{dtype}. Give each leaf its own, for example pad_values={{'inputs': 0, "
        "'mask': False}."
    )


def is_number(x: np.ndarray) -> bool:
    return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.number)
