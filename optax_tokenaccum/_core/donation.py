"""Arrays that a call may donate: strongly typed, in their place, none of them twice."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from optax_tokenaccum._core.trees import Leaf, Params, T, Tree, is_concrete


def canonicalize_state(params: Params, state: T) -> T:
    """`state` as strongly typed arrays, placed like `params`, none of them twice."""
    where = scalar_sharding(params)
    taken = {id(x) for x in jax.tree.leaves(params)}

    # A Python number, a weak type, or a scalar on the default device while parameters
    # are elsewhere would make the second call compile again.
    def settle(x: Leaf) -> Leaf:
        # The `init` of some optimizers returns an array twice, which cannot be donated.
        x = strong_and_unaliased(x, taken)
        is_unplaced = isinstance(x, jax.Array) and is_concrete(x) and not x.committed
        return jax.device_put(x, where) if where and is_unplaced else x

    return jax.tree.map(settle, state)


def strong_and_unaliased(x: Leaf, taken: set[int]) -> Leaf:
    """`x`, strongly typed, copied if its id is in `taken`; adds the id to `taken`."""
    if isinstance(x, jax.ShapeDtypeStruct):  # nothing to donate
        return x
    is_taken = id(x) in taken
    taken.add(id(x))
    return jnp.array(_strong(x), copy=True) if is_taken else _strong(x)


def copy_aliased(donated: T, given: Tree) -> tuple[T, Tree]:
    """The arguments of a call, with copies where an array is there again."""
    # A buffer that is donated can be neither donated nor read again in the same call.
    leaves = jax.tree.leaves((donated, given))
    if len({*map(id, leaves)}) == len(leaves):
        return donated, given
    seen: set[int] = set()

    def own(x: Leaf) -> Leaf:
        is_copied = id(x) in seen and isinstance(x, jax.Array) and is_concrete(x)
        seen.add(id(x))
        return jnp.array(x, copy=True) if is_copied else x

    return jax.tree.map(own, (donated, given))


def copy_for_donation(tree: T) -> T:
    """Copies every leaf: donating the copies keeps the caller's arrays alive."""
    leaves, structure = jax.tree.flatten(tree)
    # Drop each original as soon as it is copied, so that a large state is never in
    # memory twice.
    del tree
    for i, x in enumerate(leaves):
        leaves[i] = x = jnp.array(_strong(x), copy=True)
    return jax.tree.unflatten(structure, leaves)


def _strong(x: Leaf) -> Leaf:
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic):
        x = jnp.asarray(x)
    if getattr(x, "weak_type", False):
        return jax.lax.convert_element_type(x, x.dtype)
    return x


def scalar_sharding(params: Params) -> jax.sharding.Sharding | None:
    """Where scalars belong: on all devices of the first leaf that has a place."""
    for leaf in jax.tree.leaves(params):
        if not is_concrete(leaf) or not getattr(leaf, "committed", True):
            continue
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, SingleDeviceSharding):
            return sharding
    return None
