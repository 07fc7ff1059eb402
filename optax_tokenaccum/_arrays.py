"""Arrays that survive donation and never cause a second compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from optax_tokenaccum._checks import is_concrete


def accumulator_dtype_of(param: jax.Array, dtype: Any) -> Any:
    """The dtype of a parameter's sum: `dtype`, or float32, or wider if it is wider."""
    given = jnp.result_type(param)
    if dtype is None:
        return jnp.promote_types(given, jnp.float32)
    if jnp.issubdtype(given, jnp.complexfloating):
        return jnp.promote_types(dtype, jnp.complex64)
    return dtype


def stable(params: Any, state: Any) -> Any:
    """`state` as `update` will return it: arrays, strongly typed, beside `params`.

    A Python number, a weak type or a scalar left on the default device while the
    parameters live elsewhere would each cost a second compilation on the second call.
    """
    state = jax.tree.map(_as_strong_array, state)
    home = _home(params)
    if home is None:
        return state
    return jax.tree.map(
        lambda x: x if not _is_placed(x, False) else jax.device_put(x, home), state
    )


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` with the dtypes of `like`, strongly typed."""

    def cast(x: Any, y: Any) -> Any:
        x = _as_strong_array(x)
        return x if x.dtype == y.dtype else x.astype(y.dtype)

    return jax.tree.map(cast, tree, like)


def owned(tree: Any) -> Any:
    """Copies of every leaf, as arrays: donating them leaves the caller's alive."""
    return jax.tree.map(lambda x: jnp.array(_as_strong_array(x), copy=True), tree)


def unaliased(tree: Any) -> Any:
    """`tree` with no array twice: a buffer can be donated only once."""
    seen: set[int] = set()

    def copy_if_seen(x: Any) -> Any:
        if id(x) in seen:
            return jnp.array(x, copy=True)
        seen.add(id(x))
        return x

    return jax.tree.map(copy_if_seen, tree)


def _as_strong_array(x: Any) -> Any:
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic):
        x = jnp.asarray(x)
    if getattr(x, "weak_type", False):
        return jax.lax.convert_element_type(x, x.dtype)
    return x


def _is_placed(x: Any, committed: bool) -> bool:
    return isinstance(x, jax.Array) and is_concrete(x) and x.committed == committed


def _home(params: Any) -> jax.sharding.Sharding | None:
    for leaf in jax.tree.leaves(params):
        if _is_placed(leaf, True):
            if isinstance(leaf.sharding, NamedSharding):
                return NamedSharding(leaf.sharding.mesh, PartitionSpec())
            if isinstance(leaf.sharding, SingleDeviceSharding):
                return leaf.sharding
    return None
