"""A small Llama initialized with PyTorch's random numbers, and rows to train it on.

Its parameters equal the parameters of transformers' `LlamaForCausalLM`, so figures that
others published about that model can be reproduced without PyTorch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from data import Batch

from optax_tokenaccum import softmax_cross_entropy_sum

ROWS, MAX_LENGTH, VOCABULARY, HEAD_DIM = 32, 64, 32, 8

Params = dict[str, Any]


class TorchRandom:
    """The numbers that PyTorch draws on a CPU after `torch.manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.RandomState(seed)

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Draws integers like `torch.randint`."""
        drawn = self._bits.randint(0, 2**32, shape, dtype=np.uint32)
        return (low + drawn % (high - low)).astype(np.int32)

    def uniform(self, *shape: int) -> np.ndarray:
        """Draws floats like `torch.rand`: the low 24 bits make a float32."""
        return self.integers(0, 2**24, *shape) / 2**24

    def normal(self, *shape: int) -> np.ndarray:
        """Draws like `torch.randn` for a multiple of 16: Box-Muller, in eights."""
        u = self.uniform(int(np.prod(shape)) // 16, 2, 8)
        radius, angle = np.sqrt(-2 * np.log1p(-u[:, :1])), 2 * np.pi * u[:, 1:]
        pairs = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
        return (radius * pairs).reshape(shape)


def init(seed: int, *, width: int, layers: int) -> Params:
    """The parameters of transformers' `LlamaForCausalLM` after `manual_seed(seed)`."""
    random = TorchRandom(seed)
    shapes = dict.fromkeys("qkvo", (width, width))
    shapes |= dict.fromkeys(["gate", "up"], (2 * width, width))
    shapes["down"] = (width, 2 * width)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.02 * random.normal(*shape), jnp.float32)

    # PyTorch fills each matrix by its default rule before transformers fills it again.
    random.uniform(VOCABULARY * width + layers * 10 * width**2)
    params: Params = {"embedding": normal(VOCABULARY, width)}
    params["layers"] = [
        {name: normal(*shape) for name, shape in shapes.items()}
        | {"attention_norm": jnp.ones(width), "mlp_norm": jnp.ones(width)}
        for _ in range(layers)
    ]
    random.uniform(VOCABULARY * width)
    return params | {"norm": jnp.ones(width), "head": normal(VOCABULARY, width)}


def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The summed loss of the Llama, and the number of tokens in the sum."""
    rows, length = batch.inputs.shape
    frequencies = 1e4 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    angle = jnp.arange(length)[:, None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def rotate(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    x = jnp.asarray(params["embedding"])[batch.inputs]
    for layer in params["layers"]:
        h = norm(x, layer["attention_norm"])
        q, k, v = (
            (h @ layer[name].T).reshape(rows, length, -1, HEAD_DIM) for name in "qkv"
        )
        attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + attended.reshape(x.shape) @ layer["o"].T
        h = norm(x, layer["mlp_norm"])
        hidden = jax.nn.silu(h @ layer["gate"].T) * (h @ layer["up"].T)
        x = x + hidden @ layer["down"].T
    logits = norm(x, params["norm"]) @ params["head"].T
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


def make_rows(seed: int, low: int = 2, high: int = MAX_LENGTH) -> Batch:
    """Rows of `low` to `high` tokens; half of the vocabulary can follow each token."""
    random = np.random.default_rng(seed)
    lengths = random.integers(low, high + 1, ROWS)
    steps = random.integers(1, VOCABULARY // 2 + 1, (ROWS, MAX_LENGTH + 1))
    ids = (np.cumsum(steps, axis=1) % VOCABULARY).astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.arange(MAX_LENGTH) < lengths[:, None])
