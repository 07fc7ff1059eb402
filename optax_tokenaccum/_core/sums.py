"""How the sum of each parameter adds up, and in which dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Gradients, Params

# Flax's OVERWRITE_WITH_GRADIENT: the scales of 8-bit floats, and histories of their
# largest values (amax). The "gradient" of such a parameter is its next value.
COLLECTION = "_overwrite_with_gradient"


@dataclass(frozen=True)
class Kind:
    """A way to combine the gradients of one parameter over a window."""

    is_gradient: bool  # otherwise the result is the parameter's next value, undivided
    nothing: float  # the value before the first micro-batch
    combine: Callable[[Any, Any], Any]  # (value so far, value of a micro-batch)
    reduce: Callable[[Any, int], Any]  # the same along an axis, over devices

    def emptied(self, total: jax.Array, is_first: jax.Array) -> jax.Array:
        """The value so far: nothing before the first micro-batch of a window."""
        # Not jnp.where: a call of its own for every leaf, traced and lowered.
        return jax.lax.select(is_first, jnp.full_like(total, self.nothing), total)

    def add(self, so_far: jax.Array, x: jax.Array) -> jax.Array:
        """Combines both, and rounds once to the dtype of `so_far`."""
        dtype = so_far.dtype
        wide = at_least_float32(dtype) if self.is_gradient else dtype
        return self.combine(so_far.astype(wide), x.astype(wide)).astype(dtype)

    def added(self, so_far: jax.Array, x: Any, counts: Any) -> jax.Array:
        """The same if `counts`. Selected, not multiplied by a mask: 0 x NaN is NaN."""
        if is_float0(x):
            return so_far
        if trees.is_concrete(counts):
            return self.add(so_far, x) if counts else so_far
        return jax.lax.select(counts, self.add(so_far, x), so_far)


SUM = Kind(True, 0.0, jnp.add, jnp.sum)
MAXIMUM = Kind(False, -jnp.inf, jnp.maximum, jnp.max)


def kinds_of(tree: Any) -> Any:
    """A tree of `Kind` with the structure of `tree`."""

    def kind_of(path: Any, leaf: Any) -> Kind:
        keys = (getattr(entry, "key", None) for entry in path)
        is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return MAXIMUM if COLLECTION in keys and is_float else SUM

    return jax.tree_util.tree_map_with_path(kind_of, tree)


def only_gradients(tree: Any) -> Any:
    """`tree` with zeros for the leaves that are not gradients."""

    def keep(x: Any, kind: Kind) -> Any:
        return x if kind.is_gradient else jnp.zeros_like(x)

    return jax.tree.map(keep, tree, kinds_of(tree))


def norm(gradients: Gradients, dtype: Any) -> jax.Array:
    """The global norm of the leaves that are gradients, in `dtype`."""
    wide = jax.tree.map(
        lambda x: x.astype(common_dtype(x.dtype, dtype)), only_gradients(gradients)
    )
    return optax.tree.norm(wide).astype(dtype)


def check_only_gradients(params: Params) -> None:
    """Raises `ValueError` for parameters that an update cannot overwrite."""
    if not all(kind.is_gradient for kind in jax.tree.leaves(kinds_of(params))):
        raise ValueError(
            f"{COLLECTION!r} holds values to be overwritten with their gradient, which "
            "an update cannot do: got parameters with that collection. Use "
            "make_train_step, make_window_step or optax_tokenaccum.linen.TrainState; "
            "or keep the collection out of the optimizer's parameters, and overwrite "
            "it yourself with the maximum over the window."
        )


def accumulator_dtype_of(param: jax.Array, dtype: Any) -> Any:
    """The dtype of a parameter's sum: `dtype`, made complex if the parameter is."""
    given = jnp.result_type(param)
    if dtype is None:
        return at_least_float32(given)
    if jnp.issubdtype(given, jnp.complexfloating):
        return common_dtype(dtype, jnp.complex64)
    return dtype


def common_dtype(*dtypes: Any) -> Any:
    """The dtype that `dtypes` promote to, even under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x / divisor` in the dtype that both promote to, at least float32."""
    dtype = common_dtype(at_least_float32(x.dtype), divisor.dtype)
    return x.astype(dtype) / divisor.astype(dtype)


def at_least_float32(dtype: Any) -> Any:
    """`dtype`, or float32 if `dtype` is narrower or an integer."""
    # 8-bit floats and 4-bit integers have no implicit promotion: compare bits.
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return jnp.dtype(dtype if is_wide else jnp.float32)


def is_float0(x: Any) -> bool:
    """Whether `x` is the gradient of an integer, which has a shape but no values."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def zeros_of(shape: Any) -> Any:
    """Zeros with the shape and dtype of `shape`; the dtype may be float0."""
    return (np if is_float0(shape) else jnp).zeros(shape.shape, shape.dtype)
