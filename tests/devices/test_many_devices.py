"""Train step and window step over 8 devices, on meshes of both axis types."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import slow
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import GRADIENT, K

from optax_tokenaccum import make_train_step, window_value_and_grad

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "sent"), [("data parallel", 1), ("fsdp", 9 / 8)])
def test_what_is_sent_in_a_window(layout: str, sent: float):
    """Parameters are gathered once, and sums reduced or scattered once."""
    shape, specs = meshes.LAYOUTS[layout]
    mesh, batch = meshes.make_mesh(shape), meshes.make_batch(shape[0])
    step = meshes.make_step("window", CLIPPED, mesh, reduce_every="window")
    lowered = step.lower(step.init(meshes.placed(mesh, specs)), meshes.stacked(batch))
    window = helpers.bytes_sent(lowered.compile()) / GRADIENT
    assert sent <= window < sent + 0.02  # including K losses and counts


@pytest.mark.parametrize(
    ("layout", "reduce_every"),
    [
        ("data parallel", None),  # by default, once a window
        slow("fsdp", "window"),
        ("data parallel", "micro_batch"),
    ],
)
def test_what_is_sent_and_what_a_device_holds(layout: str, reduce_every: str | None):
    shape, specs = meshes.LAYOUTS[layout]
    mesh, batch = meshes.make_mesh(shape), meshes.make_batch(shape[0])
    options: dict[str, Any] = {"reduce_every": reduce_every}
    step = meshes.make_step("two programs", CLIPPED, mesh, **options)
    state = step.init(meshes.placed(mesh, specs))
    programs = [
        step.accumulate.lower(state, helpers.cut(batch, K)[0]).compile(),
        step.close_window.lower(state).compile(),
    ]
    accumulate, close = (helpers.bytes_sent(x) / GRADIENT for x in programs)
    if reduce_every != "micro_batch":
        # Parameters are gathered for a micro-batch, and once for a window. Of the sums
        # that are scattered, a device gets its part.
        gathered, reduced = (1, 1 / 8) if layout == "fsdp" else (0, 1)
        assert gathered <= accumulate < gathered + 0.01
        assert reduced <= close < reduced + 0.01
    else:  # and the updated parameters are gathered
        assert 1 <= accumulate < 1.01
        assert 1 <= close < 1.01
    if layout == "data parallel":  # a device adds to its sum, or to its part, in place
        memory = programs[0].memory_analysis()
        held = GRADIENT // 8 if reduce_every == "micro_batch" else GRADIENT
        assert held <= memory.alias_size_in_bytes < held + 64  # and scalars
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert outputs < GRADIENT / 8


def test_a_loss_in_float16_is_summed_over_devices_in_float32():
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w * x), jnp.float32(1) + 0 * jnp.sum(x)

    mesh, x = meshes.make_mesh((8,)), np.full(8, 30000, np.float16)
    step = make_train_step(loss_fn, optax.sgd(0.0), 1, mesh=mesh, data_axes="data")
    _, metrics = step(step.init(jnp.ones((), jnp.float16)), x)
    assert metrics.loss == 30000
    with np.errstate(over="ignore"):
        assert np.isinf(np.sum(x))


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
