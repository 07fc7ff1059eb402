"""Steps over 8 devices: layouts of the parameters, ragged rows, windows."""

import math
from typing import Any

import helpers
import jax
import nnx_ways
import platforms
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import make_window_step

K, ROWS = 4, 64
# Subtracted from parameters, small gradients would be lost to rounding.
SCALE = 256.0
GRADIENT = 4 * (32 * 16 + 16 * 16 + 16 * 32)  # bytes
# Which axis of the mesh shards each parameter.
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


def make_mesh(shape: tuple[int, ...], kind: str = "auto") -> jax.sharding.Mesh:
    """Return a mesh; `kind` is of all its axes, or of each: "auto explicit"."""
    names, kinds = ("data", "model")[: len(shape)], kind.split()
    platforms.require(devices=math.prod(shape))
    types = tuple(TYPES[x] for x in kinds) * (len(shape) // len(kinds))
    return jax.make_mesh(shape, names, axis_types=types)


def over(devices: str) -> dict[str, Any]:
    """Return options of a step: over "1" device, or "8", also "8, explicit, each"."""
    count, *kinds = devices.split(", ")
    if count == "1":
        return {}
    mesh = make_mesh((8,), "explicit" if "explicit" in kinds else "auto")
    options = {"mesh": mesh, "data_axes": "data"}
    return options | ({"reduce_every": "micro_batch"} if "each" in kinds else {})


def placed(mesh: Any, specs: dict[str, P]) -> Any:
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in helpers.init_params(0).items()
    }


def make_batch(devices: int) -> Any:
    """Return 64 ragged rows: none of device 1 or of micro-batch 2 has a token."""
    batch = helpers.ragged_batch(0, rows=ROWS)
    mask = batch["mask"].reshape(K, devices, ROWS // K // devices, -1)
    mask[:, 1], mask[2] = 0, 0
    return batch | {"mask": mask.reshape(batch["mask"].shape)}


def make_step(way: str, optimizer: Any, mesh: Any, **options: Any) -> Any:
    options = {"mesh": mesh, "data_axes": "data"} | options
    loss_fn, k = options.pop("loss_fn", helpers.loss_sum_fn), options.pop("k", K)
    if way in nnx_ways.WAYS:
        return nnx_ways.make_step(way, loss_fn, optimizer, k, **options)
    if way == "window":
        return make_window_step(loss_fn, optimizer, **options)
    return helpers.new_train_step(way, loss_fn, optimizer, k, **options)


def state_and_shapes(step: Any, params: Any) -> tuple[Any, Any]:
    """Return the states that `step.init` makes of arrays and of shapes, which agree."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    state, shapes = step.init(params), step.init(shapes)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    named = jax.tree_util.tree_leaves_with_path(state)
    for (path, x), y in zip(named, jax.tree.leaves(shapes), strict=True):
        assert isinstance(y, jax.ShapeDtypeStruct)
        assert (y.shape, y.dtype, y.weak_type) == (x.shape, x.dtype, False), path
        if y.sharding is None:
            assert not x.committed, path
        else:
            assert y.sharding.is_equivalent_to(x.sharding, x.ndim), path
    return state, shapes


def stacked(batch: Any) -> Any:
    return helpers.stacked(batch, K)


def applied(params: Any) -> Any:
    """Return the gradient that `sgd(SCALE)` applied to the first parameters."""
    change = helpers.difference(helpers.init_params(0), params)
    return jax.tree.map(lambda x: x / SCALE, change)
