"""The models of the cases, and their parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import ahead, fits, settings
from benchmarks.workloads import Workload


def stat(name: str) -> int:
    """A number of bytes about the device's memory; 0 on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get(name, 0)


def problem(small: bool, model: str, rows: int) -> tuple[Workload, Any]:
    """A workload with shapes in the place of parameters, and its optimizer.

    Args:
      small: whether it is tiny.
      model: `"decoder"`, with 0.8 billion parameters; `"large decoder"`, with 2.9
        billion on a GPU with 80 GB and more on a larger one; or one of the ahead suite.
      rows: of a micro-batch.
    """
    if model.endswith("decoder"):
        layers, width = 24, 1536
        if model == "large decoder":
            layers, width = round(24 * max(1, stat("bytes_limit") / 80e9)), 3072
        of = fits.Model(layers, width, width * 8 // 3, width // 128, 32_000)
        of = fits.Model(2, 32, 64, 2, 64, jnp.float32) if small else of
        return _decoder(of, rows, 16 if small else 1024), optax.adamw(1e-4)
    full = settings.full()
    if small:
        full = full._replace(ahead_sizes=(4, 64, 32, 128))
    made = []

    def params() -> Any:
        made.append(ahead.models(full, full.ahead_sizes[0])[model](rows=rows))
        return made[0].params

    shapes = jax.eval_shape(params)
    return made[0]._replace(params=shapes), ahead.SGD


def _decoder(model: fits.Model, rows: int, length: int) -> Workload:
    """The decoder of `benchmarks.fits`; rows have random numbers of loss tokens."""
    placed = fits.params_of(model, jax.make_mesh((1, 1), ("data", "model")), False)

    def loss_fn(params: Any, batch: Any, frozen: Any) -> Any:
        return fits.loss_fn(model, None, params, batch)

    def micro_batch(rng: np.random.Generator) -> Any:
        tokens = rng.integers(0, model.vocabulary, (rows, length + 1)).astype(np.int32)
        is_counted = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
        labels = np.where(is_counted, tokens[:, 1:], -1)
        return {"tokens": tokens[:, :-1], "labels": labels}

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placed)
    return Workload(shapes, {}, loss_fn, micro_batch, model.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _noise(x: jax.ShapeDtypeStruct) -> jax.Array:
    bits = jax.lax.iota(np.uint32, x.size) * np.uint32(2654435761)
    bits = (bits ^ bits >> 15) * np.uint32(0x2C1B3C6D)
    values = bits.reshape(x.shape).astype(np.float32) / 2.0**31 - 1
    return (x.shape[-2] ** -0.5 * values).astype(x.dtype)


def noise(shapes: Any) -> Any:
    """Parameters that need no other memory, as `jax.random` does."""
    return jax.tree.map(_noise, shapes)
