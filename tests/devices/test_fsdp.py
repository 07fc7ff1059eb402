"""FSDP: the gradient of scanned attention, and what is sent."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import bytes_sent, cut, difference, in_float64, relative_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import fits

MODEL = fits.Model(
    layers=2, width=32, hidden=64, heads=4, vocabulary=64, dtype=jnp.float32
)
ROWS, LENGTH, K = 128, 16, 2


def batch_of() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocabulary, (ROWS, LENGTH + 1))
    is_long = np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (ROWS, 1))
    return {"tokens": tokens[:, :-1], "labels": np.where(is_long, tokens[:, 1:], -1)}


@pytest.mark.slow
def test_it_is_exact_and_a_constraint_bounds_what_is_sent():
    mesh, batch = meshes.make_mesh((8, 1)), batch_of()
    rng, shapes = np.random.default_rng(1), fits.params_of(MODEL, mesh, True)
    params = jax.tree.map(
        lambda x: jax.device_put(np.float32(rng.normal(size=x.shape) / 6), x.sharding),
        shapes,
    )
    rows = NamedSharding(mesh, P("data"))
    step = meshes.make_step(
        "two programs",
        optax.sgd(1.0),
        mesh,
        reduce_every="micro_batch",
        loss_fn=partial(fits.loss_fn, MODEL, rows),
        k=K,
    )
    state = step.init(params)
    accumulate = step.accumulate.lower(state, cut(batch, K)[0]).compile()
    close = step.close_window.lower(state).compile()
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    assert bytes_sent(accumulate) < 3.2 * whole  # left free, more than 10
    assert bytes_sent(close) < 100

    for micro_batch in cut(batch, K):
        state, metrics = step(state, micro_batch)
    assert metrics.updated
    wide = MODEL._replace(dtype=jnp.float64)
    expected = in_float64(jax.grad(lambda *args: mean_loss(wide, *args)))(params, batch)
    assert relative_error(difference(params, state.params), expected) < 2e-6


def mean_loss(model: fits.Model, params: Any, batch: Any) -> jax.Array:
    loss_sum, num_tokens = fits.loss_fn(model, None, params, batch)
    return loss_sum / num_tokens
