"""Low-rank adapters (LoRA, Hu et al. 2021): few trained parameters, many frozen ones.

Beside a frozen matrix W stand A, with `rank` columns, and B, with `rank` rows:

    y = x W + (ALPHA / rank) (x A) B

A begins random, normal with variance 1 / fan-in, and B at zero: so training begins at
the frozen model. The product A B is never made, nor is a gradient of W's size.

The model is made of both, `merge(trained, frozen)`. What is trained is a tree of its
own, so gradients, sums and optimizer states have its size and know nothing of the rest.
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
      frozen: the parameters of the model, those under "layers" with a leading axis.
      rank: of the product of A and B, at least 1.

    Returns:
      What `merge` takes in the place of trained parameters.
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
    """The parameters of the model, which is nothing but the two trees in one."""
    layers = frozen.get("layers", {}) | trained["layers"]
    return frozen | trained | {"layers": layers}


def project(x: jax.Array, layer: Tree, name: str) -> jax.Array:
    """Multiplies by a matrix of a layer, and by its adapter where there is one.

    Args:
      x: `[..., inputs]`.
      layer: the parameters of one layer.
      name: of the matrix `[inputs, outputs]`.

    Returns:
      `[..., outputs]`.
    """
    y = x @ layer[name]
    if "adapters" in layer:
        a, b = layer["adapters"][name]["a"], layer["adapters"][name]["b"]
        y += ALPHA / a.shape[-1] * (x @ a @ b)
    return y
