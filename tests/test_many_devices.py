"""Train step and window step over 8 devices, on meshes of both types of axes."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import (
    cut,
    difference,
    float64_gradient,
    init_params,
    loss_mean_fn,
    loss_sum_fn,
    ragged_batch,
    relative_error,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
)

K, ROWS = 4, 64
# Small gradients would drown in the parameters they are subtracted from.
SCALE = 256.0
GRADIENT = 4 * (32 * 16 + 16 * 16 + 16 * 32)  # bytes
# Of each parameter, over which axis of the mesh.
WHOLE = {"embed": P(), "hidden": P(), "out": P()}
TENSOR_PARALLEL = {"embed": P(), "hidden": P(None, "model"), "out": P("model", None)}
FSDP = {"embed": P("data"), "hidden": P(None, "data"), "out": P("data", None)}
BOTH = {"embed": P("data"), "hidden": P("data", "model"), "out": P("model", "data")}
LAYOUTS = {
    "data parallel": ((8,), WHOLE),
    "tensor parallel": ((4, 2), TENSOR_PARALLEL),
    "fsdp": ((8,), FSDP),
    "fsdp and tensor parallel": ((4, 2), BOTH),
}
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
WAYS = ["two programs", "one program", "window"]


def make_mesh(shape: tuple[int, ...], kind: str = "auto") -> jax.sharding.Mesh:
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(TYPES[kind],) * len(shape))


def placed(mesh: Any, specs: dict[str, P]) -> Any:
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in init_params(0).items()
    }


def make_batch(devices: int) -> Any:
    """64 ragged rows of which device 1 has none with a token, in any micro-batch."""
    batch = ragged_batch(0, rows=ROWS)
    mask = batch["mask"].reshape(K, devices, ROWS // K // devices, -1)
    mask[:, 1] = 0
    return batch | {"mask": mask.reshape(batch["mask"].shape)}


def make_step(way: str, optimizer: Any, mesh: Any, **options: Any) -> Any:
    options = {"mesh": mesh, "data_axes": "data", "loss_fn": loss_sum_fn} | options
    loss_fn = options.pop("loss_fn")
    if way == "window":
        return make_window_step(loss_fn, optimizer, **options)
    schedule = K if way == "two programs" else (lambda _: K)
    return make_train_step(loss_fn, optimizer, schedule, **options)


def run(way: str, step: Any, state: Any, batch: Any, **kwargs: Any) -> Any:
    """One window; the batch is cut so that each device's rows are those of `cut`."""
    parts = cut(batch, K)
    if way == "window":
        return step(state, jax.tree.map(lambda *xs: np.stack(xs), *parts), **kwargs)
    for part in parts:
        state, metrics = step(state, part, **kwargs)
    return state, metrics


@functools.cache
def exact(devices: int) -> Any:
    return float64_gradient(init_params(0), make_batch(devices))


def applied(state: Any) -> Any:
    change = difference(init_params(0), state.params)
    return jax.tree.map(lambda x: x / SCALE, change)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
def test_gradient_is_that_of_the_full_batch(
    layout: str, kind: str, way: str, reduce_every: Any
):
    shape, specs = LAYOUTS[layout]
    mesh = make_mesh(shape, kind)
    batch = make_batch(shape[0])
    step = make_step(way, optax.sgd(SCALE), mesh, reduce_every=reduce_every)
    state = step.init(placed(mesh, specs))
    state, metrics = run(way, step, state, batch)
    assert relative_error(applied(state), exact(shape[0])) < 2e-6
    assert metrics.updated and metrics.num_tokens == batch["mask"].sum()
    norm = optax.tree.norm(jax.tree.map(np.float64, exact(shape[0])))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    for name, x in state.params.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim)


@pytest.mark.parametrize("devices", [8, 4])
def test_mean_over_devices_of_means_is_another_gradient(devices: int):
    batch = make_batch(devices)
    grad = jax.jit(jax.grad(loss_mean_fn, has_aux=True))
    parts = [part for part in cut(batch, K * devices) if part["mask"].any()]
    means = [grad(init_params(0), part)[0] for part in parts]
    naive = jax.tree.map(lambda *gs: np.mean(gs, 0), *means)
    assert relative_error(naive, exact(devices)) > 1e-2
