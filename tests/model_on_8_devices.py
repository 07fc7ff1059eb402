"""Shared by the programs for `test_collectives.py`: a small model on 8 devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

K, ROWS = 4, 64
SHAPES = {"in": (16, 48), "out": (48, 8)}
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


@functools.cache
def mesh(model: int = 1) -> Mesh:
    devices = np.array(jax.devices())
    if model == 1:
        return Mesh(devices, "data")
    return Mesh(devices.reshape(-1, model), ("data", "model"))


def array(shape: Any, *spec: Any, on: Any = None, dtype: Any = jnp.float32) -> Any:
    sharding = NamedSharding(on or mesh(), P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def placed(tree: Any, *spec: Any) -> Any:
    """Return shapes of the tree's arrays on the mesh; scalars are replicated."""
    return jax.tree.map(
        lambda x: array(x.shape, *(spec if x.ndim else ()), dtype=x.dtype), tree
    )


def parameters(*, on: Any = None, **specs: Any) -> Any:
    return {
        name: array(shape, *specs.get(name, ()), on=on)
        for name, shape in SHAPES.items()
    }


def rows(*spec: Any, on: Any = None) -> Any:
    micro = (K,) if spec[0] is None else ()
    return {
        "x": array((*micro, ROWS, 16), *spec, on=on),
        "y": array((*micro, ROWS, 8), *spec, on=on),
    }


def loss_fn(params: Any, batch: Any) -> Any:
    predicted = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return jnp.sum((predicted - batch["y"]) ** 2), batch["y"].size


def gradient(params: Any, batch: Any) -> Any:
    return jax.grad(loss_fn, has_aux=True)(params, batch)[0]


def compiled(f: Any, *args: Any, out: Any = None) -> Any:
    """Compile `f`; `out` is an array, or a tree, with the output shardings."""
    out = jax.tree.map(lambda x: x.sharding, out)
    return jax.jit(f, out_shardings=out).lower(*args).compile()


def mapped(f: Any, *args: Any, out: Any) -> Any:
    """Map `f` over each device's part of the arguments, with no implicit reduction."""
    specs = jax.tree.map(lambda x: x.sharding.spec, args)
    on = jax.tree.leaves(args)[0].sharding.mesh
    return jax.shard_map(f, mesh=on, in_specs=specs, out_specs=out, check_vma=False)
