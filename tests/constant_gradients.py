"""Two parameters, and gradients that have one number in every entry."""

from typing import Any

import jax
import jax.numpy as jnp

PARAMS = {"w": jnp.asarray([1.0, -2.0, 3.0]), "b": jnp.asarray(0.5, jnp.float32)}


def grads(scale: Any) -> Any:
    return jax.tree.map(lambda p: jnp.full_like(p, scale), PARAMS)
