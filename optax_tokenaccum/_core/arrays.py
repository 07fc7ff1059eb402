"""Prepares arrays for donation and avoids a second compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from optax_tokenaccum._core.trees import Params, is_concrete


def accumulator_dtype_of(param: jax.Array, dtype: Any) -> Any:
    """The dtype of a parameter's sum: `dtype`, made complex if the parameter is.

    With `dtype=None` it is float32, or the parameter's dtype if that is wider.
    """
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


def without_float0(x: Any, like: jax.Array) -> Any:
    """`x`, or zeros like `like` if `x` is the gradient of an integer."""
    return jnp.zeros_like(like) if is_float0(x) else x


def zeros_of(shape: Any) -> Any:
    """Zeros with the shape and dtype of `shape`; the dtype may be float0."""
    return (np if is_float0(shape) else jnp).zeros(shape.shape, shape.dtype)


def stable(params: Params, state: Any) -> Any:
    """`state` as strongly typed arrays on the devices of `params`.

    This is the form in which `update` returns the state. A Python number, a weak type,
    or a scalar on the default device while the parameters are elsewhere would make the
    second call compile again. The `init` of some optimizers returns an array twice, or
    returns one of `params`. Such an array is copied, because a buffer can be donated
    only once.
    """
    where = home(params)
    taken = {id(x) for x in jax.tree.leaves(params)}

    def settle(x: Any) -> Any:
        x = settled(x, taken)
        return jax.device_put(x, where) if where and is_unplaced(x) else x

    return jax.tree.map(settle, state)


def settled(x: Any, taken: set[int]) -> Any:
    """`x`, strongly typed, copied if its id is in `taken`; adds the id to `taken`."""
    is_taken = id(x) in taken
    taken.add(id(x))
    return _copy(x) if is_taken else _as_strong_array(x)


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` with the dtypes of `like`, strongly typed."""

    def cast(x: Any, y: Any) -> Any:
        x = _as_strong_array(x)
        return x if x.dtype == y.dtype else x.astype(y.dtype)

    return jax.tree.map(cast, tree, like)


def owned(tree: Any) -> Any:
    """Copies every leaf, so that donating the copies keeps the caller's arrays alive.

    Raises:
      TypeError: a leaf is not an array.
    """
    originals, structure = jax.tree_util.tree_flatten_with_path(tree)
    copies = []
    # Copy one leaf at a time and drop each original as soon as it is copied, so that
    # a large state is never in memory twice.
    del tree
    originals.reverse()
    while originals:
        path, leaf = originals.pop()
        if not hasattr(_as_strong_array(leaf), "dtype"):
            raise TypeError(
                "Parameters and the optimizer's state must be pytrees of arrays: at "
                f"{jax.tree_util.keystr(path) or 'the root'} got "
                f"{type(leaf).__name__}. Keep other leaves out of the parameters, with "
                "equinox.partition for example, and give them to loss_fn as a keyword."
            )
        copies.append(_copy(leaf))
        del leaf
    return jax.tree.unflatten(structure, copies)


def _copy(x: Any) -> jax.Array:
    return jnp.array(_as_strong_array(x), copy=True)


def _as_strong_array(x: Any) -> Any:
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic):
        x = jnp.asarray(x)
    if getattr(x, "weak_type", False):
        return jax.lax.convert_element_type(x, x.dtype)
    return x


def is_unplaced(x: Any) -> bool:
    """Whether `x` is an array that is not committed to a device."""
    return isinstance(x, jax.Array) and is_concrete(x) and not x.committed


def home(params: Params, whole: bool = True) -> jax.sharding.Sharding | None:
    """The sharding of the first placed array of `params`, replicated if `whole`."""
    for leaf in jax.tree.leaves(params):
        if not isinstance(leaf, jax.Array) or not is_concrete(leaf):
            continue
        if leaf.committed and isinstance(leaf.sharding, NamedSharding):
            spec = PartitionSpec() if whole else leaf.sharding.spec
            return NamedSharding(leaf.sharding.mesh, spec)
        if leaf.committed and isinstance(leaf.sharding, SingleDeviceSharding):
            return leaf.sharding
    return None
