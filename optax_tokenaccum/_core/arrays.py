"""Prepares arrays for donation and avoids a second compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike

from optax_tokenaccum._core.trees import OptState, T, is_array, is_concrete, name_of


def stable(params: Any, state: T) -> T:
    """`state` as strongly typed arrays on the devices of `params`.

    This is the form in which `update` returns the state. A Python number, a weak type,
    or a scalar on the default device while the parameters are elsewhere would make the
    second call compile again. The `init` of some optimizers returns an array twice, or
    returns one of `params`. Such an array is copied, because a buffer can be donated
    only once.
    """
    where = home(params)
    taken = {id(x) for x in jax.tree.leaves(params)}

    def settle(x: ArrayLike) -> jax.Array:
        x = settled(x, taken)
        is_unplaced = isinstance(x, jax.Array) and is_concrete(x) and not x.committed
        return jax.device_put(x, where) if where and is_unplaced else x

    return jax.tree.map(settle, state)


def settled(x: ArrayLike, taken: set[int]) -> jax.Array:
    """`x`, strongly typed, copied if its id is in `taken`; adds the id to `taken`."""
    if isinstance(x, jax.ShapeDtypeStruct):  # nothing to donate
        return x
    is_taken = id(x) in taken
    taken.add(id(x))
    return _copy(x) if is_taken else _as_strong_array(x)


def cast_like(tree: OptState, like: T) -> T:
    """`tree` with the dtypes of `like`, strongly typed."""

    def cast(x: ArrayLike, y: jax.Array) -> jax.Array:
        x = _as_strong_array(x)
        return x if x.dtype == y.dtype else x.astype(y.dtype)

    return jax.tree.map(cast, tree, like)


def owned(tree: T) -> T:
    """Copies every leaf: donating the copies keeps the caller's arrays alive."""
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
                f"{name_of(path)} got {type(leaf).__name__}. Keep other leaves out of "
                "the parameters, with equinox.partition for example, and give them to "
                "loss_fn as a keyword."
            )
        copies.append(_copy(leaf))
        del leaf
    return jax.tree.unflatten(structure, copies)


def _copy(x: ArrayLike) -> jax.Array:
    return jnp.array(_as_strong_array(x), copy=True)


def _as_strong_array(x: ArrayLike) -> jax.Array:
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic):
        x = jnp.asarray(x)
    if getattr(x, "weak_type", False):
        return jax.lax.convert_element_type(x, x.dtype)
    return x


def home(params: optax.Params, whole: bool = True) -> jax.sharding.Sharding | None:
    """The sharding of the first placed leaf of `params`, replicated if `whole`.

    Leaves may be shapes, which are placed if they have a sharding.
    """
    for leaf in jax.tree.leaves(params):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if not is_shape and not (is_array(leaf) and leaf.committed):
            continue
        if isinstance(leaf.sharding, NamedSharding):
            spec = PartitionSpec() if whole else leaf.sharding.spec
            return NamedSharding(leaf.sharding.mesh, spec)
        if isinstance(leaf.sharding, SingleDeviceSharding):
            return leaf.sharding
    return None
