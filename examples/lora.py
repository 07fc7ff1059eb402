"""Low-rank adapters (LoRA, Hu et al. 2021): few trained parameters, many frozen ones.

Each adapted matrix W is frozen, and gets A with `rank` columns and B with `rank` rows:

    y = x W + (ALPHA / rank) (x A) B

A starts as random normal numbers with variance 1 / fan-in, and B starts at zero, so
training starts at the frozen model. Neither the product A B nor a gradient of W's size
is ever computed.

`merge(trained, frozen)` makes the parameters of the model. The trained parameters are a
separate tree, so gradients, sums and optimizer states have the size of this tree and do
not contain the frozen parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp

ALPHA = 16.0
ADAPTED = ("qkv", "out", "up", "down")
"""The adapted matrices of a layer."""

Tree = dict[str, Any]


def init_adapters(key: jax.Array, frozen: Tree, rank: int) -> Tree:
    """Makes A and B for every matrix of `ADAPTED` in every layer.

    Args:
      key: a PRNG key.
      frozen: the parameters of the model; under "layers" they have a leading axis.
      rank: the rank of the product A B, at least 1.

    Returns:
      The tree that `merge` takes as `trained`.
    """
    adapters = {}
    keys = jax.random.split(key, len(ADAPTED))
    for key, name in zip(keys, ADAPTED, strict=True):
        layers, inputs, outputs = frozen["layers"][name].shape
        a = jax.random.normal(key, (layers, inputs, rank), jnp.float32)
        adapters[name] = {
            "a": inputs**-0.5 * a,
            "b": jnp.zeros((layers, rank, outputs)),
        }
    return {"layers": {"adapters": adapters}}


def merge(trained: Tree, frozen: Tree) -> Tree:
    """Merges the two trees into the parameters of the model."""
    layers = frozen.get("layers", {}) | trained["layers"]
    return frozen | trained | {"layers": layers}


def project(x: jax.Array, layer: Tree, name: str) -> jax.Array:
    """Multiplies by a matrix of a layer, and by its adapter if it has one.

    Args:
      x: `[..., inputs]`.
      layer: the parameters of one layer.
      name: the name of the matrix `[inputs, outputs]`.

    Returns:
      `[..., outputs]`.
    """
    y = x @ layer[name]
    if "adapters" in layer:
        a, b = layer["adapters"][name]["a"], layer["adapters"][name]["b"]
        y += ALPHA / a.shape[-1] * (x @ a @ b)
    return y
