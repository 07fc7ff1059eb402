"""`step.init` of shapes, without any array, and its warning about whole sums."""

from typing import Any

import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import optax
import pytest
from flax import nnx
from helpers import init_params, slow
from jax.sharding import NamedSharding

# Its state is a key, and moments that are narrower than the parameters.
OPTIMIZER = optax.chain(
    optax.add_noise(0.1, 0.5, jax.random.key(0)),
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
)


@pytest.mark.parametrize(
    ("way", "layout", "kind", "reduce_every"),
    [
        ("two programs", "data parallel", "auto", "micro_batch"),
        slow("window", "fsdp and tensor parallel", "explicit", "micro_batch"),
    ],
)
def test_states_and_programs_are_those_of_arrays(
    way: str, layout: str, kind: str, reduce_every: str
):
    shape, specs = meshes.LAYOUTS[layout]
    mesh = meshes.make_mesh(shape, kind)
    params = meshes.placed(mesh, specs)
    step = meshes.make_step(way, OPTIMIZER, mesh, reduce_every=reduce_every)
    check_programs_are_alike(way, step, *meshes.state_and_shapes(step, params))
    naive = jax.eval_shape(step.init, params)
    assert any(
        not isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(naive)
    )


def check_programs_are_alike(way: str, step: Any, *states: Any) -> None:
    batch = meshes.make_batch(8)
    if "window" in way:
        part, batch = step, meshes.stacked(batch)
    else:
        part = step.accumulate
    first, second = (part.lower(state, batch).as_text() for state in states)
    assert first == second


def test_one_device_and_shapes_that_are_not_placed():
    step = meshes.make_step("two programs", optax.adam(0.1), None, data_axes=None)
    meshes.state_and_shapes(step, init_params(0))
    placed = jax.device_put(init_params(0), jax.devices()[-1])
    meshes.state_and_shapes(step, placed)
    mesh = meshes.make_mesh((8,))
    step = meshes.make_step("two programs", optax.adam(0.1), mesh)
    meshes.state_and_shapes(step, init_params(0))


def test_an_abstract_model_and_its_optimizer():
    """They are laid out in place, and their programs those of arrays."""
    way, (shape, specs) = "nnx two programs", meshes.LAYOUTS["fsdp"]
    mesh = meshes.make_mesh(shape)
    step = meshes.make_step(way, optax.adamw(0.1), mesh, reduce_every="micro_batch")
    real = step.init(meshes.placed(mesh, specs))
    made = nnx.eval_shape(lambda: (real.model, real.optimizer))
    for x, y in zip(made[0].leaves, real.model.leaves, strict=True):
        sharding = y.get_raw_value().sharding
        x.set_raw_value(jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=sharding))
    abstract = nnx_ways.State(*made)
    step.lay_out(abstract)
    states = [nnx.state((state.model, state.optimizer)) for state in (abstract, real)]
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.sharding is None:  # optimizer.step, which no program of a train step reads
            assert not y.committed
        else:
            assert x.sharding.is_equivalent_to(y.sharding, y.ndim)
    check_programs_are_alike(way, step, abstract, real)


@pytest.mark.parametrize("way", ["two programs", "nnx two programs"])
def test_whole_sums_of_spread_parameters_are_warned_about_once(way: str):
    shape, specs = meshes.LAYOUTS["fsdp"]
    mesh = meshes.make_mesh(shape)
    spread = meshes.placed(mesh, specs)
    step = meshes.make_step(way, optax.sgd(0.1), mesh)
    with pytest.warns(UserWarning, match=f"{meshes.GRADIENT:,} bytes") as warned:
        state = step.init(spread)
        step.init(spread)
    caller = nnx_ways.__file__ if way in nnx_ways.WAYS else __file__
    assert [x.filename for x in warned] == [caller]
    if way in nnx_ways.WAYS:
        step, batch = meshes.make_step(way, optax.sgd(0.1), mesh), meshes.make_batch(8)
        with pytest.warns(UserWarning, match="bytes") as warned:
            step.accumulate.lower(state, batch)
        assert [x.filename for x in warned] == [caller]
    for reduce_every in "window", "micro_batch":  # the suite's filter raises warnings
        meshes.make_step(way, optax.sgd(0.1), mesh, reduce_every=reduce_every).init(
            spread
        )
    meshes.make_step(way, optax.sgd(0.1), mesh).init(init_params(0))
