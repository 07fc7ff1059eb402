"""How the sum of each parameter adds up: a sum of gradients, or a maximum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import Params

# Flax's OVERWRITE_WITH_GRADIENT: the scales of 8-bit floats, and histories of their
# largest values (amax). The "gradient" of such a parameter is its next value.
COLLECTION = "_overwrite_with_gradient"


@dataclass(frozen=True)
class Kind:
    """A way to combine the gradients of one parameter over a window.

    Attributes:
      is_gradient: whether the optimizer sees the result, divided by the window's
        tokens. If not, the result is the parameter's next value.
      nothing: the value before the first micro-batch.
      combine: combines the value so far with that of a micro-batch.
      reduce: the same along an axis, `reduce(x, axis)`, for the values of devices.
    """

    is_gradient: bool
    nothing: float
    combine: Callable[[Any, Any], Any]
    reduce: Callable[[Any, int], Any]


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
    return jax.tree.map(
        lambda x, kind: x if kind.is_gradient else jnp.zeros_like(x),
        tree,
        kinds_of(tree),
    )


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
