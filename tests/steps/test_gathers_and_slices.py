"""Gradients of parameters that a loss reads by index, in part or at clamped indices."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window_gradients import (
    LAYERS,
    WIDTH,
    batch_of,
    by_hand,
    layer,
    params_of,
    squares,
    through_layers,
    value_and_grad,
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


READS: dict[str, list[Read]] = {
    "of a table": [
        lambda params, i: params["table"][i],
        lambda params, i: params["table"][jnp.stack([i, i])].sum(0),
        lambda params, i: params["table"].at[i].get(mode="clip"),
        lambda params, i: jax.lax.dynamic_slice(
            params["table"], (i, 0), (2, WIDTH)
        ).sum(0),
    ],
    "of layers": [
        lambda params, i: params["layers"][i, 0],
        in_a_loop,
        of_each_layer,
    ],
}


def with_table(params: Any, rows: int = 4) -> Any:
    table = np.random.default_rng(1).normal(size=(rows, WIDTH))
    return params | {"table": jnp.asarray(table, params["layers"].dtype)}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_rows_at_indices_that_are_clamped(reads: list[Read]):
    def loss_fn(params: Any, batch: Any) -> Any:
        y = through_layers(params, batch["x"]) * params["out"]
        for factor, read in enumerate(reads, 1):  # which tells them apart
            y = y + factor * y * read(params, batch["i"])
        return squares(y + params["table"][0], batch)

    params = with_table(params_of())
    batches = [batch_of(9 + i, 8) | {"i": np.int32(i)} for i in INDICES]
    got = value_and_grad(loss_fn, params, batches)
    expected = by_hand(loss_fn, params, batches)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_ids_too_narrow_to_count_the_rows_of_their_table():
    def loss_fn(params: Any, batch: Any) -> Any:
        y = through_layers(params, batch["x"]) + params["out"]
        return squares(y * jnp.take(params["table"], batch["ids"], axis=0), batch)

    params, ids = with_table(params_of(), 200), jnp.arange(8, dtype=jnp.int8) * 15
    batches = [batch_of(i, 8) | {"ids": ids + i} for i in range(2)]
    got = value_and_grad(loss_fn, params, batches)
    expected = by_hand(loss_fn, params, batches)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
