"""What steps over 8 devices send and hold, in which layout, and in which dtypes."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import bytes_sent, slow
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import GRADIENT, K

from benchmarks import fits
from optax_tokenaccum import make_train_step, window_value_and_grad

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def step_and_state(way: str, layout: str, reduce_every: str | None) -> Any:
    shape, specs = meshes.LAYOUTS[layout]
    mesh, options = meshes.make_mesh(shape), {"reduce_every": reduce_every}
    step = meshes.make_step(way, CLIPPED, mesh, **options)
    return step, step.init(meshes.placed(mesh, specs))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "sent"), [("data parallel", 1), ("fsdp", 9 / 8)])
def test_what_is_sent_in_a_window(layout: str, sent: float):
    """Parameters are gathered once, and sums reduced or scattered once."""
    step, state = step_and_state("window", layout, "window")
    lowered = step.lower(state, meshes.stacked(meshes.make_batch(8)))
    # including K losses and counts
    assert sent <= bytes_sent(lowered.compile()) / GRADIENT < sent + 0.02


@pytest.mark.parametrize(
    ("layout", "reduce_every", "accumulate", "close"),
    [
        ("data parallel", None, 0, 1),  # by default, once a window
        # Parameters are gathered for a micro-batch, and once for a window. Of the sums
        # that are scattered, a device gets its part.
        slow("fsdp", "window", 1, 1 / 8),
        # The updated parameters are gathered.
        ("data parallel", "micro_batch", 1, 1),
    ],
)
def test_what_is_sent_and_what_a_device_holds(
    layout: str, reduce_every: str | None, accumulate: float, close: float
):
    step, state = step_and_state("two programs", layout, reduce_every)
    batch = helpers.cut(meshes.make_batch(8), K)[0]
    lowered = step.accumulate.lower(state, batch), step.close_window.lower(state)
    programs = [x.compile() for x in lowered]
    for program, sent in zip(programs, (accumulate, close), strict=True):
        assert sent <= bytes_sent(program) / GRADIENT < sent + 0.01
    if layout == "data parallel":  # a device adds to its sum, or to its part, in place
        memory = programs[0].memory_analysis()
        held = GRADIENT // 8 if reduce_every == "micro_batch" else GRADIENT
        assert held <= memory.alias_size_in_bytes < held + 64  # and scalars
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert outputs < GRADIENT / 8


@pytest.mark.slow
def test_fsdp_of_scanned_attention_is_exact_and_a_constraint_bounds_what_is_sent():
    rng, sizes = np.random.default_rng(0), {"layers": 2, "width": 32, "hidden": 64}
    model = fits.Model(**sizes, heads=4, vocabulary=64, dtype=jnp.float32)
    tokens, is_long = rng.integers(0, 64, (128, 17)), rng.random((128, 16)) < 0.5
    batch = {"tokens": tokens[:, :-1], "labels": np.where(is_long, tokens[:, 1:], -1)}
    mesh = meshes.make_mesh((8, 1))
    params = jax.tree.map(
        lambda x: jax.device_put(np.float32(rng.normal(size=x.shape) / 6), x.sharding),
        fits.params_of(model, mesh, True),
    )
    loss_fn = functools.partial(fits.loss_fn, model, NamedSharding(mesh, P("data")))
    options = {"reduce_every": "micro_batch", "loss_fn": loss_fn, "k": 2}
    step = meshes.make_step("two programs", optax.sgd(1.0), mesh, **options)
    state, micro_batches = step.init(params), helpers.cut(batch, 2)
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    accumulate = step.accumulate.lower(state, micro_batches[0]).compile()
    assert bytes_sent(accumulate) < 3.2 * whole  # left free, more than 10
    assert bytes_sent(step.close_window.lower(state).compile()) < 100

    def mean_loss(params: Any, batch: Any) -> Any:
        wide = model._replace(dtype=jnp.float64)
        loss_sum, num_tokens = fits.loss_fn(wide, None, params, batch)
        return loss_sum / num_tokens

    state, _ = helpers.run_step(step, state, micro_batches)
    expected = helpers.in_float64(jax.grad(mean_loss))(params, batch)
    got = helpers.difference(params, state.params)
    assert helpers.relative_error(got, expected) < 2e-6


def test_a_loss_in_float16_is_summed_over_devices_in_float32():
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w * x), jnp.float32(1) + 0 * jnp.sum(x)

    x = np.full(8, 30000, np.float16)  # whose sum is infinite
    step = make_train_step(loss_fn, optax.sgd(0.0), 1, **meshes.over("8"))
    _, metrics = step(step.init(jnp.ones((), jnp.float16)), x)
    assert metrics.loss == 30000


def test_a_scan_of_a_step_keeps_where_large_sums_are_on_an_explicit_mesh():
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(x @ w), jnp.sum(x[:, 0])

    step = make_train_step(loss_fn, optax.sgd(1.0), 2, **meshes.over("8, explicit"))
    state = step.init(jnp.zeros(1024))
    place = state.opt_state.grad_sums.sharding
    scanned = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))
    after, metrics = scanned(state, jnp.ones((2, 8, 1024)))
    assert after.opt_state.grad_sums.sharding == place and metrics.updated[1]
    np.testing.assert_array_equal(after.params, -np.ones(1024))


def test_aux_on_an_explicit_mesh_without_a_step():
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w * x), (x.size, x)

    mesh = meshes.make_mesh((8,), "explicit")
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    value_and_grad = jax.jit(window_value_and_grad(loss_fn, has_aux=True))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
        (_, (_, aux)), gradient = value_and_grad(jnp.ones(()), rows)
    np.testing.assert_array_equal(aux, x)
    np.testing.assert_allclose(gradient, x.mean())
