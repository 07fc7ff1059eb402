"""`step.init` of shapes: the state's shapes and shardings, without any array."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import meshes
import optax
import pytest
from helpers import init_params
from jax.sharding import NamedSharding

sys.path.append(str(Path(__file__).parents[1] / "core"))
import test_conformance

SLOW = pytest.mark.slow
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
} | {
    name: lambda name=name: test_conformance.make_optimizer(name)
    for name in test_conformance.OPTIMIZERS
}


def shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def check(step: Any, params: Any) -> Any:
    """Compare with the state of arrays; also return that of shapes."""
    state, shapes = step.init(params), step.init(jax.tree.map(shape_of, params))
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


@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("layout", meshes.LAYOUTS)
@pytest.mark.parametrize(
    ("way", "kind"), [("two programs", "auto"), ("window", "explicit")]
)
def test_the_state_is_that_of_arrays(
    way: str, kind: str, layout: str, reduce_every: str
):
    shape, specs = meshes.LAYOUTS[layout]
    mesh = meshes.make_mesh(shape, kind)
    params = meshes.placed(mesh, specs)
    step = meshes.make_step(way, OPTIMIZERS["adamw"](), mesh, reduce_every=reduce_every)
    check(step, params)
    naive = jax.eval_shape(step.init, params)
    assert any(
        not isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(naive)
    )


@pytest.mark.parametrize(
    "name",
    ["add_noise", "adafactor", *(pytest.param(x, marks=SLOW) for x in OPTIMIZERS)],
)
def test_every_optimizers_state(name: str):
    shape, specs = meshes.LAYOUTS["fsdp and tensor parallel"]
    mesh = meshes.make_mesh(shape)
    step = meshes.make_step(
        "window", OPTIMIZERS[name](), mesh, reduce_every="micro_batch"
    )
    check(step, meshes.placed(mesh, specs))


@pytest.mark.parametrize("way", ["two programs", "window"])
def test_programs_are_those_of_arrays(way: str):
    shape, specs = meshes.LAYOUTS["fsdp"]
    mesh = meshes.make_mesh(shape)
    step = meshes.make_step(way, optax.adamw(0.1), mesh, reduce_every="micro_batch")
    batch = meshes.make_batch(8)
    batch = batch if way == "two programs" else meshes.stacked(batch)
    lower = step.accumulate.lower if way == "two programs" else step.lower
    texts = [
        lower(state, batch).compile().as_text()
        for state in check(step, meshes.placed(mesh, specs))
    ]
    assert texts[0] == texts[1]


def test_one_device_and_shapes_that_are_not_placed():
    step = meshes.make_step("two programs", optax.adam(0.1), None, data_axes=None)
    check(step, init_params(0))
    placed = jax.device_put(init_params(0), jax.devices()[1])
    check(step, placed)
    mesh = meshes.make_mesh((8,))
    step = meshes.make_step("two programs", optax.adam(0.1), mesh)
    check(step, init_params(0))
