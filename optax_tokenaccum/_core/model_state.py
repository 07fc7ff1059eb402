"""What a loss changes besides parameters: statistics, keys and counters of a model.

A model's state is any tree of arrays, the same on all devices between calls.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import M, check_same_tree, named_leaves

# The new values of leaves, by their index. Those that do not change are left out.
Changes = dict[int, jax.Array]


def with_own_keys(model_state: M, own_key: Callable[[jax.Array], jax.Array]) -> M:
    """The state as a device sees it, which makes keys its own."""

    def own(x: jax.Array) -> jax.Array:
        return jax.vmap(own_key)(x.reshape(-1)).reshape(x.shape) if _is_key(x) else x

    return jax.tree.map(own, model_state)


def changes(old: M, new: M) -> Changes:
    """What differs in `new`, which must have the tree, shapes and kinds of numbers."""
    rule = (
        "loss_fn must return the model state with the tree, shapes and kinds of "
        "numbers that it was given"
    )
    check_same_tree(new, old, rule)
    changed: Changes = {}
    pairs = zip(named_leaves(old), jax.tree.leaves(new), strict=True)
    for i, ((path, x), y) in enumerate(pairs):
        if y is x:
            continue
        got, kept = jnp.result_type(y), jnp.result_type(x)
        if _kind(got) > _kind(kept) or _is_key(y) != _is_key(x):
            raise ValueError(f"{rule}: at {path} expected {kept}, got {got}.")
        changed[i] = jnp.asarray(y)
    return changed


def integers_of(model_state: M, changed: Changes) -> dict[str, jax.Array]:
    """The new integers and bools, by their paths: no mean can be taken of these."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model_state)]
    return {
        jax.tree_util.keystr(paths[i]).removeprefix("."): x
        for i, x in changed.items()
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    }


def updated(
    model_state: M,
    changed: Changes,
    skipped: jax.Array,
    unify: Callable[[jax.Array], jax.Array],
) -> M:
    """Takes over what a micro-batch changed, unless it was skipped.

    `unify` makes one value of those that the devices have.
    """

    def take(old: jax.Array, new: jax.Array) -> jax.Array:
        new = unify(new)
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        return jnp.where(skipped, old, new)

    leaves, structure = jax.tree.flatten(model_state)
    return structure.unflatten(
        [take(x, changed[i]) if i in changed else x for i, x in enumerate(leaves)]
    )


def _is_key(x: jax.typing.ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _kind(dtype: jax.typing.DTypeLike) -> int:
    """The place among the kinds of numbers, of which each may be cast to the next."""
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
    return sum(jnp.issubdtype(dtype, kind) * i for i, kind in enumerate(kinds))
