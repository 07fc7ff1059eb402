"""Gradients of parameters that a loss reads by index, in part or at clamped indices."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import problems
import pytest
from jax.sharding import PartitionSpec as P
from problems import FEATURES, FEW, LAYERS, check_gradient, layer, value_and_grad

from optax_tokenaccum import make_train_step
from optax_tokenaccum._core import perturbations

Read = Callable[[Any, Any], jax.Array]
# JAX adds the number of rows to a negative index, and clamps what a slice gets then.
INDICES = -9, -5, -4, -1, 0, 2, 3, 7
ONES = jnp.ones((1, FEATURES))


def in_a_loop(params: Any, i: Any) -> jax.Array:
    def body(j: Any, x: Any) -> Any:
        return layer(x, params["layers"][i + j])[0]

    return jax.lax.fori_loop(0, LAYERS, body, ONES)


def of_each_layer(params: Any, i: Any) -> jax.Array:
    def read(x: Any, w: Any) -> Any:
        return x + w[i] * jax.lax.dynamic_slice(w, (i, i), (1, FEATURES)), None

    return jax.lax.scan(read, ONES, params["layers"])[0]


READS: dict[str, list[Read]] = {
    "of a table": [
        lambda params, i: params["table"][i],
        lambda params, i: params["table"][jnp.stack([i, i])].sum(0),
        lambda params, i: params["table"].at[i].get(mode="clip"),
        lambda params, i: jax.lax.dynamic_slice(
            params["table"], (i, 0), (2, FEATURES)
        ).sum(0),
    ],
    "of layers": [lambda params, i: params["layers"][i, 0], in_a_loop, of_each_layer],
}


def check(read: Any, rows: int, indices: list[Any]) -> None:
    """Of a loss that multiplies activations by what it reads of a table of so many."""

    def loss_fn(params: Any, batch: Any) -> Any:
        y = problems.through_layers(params, batch["x"]) * params["out"]
        y = read(params, batch["i"], y) + params["table"][0]
        return problems.squares(jnp.sum(y, -1), batch)

    params = FEW | {"table": jnp.asarray(problems.normal(4, rows, FEATURES))}
    batches = problems.batches_of(*[8] * len(indices))
    batches = [x | {"i": i} for x, i in zip(batches, indices, strict=True)]
    check_gradient(value_and_grad, loss_fn, params, batches)


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_rows_at_indices_that_are_clamped(reads: list[Read]):
    def read_all(params: Any, i: Any, y: Any) -> Any:
        for factor, read in enumerate(reads, 1):  # which tells them apart
            y = y + factor * y * read(params, i)
        return y

    check(read_all, 4, [np.int32(i) for i in INDICES])


def test_slices_of_a_large_parameter_in_a_loop(monkeypatch: pytest.MonkeyPatch):
    """Their gradients are added to slices of its sum, at clamped indices too."""
    monkeypatch.setattr(perturbations, "LARGE", 0)

    def read(params: Any, i: Any, y: Any) -> Any:
        def body(so_far: Any, j: Any) -> Any:
            turned = params["table"].T
            given = jax.lax.dynamic_slice_p.bind(turned, 0 * i, i + j, **sizes)
            negative = jax.lax.dynamic_slice(params["table"], (i - j, 0), (2, FEATURES))
            return so_far + y * given.sum(1) * negative.sum(0), None

        sizes = {"slice_sizes": (FEATURES, 2)}
        return jax.lax.scan(body, y, jnp.arange(3))[0]

    check(read, 4, [np.int32(i) for i in INDICES])


def test_slices_of_a_spread_axis_gather_the_parameter_and_not_its_sum():
    """A slice of the sum would be gathered, too: five times the bytes."""
    mesh = meshes.make_mesh((8,))
    spread = jax.sharding.NamedSharding(mesh, P(None, "data"))
    table = jax.device_put(jnp.ones((256, 8192)), spread)

    def loss_fn(table: Any, x: Any) -> Any:
        def body(so_far: Any, i: Any) -> Any:
            w = jax.lax.dynamic_slice_in_dim(table, 1024 * i, 1024, axis=1)
            return so_far + jnp.sum(jnp.tanh(x @ w)), None

        return jax.lax.scan(body, 0.0, jnp.arange(8))[0], jnp.float32(len(x))

    options = {"data_axes": "data", "reduce_every": "micro_batch"}
    step = make_train_step(loss_fn, optax.sgd(0.1), 2, mesh=mesh, **options)
    lowered = step.accumulate.lower(step.init(table), jnp.ones((8, 256)))
    assert (lowered.compile().as_text() or "").count(" all-gather(") == 1


@pytest.mark.skipif(
    "xla_cpu_use_fusion_emitters=False" in os.environ.get("XLA_FLAGS", ""),
    reason="XLA then writes outside of the table; COMPILE_AS_USERS=1 runs this",
)
def test_ids_too_narrow_to_count_the_rows_of_their_table():
    def take(params: Any, ids: Any, y: Any) -> Any:
        return y * jnp.take(params["table"], ids, axis=0)

    ids = jnp.arange(8, dtype=jnp.int8) * 15
    check(take, 200, [ids, ids + 1])
