"""FSDP: the gradient of scanned attention, and what is sent."""

from functools import partial
from pathlib import Path
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
from optax_tokenaccum import make_train_step

MODEL = fits.Model(
    layers=2, width=32, hidden=64, heads=4, vocabulary=64, dtype=jnp.float32
)
ROWS, LENGTH, K = 128, 16, 2
PAGE = (Path(__file__).parents[2] / "docs/devices.md").read_text(encoding="utf-8")


def batch_of() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocabulary, (ROWS, LENGTH + 1))
    is_long = np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (ROWS, 1))
    return {"tokens": tokens[:, :-1], "labels": np.where(is_long, tokens[:, 1:], -1)}


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


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="has words of jax 0.12")
@pytest.mark.parametrize(
    ("kind", "reduce_every", "as_sharding"),
    [
        ("auto", "window", False),
        ("auto", "window", True),
        ("explicit", "micro_batch", True),
        ("explicit", "micro_batch", False),
    ],
)
def test_the_page_quotes_the_error_of_a_constraint_over_a_data_axis(
    kind: str, reduce_every: Any, as_sharding: bool
):
    mesh, rows = meshes.make_mesh((8,), kind), P("data")
    sharding = NamedSharding(mesh, rows) if as_sharding else rows

    def loss_fn(w: jax.Array, x: jax.Array) -> Any:
        x = jax.lax.with_sharding_constraint(x, sharding)
        return jnp.sum(x @ w), len(x)

    step = make_train_step(
        loss_fn, optax.sgd(1.0), mesh=mesh, data_axes="data", reduce_every=reduce_every
    )
    with jax.set_mesh(mesh):
        state = step.init(jnp.ones(3))
        if reduce_every == "micro_batch" and not as_sharding:
            step.accumulate.lower(state, jnp.ones((8, 3)))
            return
        with pytest.raises(ValueError) as caught:
            step.accumulate(state, jnp.ones((8, 3)))
    page, seen = " ".join(PAGE.split()), str(caught.value)
    if as_sharding and kind == "auto":
        words = [seen.partition(" If you")[0]]
    else:
        axis_type = "Explicit" if as_sharding else "Manual"
        words = [seen.partition(" Got")[0], f"axis_types=({axis_type},)"]
    assert all(x in page and x in seen for x in words)


def mean_loss(model: fits.Model, params: Any, batch: Any) -> jax.Array:
    loss_sum, num_tokens = fits.loss_fn(model, None, params, batch)
    return loss_sum / num_tokens
