"""Parameters that their "gradient" overwrites, split off before anything is summed.

These are the scales of 8-bit floats in Flax, and the histories of their largest values
(amax): the "gradient" of such a parameter is its next value. Over the micro-batches and
devices of a window that is the maximum. An optimizer sees zeros in its place.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jax.typing import ArrayLike
from optax import Params

from optax_tokenaccum._core.trees import Gradients, T, TracedBool

COLLECTION = "_overwrite_with_gradient"  # flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT
NOTHING = -jnp.inf  # the maximum of no micro-batches


class Split(NamedTuple):
    """A tree like the parameters, in two parts.

    Attributes:
      trained: the tree, with `None` in the place of every value to be overwritten.
      values: these values.
    """

    trained: Params
    values: list[jax.Array]


def split(tree: Params, like: Params | None = None) -> Split:
    """Splits a tree, by its own paths and dtypes or by those of `like`."""
    marks = [
        is_overwritten(path, x)
        for path, x in jax.tree_util.tree_leaves_with_path(
            tree if like is None else like
        )
    ]
    if not any(marks):
        return Split(tree, [])
    leaves, structure = jax.tree.flatten(tree)
    pairs = [*zip(leaves, marks, strict=True)]
    trained = structure.unflatten([None if mark else x for x, mark in pairs])
    return Split(trained, [x for x, mark in pairs if mark])


def join(trained: Params, values: list[T], like: Params) -> Params:
    """The inverse of `split`; `like` has the tree of the result."""
    if not values:
        return trained
    others, own = iter(jax.tree.leaves(trained)), iter(values)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: next(own if is_overwritten(path, x) else others), like
    )


def with_zeros(trained: Gradients, params: Params) -> Gradients:
    """Gradients as an optimizer sees them."""
    return join(trained, [*map(jnp.zeros_like, split(params).values)], params)


def is_overwritten(path: KeyPath, x: ArrayLike) -> bool:
    keys = (getattr(entry, "key", None) for entry in path)
    return COLLECTION in keys and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def add(
    so_far: list[jax.Array],
    values: list[jax.Array],
    is_first: TracedBool,
    counts: TracedBool,
) -> list[jax.Array]:
    """The maxima over a window, with the values of a micro-batch if it counts."""

    def largest(total: jax.Array, x: jax.Array) -> jax.Array:
        total = jnp.where(is_first, NOTHING, total).astype(total.dtype)
        return jnp.where(counts, jnp.maximum(total, x), total)

    return [*map(largest, so_far, values)]


def check_nothing_is_overwritten(params: Params) -> None:
    """Raises `ValueError` for parameters that an optax update cannot overwrite."""
    if split(params).values:
        raise ValueError(
            f"{COLLECTION!r} holds values to be overwritten with their gradient, which "
            "an update cannot do: got parameters with that collection. Use "
            "make_train_step, make_window_step or optax_tokenaccum.linen.TrainState; "
            "or keep the collection out of the optimizer's parameters, and overwrite "
            "it yourself with the maximum over the window."
        )
