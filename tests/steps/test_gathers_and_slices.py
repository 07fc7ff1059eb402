"""Gradients of parameters that a loss reads by index, in part or at clamped indices."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from window_gradients import (
    LAYERS,
    WIDTH,
    batch_of,
    by_hand,
    layer,
    params_of,
    squares,
    through_layers,
    train_step,
    value_and_grad,
    window_step,
)

Read = Callable[[Any, Any], jax.Array]
# JAX adds the number of rows to a negative index, and clamps what a slice gets then.
INDICES = -9, -5, -4, -1, 0, 2, 3, 7


def in_a_loop(params: Any, i: Any) -> jax.Array:
    x = jnp.ones((1, WIDTH), params["layers"].dtype)
    return jax.lax.fori_loop(
        0, LAYERS, lambda j, x: layer(x, params["layers"][i + j])[0], x
    )


def of_each_layer(params: Any, i: Any) -> jax.Array:
    def read(x: Any, w: Any) -> Any:
        return x + w[i] * jax.lax.dynamic_slice(w, (i, i), (1, WIDTH)), None

    x = jnp.ones((1, WIDTH), params["layers"].dtype)
    return jax.lax.scan(read, x, params["layers"])[0]


READS: dict[str, Read] = {
    "w[i]": lambda params, i: params["table"][i],
    "w[i, 0], of layers": lambda params, i: params["layers"][i, 0],
    "w[[i, i]]": lambda params, i: params["table"][jnp.stack([i, i])].sum(0),
    "clip": lambda params, i: params["table"].at[i].get(mode="clip"),
    "dynamic_slice": lambda params, i: jax.lax.dynamic_slice(
        params["table"], (i, 0), (2, WIDTH)
    ).sum(0),
    "w[i] in a loop": in_a_loop,
    "w[i] of each layer in a scan": of_each_layer,
}


def with_table(params: Any, rows: int = 4) -> Any:
    table = np.random.default_rng(1).normal(size=(rows, WIDTH))
    return params | {"table": jnp.asarray(table, params["layers"].dtype)}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("way", [value_and_grad, *map(slow, (train_step, window_step))])
def test_rows_at_indices_that_are_clamped(way: Any, read: Read):
    def loss_fn(params: Any, batch: Any) -> Any:
        y = through_layers(params, batch["x"]) * params["out"]
        return squares(y * read(params, batch["i"]) + params["table"][0], batch)

    params = with_table(params_of())
    batches = [batch_of(9 + i, 8) | {"i": np.int32(i)} for i in INDICES]
    got, expected = way(loss_fn, params, batches), by_hand(loss_fn, params, batches)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rows"), [(jnp.int8, 200), (jnp.int16, 40_000)])
def test_ids_too_narrow_to_count_the_rows_of_their_table(dtype: Any, rows: int):
    def loss_fn(params: Any, batch: Any) -> Any:
        y = through_layers(params, batch["x"]) + params["out"]
        return squares(y * jnp.take(params["table"], batch["ids"], axis=0), batch)

    params, ids = with_table(params_of(), rows), jnp.arange(8, dtype=dtype) * 15
    batches = [batch_of(i, 8) | {"ids": ids + i} for i in range(2)]
    got = value_and_grad(loss_fn, params, batches)
    expected = by_hand(loss_fn, params, batches)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
