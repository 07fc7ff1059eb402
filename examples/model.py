"""A small causal transformer in plain JAX: a dictionary of arrays and one function.

Pre-norm blocks, rotary positions, tied embeddings. The layers are stacked on a leading
axis and run by `lax.scan`, so compiling twelve layers takes as long as compiling one.

Low-rank adapters (LoRA, Hu et al. 2021) are few trained parameters next to many frozen
ones. Each adapted matrix W is frozen, and gets A with `rank` columns and B with `rank`
rows, which start as random numbers and zeros:

    y = x W + (ALPHA / rank) (x A) B

Neither A B nor a gradient of W's size is ever computed. The trained parameters are a
separate tree, so gradients, sums and optimizer states have the size of this tree.
"""

from typing import Any

import jax
import jax.numpy as jnp
from data import Batch

from optax_tokenaccum.losses import softmax_cross_entropy_sum

HEAD_DIM = 32
ALPHA = 16.0
ADAPTED = "qkv", "out", "up", "down"  # the adapted matrices of a layer

Params = dict[str, Any]


def init(key: jax.Array, *, vocabulary: int, d_model: int, layers: int) -> Params:
    """Makes float32 arrays; those under "layers" have a leading `layers` axis.

    The width `d_model` is a multiple of `HEAD_DIM`, the width of one head.
    """
    keys = jax.random.split(key, 5)

    def normal(key: jax.Array, *shape: int, fan_in: int) -> jax.Array:
        return fan_in**-0.5 * jax.random.normal(key, shape, jnp.float32)

    return {
        "embedding": normal(keys[0], vocabulary, d_model, fan_in=d_model),
        "layers": {
            "attention_norm": jnp.ones((layers, d_model)),
            "qkv": normal(keys[1], layers, d_model, 3 * d_model, fan_in=d_model),
            "out": normal(keys[2], layers, d_model, d_model, fan_in=d_model),
            "mlp_norm": jnp.ones((layers, d_model)),
            "up": normal(keys[3], layers, d_model, 4 * d_model, fan_in=d_model),
            "down": normal(keys[4], layers, 4 * d_model, d_model, fan_in=4 * d_model),
        },
        "final_norm": jnp.ones(d_model),
    }


def init_adapters(key: jax.Array, frozen: Params, rank: int) -> Params:
    """Makes A and B of that rank for every matrix of `ADAPTED` in every layer."""
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


def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The summed loss of a batch, and the number of tokens in the sum."""
    logits = forward(params, batch.inputs)
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


def mean_loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The mean loss of a batch, and the number of tokens in the mean."""
    loss_sum, num_tokens = loss_fn(params, batch)
    return loss_sum / num_tokens, num_tokens


def forward(params: Params, tokens: jax.typing.ArrayLike) -> jax.Array:
    """Logits `[batch, length, vocabulary]` of the next token, from `[batch, length]`.

    A position sees only itself and earlier positions, so padding on the right does not
    change the real positions and needs no mask.
    """
    x, _ = jax.lax.scan(
        lambda x, layer: (block(x, layer), None),
        params["embedding"][tokens],
        params["layers"],
    )
    return logits(params, x)


def block(x: jax.Array, layer: Params) -> jax.Array:
    """One layer: causal attention and an MLP, on `[batch, length, d_model]`."""
    qkv = project(_norm(x, layer["attention_norm"]), layer, "qkv")
    in_heads = (*x.shape[:2], -1, HEAD_DIM)  # [batch, length, heads, HEAD_DIM]
    q, k, v = (part.reshape(in_heads) for part in jnp.split(qkv, 3, axis=-1))
    attended = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    x = x + project(attended.reshape(x.shape), layer, "out")
    hidden = jax.nn.gelu(project(_norm(x, layer["mlp_norm"]), layer, "up"))
    return x + project(hidden, layer, "down")


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Computes the next token's logits from the output of the last layer."""
    return _norm(x, params["final_norm"]) @ params["embedding"].T


def project(x: jax.Array, layer: Params, name: str) -> jax.Array:
    """Multiplies by a matrix of a layer, and by its adapter if it has one."""
    y = x @ layer[name]
    if "adapters" in layer:
        a, b = layer["adapters"][name]["a"], layer["adapters"][name]["b"]
        y += ALPHA / a.shape[-1] * (x @ a @ b)
    return y


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm over the last axis."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021) for `[batch, length, heads, HEAD_DIM]`."""
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies  # [length, 1, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x, 2, axis=-1)
    rotated = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
