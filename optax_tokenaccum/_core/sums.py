"""Where the sums of an open window live: one for all devices, or one on each."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import trees
from optax_tokenaccum._devices.axes import Axes


@dataclass(frozen=True)
class Sums:
    """One sum for each parameter, of its shape and placed like it."""

    axes: Axes = Axes()

    def zeros(self, params: Any, dtypes: Any) -> Any:
        """Sums of nothing, as the state holds them."""
        return jax.tree.map(lambda p, dtype: jnp.zeros_like(p, dtype), params, dtypes)

    def opened(self, stored: Any) -> Any:
        """The sums to add to, of the parameters' shapes."""
        return stored

    def stored(self, opened: Any) -> Any:
        """The inverse of `opened`."""
        return opened

    def total(self, stored: Any) -> Any:
        """The sums over all devices: run once, when the window closes."""
        return stored

    def settled(self, params: Any) -> Any:
        """Parameters after an update, where they were before it."""
        return params


@dataclass(frozen=True)
class SumsPerDevice(Sums):
    """A sum of each device's own, seen from that device, under a map over `axes`.

    The state holds it with a leading axis of 1. So outside of the map the sums are one
    array, `[devices, ...]`, that says what they are and can be saved.
    """

    def zeros(self, params: Any, dtypes: Any) -> Any:
        def zero(p: Any, dtype: Any) -> jax.Array:
            x = jnp.zeros((1, *jnp.shape(p)), dtype)
            # Where init is called outside of the map, the map's specs decide.
            return self.axes.differing(x) if self.axes.are_bound else x

        return jax.tree.map(zero, params, dtypes)

    def opened(self, stored: Any) -> Any:
        for path, x in trees.named_leaves(stored):
            if jnp.shape(x)[:1] != (1,):
                raise ValueError(
                    "With axis_name every device must see its own sum of each "
                    f"gradient, in an array [1, ...]: at {path} of acc_grads got shape "
                    f"{jnp.shape(x)}. Call init with this axis_name, and give the "
                    "state to shard_map with PartitionSpec(axis_name) for acc_grads."
                )
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), stored)

    def stored(self, opened: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), opened)

    def total(self, stored: Any) -> Any:
        return jax.tree.map(self.axes.sum, self.opened(stored))
