"""Parameters that are overwritten with their gradient: the scales of 8-bit floats."""

from typing import Any

import jax
import jax.numpy as jnp

# What flax calls OVERWRITE_WITH_GRADIENT. In this collection it keeps scales and
# histories of largest values (amax); their "gradient" is what comes next.
COLLECTION = "_overwrite_with_gradient"


def overwritten(tree: Any) -> Any:
    """A tree of bools like `tree`: which leaves are in the collection."""

    def is_in_it(path: Any, leaf: Any) -> bool:
        keys = (getattr(entry, "key", None) for entry in path)
        return COLLECTION in keys and jnp.issubdtype(
            jnp.result_type(leaf), jnp.floating
        )

    return jax.tree_util.tree_map_with_path(is_in_it, tree)


def nothing_yet(x: jax.Array) -> jax.Array:
    """What no value is smaller than: the maximum of no micro-batch."""
    return jnp.full_like(x, -jnp.inf)


def zeroed(gradient: Any) -> Any:
    """`gradient` with zeros for these leaves, which are not to be descended on."""
    return jax.tree.map(
        lambda g, is_overwritten: jnp.zeros_like(g) if is_overwritten else g,
        gradient,
        overwritten(gradient),
    )


def check_has_none(params: Any) -> None:
    """Raises `ValueError` if there are such parameters: an update is added, not put."""
    if any(jax.tree.leaves(overwritten(params))):
        raise ValueError(
            f"{COLLECTION!r} holds values to be overwritten with their gradient, which "
            "an update cannot do: got parameters with that collection. Use "
            "make_train_step, make_window_step or optax_tokenaccum.linen.TrainState; "
            "or keep the collection out of the optimizer's parameters, and overwrite "
            "it yourself with the maximum over the window."
        )
