"""How the sum of each parameter adds up, and in which dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import DType, Gradients, TracedBool


def emptied(total: jax.Array, is_first: TracedBool) -> jax.Array:
    """The sum so far: nothing before the first micro-batch of a window."""
    if trees.is_concrete(is_first) and not is_first:
        return total
    # Not jnp.where: a call of its own for every leaf, traced and lowered.
    return jax.lax.select(is_first, jnp.zeros_like(total), total)


def add(so_far: jax.Array, x: jax.Array) -> jax.Array:
    """The sum of both, rounded once to the dtype of `so_far`."""
    wide = at_least_float32(so_far.dtype)
    return (so_far.astype(wide) + x.astype(wide)).astype(so_far.dtype)


def add_if(counts: TracedBool, so_far: jax.Array, x: jax.Array) -> jax.Array:
    """The same if `counts`. Selected, not multiplied by a mask: 0 x NaN is NaN."""
    if is_float0(x):
        return so_far
    if trees.is_concrete(counts):
        return add(so_far, x) if counts else so_far
    return jax.lax.select(counts, add(so_far, x), so_far)


def add_or_zero(counts: TracedBool, so_far: jax.Array, x: jax.Array) -> jax.Array:
    """The same, with zeros in the place of `x` unless `counts`.

    In a loop, XLA can then reduce `x` over devices once, after it. It cannot where a
    sum is selected.
    """
    if is_float0(x) or trees.is_concrete(counts):
        return add_if(counts, so_far, x)
    return add(so_far, jax.lax.select(counts, x, jnp.zeros_like(x)))


def norm(gradients: Gradients, dtype: DType) -> jax.Array:
    """The global norm, in `dtype`."""
    wide = jax.tree.map(lambda x: x.astype(common_dtype(x.dtype, dtype)), gradients)
    return optax.tree.norm(wide).astype(dtype)


def accumulator_dtype_of(param: jax.Array, dtype: DType | None) -> DType:
    """The dtype of a parameter's sum: `dtype`, made complex if the parameter is."""
    given = jnp.result_type(param)
    if dtype is None:
        return at_least_float32(given)
    if jnp.issubdtype(given, jnp.complexfloating):
        return common_dtype(dtype, jnp.complex64)
    return dtype


def common_dtype(*dtypes: DType) -> DType:
    """The dtype that `dtypes` promote to, even under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x / divisor` in the dtype that both promote to, at least float32."""
    dtype = common_dtype(at_least_float32(x.dtype), divisor.dtype)
    return x.astype(dtype) / divisor.astype(dtype)


def at_least_float32(dtype: DType) -> DType:
    """`dtype`, or float32 if `dtype` is narrower or an integer."""
    # 8-bit floats and 4-bit integers have no implicit promotion: compare bits.
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return jnp.dtype(dtype if is_wide else jnp.float32)


def is_float0(x: jax.typing.ArrayLike | jax.ShapeDtypeStruct) -> bool:
    """Whether `x` is the gradient of an integer, which has a shape but no values."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def zeros_of(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
    """Zeros with the shape and dtype of `like`; the dtype may be float0."""
    return (np if is_float0(like) else jnp).zeros(like.shape, like.dtype)
