"""What a loss changes besides parameters: the statistics and keys of a model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Variables:
    """A model's arrays that are not trained; the same on all devices between calls.

    Attributes:
      values: a pytree of arrays for each variable.
      model: the rest of the model, a static value; it has `names` of the variables.
    """

    values: list[Any]
    model: Any = dataclasses.field(metadata={"static": True})

    def with_keys(self, own_key: Callable[[jax.Array], jax.Array]) -> "Variables":
        """The variables as a device sees them, which makes keys its own."""

        def own(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
                return x
            return jax.vmap(own_key)(x.reshape(-1)).reshape(x.shape)

        values = jax.tree.map(own, self.values)
        return dataclasses.replace(self, values=values)

    def updated(
        self,
        new: dict[int, Any],
        skipped: jax.Array,
        shared: Callable[[jax.Array], jax.Array],
    ) -> "Variables":
        """Takes over the new values, by index, unless the micro-batch is skipped.

        `shared` makes one value of those that the devices have.
        """

        def take(old: jax.Array, x: Any) -> jax.Array:
            x = shared(jnp.asarray(x))
            x = x if x.dtype == old.dtype else x.astype(old.dtype)
            return jnp.where(skipped, old, x)

        values = [
            jax.tree.map(take, x, new[i]) if i in new else x
            for i, x in enumerate(self.values)
        ]
        return dataclasses.replace(self, values=values)


NO_VARIABLES = Variables([], None)
