"""The models to train, and ragged windows of data for them."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import model as transformer
import numpy as np

from optax_tokenaccum.losses import linear_cross_entropy_sum, softmax_cross_entropy_sum


class Workload(NamedTuple):
    """A model and its micro-batches.

    Attributes:
      params: the trained parameters.
      frozen: the parameters of `loss_fn` that are not trained.
      loss_fn: `loss_fn(params, batch, frozen) -> (loss_sum, num_tokens)`.
      micro_batch: `micro_batch(rng)` makes one with a random number of loss tokens.
    """

    params: Any
    frozen: Any
    loss_fn: Callable[..., Any]
    micro_batch: Callable[[np.random.Generator], Any]

    def mean_loss_fn(self, params: Any, batch: Any, frozen: Any) -> Any:
        loss_sum, num_tokens = self.loss_fn(params, batch, frozen)
        return loss_sum / num_tokens, num_tokens


class Window(NamedTuple):
    """The same micro-batches one by one, stacked, and as one batch."""

    micro_batches: list[Any]
    stacked: Any
    whole: Any


def window_of(workload: Workload, k: int, seed: int = 0) -> Window:
    """Makes a window of `k` micro-batches on the device."""
    rng = np.random.default_rng(seed)
    return as_window([workload.micro_batch(rng) for _ in range(k)])


def as_window(micro_batches: list[Any]) -> Window:
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *micro_batches)
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)
    return jax.device_put(Window(micro_batches, stacked, whole))


def square_layers(
    width: int = 2048, layers: int = 6, rows: int = 4, dtype: Any = jnp.float32
) -> Workload:
    """Large square layers and a tiny batch: moving the parameters costs most."""
    keys = jax.random.split(jax.random.key(0), layers)
    params = [jax.random.normal(key, (width, width), dtype) for key in keys]

    def loss_fn(params: Any, batch: Any, frozen: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w / width**0.5)
        per_row = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)
        return jnp.sum(jnp.where(batch["mask"], per_row, 0)), jnp.sum(batch["mask"])

    def micro_batch(rng: np.random.Generator) -> Any:
        # Short and long micro-batches hold different data, as in real training.
        n = rng.integers(1, rows + 1)
        x = rng.normal(size=(rows, width)) * n
        return {"x": x.astype(dtype), "mask": np.arange(rows) < n}

    return Workload(params, None, loss_fn, micro_batch)


def tiny() -> Workload:
    """Three small arrays: the host takes most of the time."""
    params = {"up": jnp.ones((4, 8)), "bias": jnp.zeros(8), "down": jnp.ones(8)}

    def loss_fn(params: Any, batch: Any, frozen: Any) -> Any:
        y = jnp.tanh(batch["x"] @ params["up"] + params["bias"]) @ params["down"]
        return jnp.sum(jnp.where(batch["mask"], y**2, 0)), jnp.sum(batch["mask"])

    def micro_batch(rng: np.random.Generator) -> Any:
        n = rng.integers(1, 5)
        x = rng.normal(size=(4, 4)) * n
        return {"x": x.astype(np.float32), "mask": np.arange(4) < n}

    return Workload(params, None, loss_fn, micro_batch)


def stacked_layers(
    width: int = 512,
    layers: int = 8,
    rows: int = 2,
    length: int = 64,
    vocabulary: int = 0,
    *,
    dtype: Any = jnp.float32,
    stored: Any = jnp.float32,
    tied: bool = True,
    chunked: bool = False,
    axis: int = 0,
    scanned: bool = True,
    remat: bool = True,
    rank: int = 0,
    spread: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Workload:
    """Stacked MLPs in a scan, by default 17 M parameters.

    Args:
      width: of the activations.
      layers: how many.
      rows: of a micro-batch.
      length: of a row.
      vocabulary: tokens to embed and to predict; 0 for neither.
      dtype: of the computation.
      stored: the dtype of the parameters.
      tied: whether the embedding also predicts.
      chunked: whether the logits of a chunk of tokens exist at a time.
      axis: along which the layers are stacked.
      scanned: whether they are stacked; otherwise, every layer has arrays of its own.
      remat: whether the backward pass computes activations again, except in float32.
      rank: of the adapters that are trained instead of the layers, if not 0.
      spread: called with the activations, to spread them over devices.
    """
    keys = iter(jax.random.split(jax.random.key(0), 6 if scanned else 4 * layers + 2))

    def normal(*shape: int) -> jax.Array:
        return shape[-2] ** -0.5 * jax.random.normal(next(keys), shape, stored)

    def of_layers(*shape: int) -> Any:
        if not scanned:
            return [normal(*shape) for _ in range(layers)]
        return jnp.moveaxis(normal(layers, *shape), 0, axis)

    params = {"up": of_layers(width, 4 * width), "down": of_layers(4 * width, width)}
    frozen = {}
    if rank:
        frozen = params
        params = {"up_a": of_layers(width, rank), "up_b": of_layers(rank, 4 * width)}
    if vocabulary:
        params["embedding"] = normal(vocabulary, width)
    if not tied:
        params["head"] = normal(width, vocabulary)

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        inner = x @ weights["up"]
        if rank:
            inner += x @ weights["up_a"] @ weights["up_b"]
        return spread(x + jnp.tanh(inner) @ weights["down"])

    def loss_fn(params: Any, batch: Any, frozen: Any) -> Any:
        x, ends = batch["x"], {"embedding", "head"}
        if vocabulary:
            x = params["embedding"][x]
        weights = {n: w for n, w in (params | frozen).items() if n not in ends}
        x = spread(x.astype(dtype))
        body = _of_layer(layer, dtype, remat)
        if scanned:
            weights = jax.tree.map(lambda w: jnp.moveaxis(w, axis, 0), weights)
            x, _ = jax.lax.scan(body, x, weights)
        else:
            for i in range(layers):
                x, _ = body(x, {name: own[i] for name, own in weights.items()})
        if vocabulary:
            head = params["embedding"].T if tied else params["head"]
            head, labels, mask = head.astype(dtype), batch["x"], batch["mask"]
            if chunked:
                return linear_cross_entropy_sum(x, head, labels, mask)
            return softmax_cross_entropy_sum(x @ head, labels, mask)
        per_token = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)
        return jnp.sum(jnp.where(batch["mask"], per_token, 0)), jnp.sum(batch["mask"])

    def micro_batch(rng: np.random.Generator) -> Any:
        n = rng.integers(1, length + 1, rows)[:, None]
        if vocabulary:
            high = np.where(n < length // 2, vocabulary // 2, vocabulary)
            x = rng.integers(0, high, (rows, length)).astype(np.int32)
        else:
            x = rng.normal(size=(rows, length, width)).astype(np.float32)
            x *= n[..., None] / length
        return {"x": x, "mask": np.arange(length) < n}

    return Workload(params, frozen, loss_fn, micro_batch)


def _of_layer(
    layer: Callable[[jax.Array, Any], jax.Array], dtype: Any, remat: bool = True
) -> Callable[[jax.Array, Any], tuple[jax.Array, None]]:
    """The body of a scan."""

    def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return layer(x, jax.tree.map(lambda w: w.astype(dtype), weights)), None

    return jax.checkpoint(body) if remat and dtype != jnp.float32 else body


def transformer_of(
    d_model: int = 512,
    layers: int = 5,
    rows: int = 2,
    length: int = 64,
    rank: int = 0,
    stacked: bool = False,
) -> Workload:
    """A causal language model, by default with 17 M parameters; LoRA if `rank` > 0.

    If `stacked`, the layers run in a scan.
    """
    vocabulary = 2048
    whole = transformer.init(
        jax.random.key(0), vocabulary=vocabulary, d_model=d_model, layers=layers
    )
    frozen = {}

    def unstacked(params: Any) -> Any:
        """So that each layer's gradient is added as soon as it is computed."""
        layer = [
            jax.tree.map(operator.itemgetter(i), params["layers"])
            for i in range(layers)
        ]
        return params | {"layers": layer}

    params = whole if stacked else unstacked(whole)
    if rank:
        frozen = params
        adapters = transformer.init_adapters(jax.random.key(1), whole, rank)
        params = unstacked(adapters)

    def loss_fn(params: Any, batch: Any, frozen: Any) -> Any:
        merged = frozen | params
        x = merged["embedding"][batch["tokens"]]
        if stacked:
            body = _of_layer(transformer.block, jnp.float32)
            x, _ = jax.lax.scan(body, x, params["layers"])
        else:
            for i, layer in enumerate(params["layers"]):
                own = frozen["layers"][i] if frozen else {}
                x = transformer.block(x, own | layer)
        logits = transformer.logits(merged, x)
        return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])

    def micro_batch(rng: np.random.Generator) -> Any:
        n = rng.integers(2, length + 1, rows)
        high = np.where(n < length // 2, vocabulary // 2, vocabulary)[:, None]
        text = rng.integers(0, high, (rows, length + 1)).astype(np.int32)
        return {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "mask": np.arange(length) < n[:, None],
        }

    return Workload(params, frozen, loss_fn, micro_batch)
