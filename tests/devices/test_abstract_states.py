"""`step.init` of shapes, without any array, and its warning about whole sums."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import optax
import pytest
from flax import nnx
from helpers import init_params
from jax.sharding import NamedSharding

# Its state is a key, and moments that are narrower than the parameters.
OPTIMIZER = optax.chain(
    optax.add_noise(0.1, 0.5, jax.random.key(0)),
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
)


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
    step = meshes.make_step(way, OPTIMIZER, mesh, reduce_every=reduce_every)
    meshes.state_and_shapes(step, params)
    naive = jax.eval_shape(step.init, params)
    assert any(
        not isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(naive)
    )


def check_programs_are_alike(lower: Any, states: Any, batch: Any) -> None:
    programs = [lower(state, batch).compile() for state in states]
    first, second = [
        (str(x.memory_analysis()), helpers.bytes_sent(x)) for x in programs
    ]
    assert first == second


@pytest.mark.parametrize("way", ["two programs", "window"])
def test_programs_are_those_of_arrays(way: str):
    shape, specs = meshes.LAYOUTS["fsdp"]
    mesh = meshes.make_mesh(shape)
    step = meshes.make_step(way, optax.adamw(0.1), mesh, reduce_every="micro_batch")
    batch = meshes.make_batch(8)
    batch = batch if way == "two programs" else meshes.stacked(batch)
    lower = step.accumulate.lower if way == "two programs" else step.lower
    states = meshes.state_and_shapes(step, meshes.placed(mesh, specs))
    check_programs_are_alike(lower, states, batch)


def test_one_device_and_shapes_that_are_not_placed():
    step = meshes.make_step("two programs", optax.adam(0.1), None, data_axes=None)
    meshes.state_and_shapes(step, init_params(0))
    placed = jax.device_put(init_params(0), jax.devices()[1])
    meshes.state_and_shapes(step, placed)
    mesh = meshes.make_mesh((8,))
    step = meshes.make_step("two programs", optax.adam(0.1), mesh)
    meshes.state_and_shapes(step, init_params(0))


@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
@pytest.mark.parametrize("layout", ["fsdp", "fsdp and tensor parallel"])
@pytest.mark.parametrize("way", ["nnx two programs", "nnx window"])
def test_an_abstract_model_and_its_optimizer(way: str, layout: str, reduce_every: str):
    """They are laid out in place, and their programs those of arrays."""
    shape, specs = meshes.LAYOUTS[layout]
    mesh = meshes.make_mesh(shape)
    step = meshes.make_step(way, optax.adamw(0.1), mesh, reduce_every=reduce_every)
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
    batch = meshes.make_batch(8)
    batch = meshes.stacked(batch) if way == "nnx window" else batch
    lower = step.lower if way == "nnx window" else step.accumulate.lower
    check_programs_are_alike(lower, (abstract, real), batch)


@pytest.mark.parametrize(
    "way", ["two programs", "window", "nnx two programs", "nnx window"]
)
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
            step(state, meshes.stacked(batch) if way == "nnx window" else batch)
        assert [x.filename for x in warned] == [caller]
    for reduce_every in "window", "micro_batch":  # the suite's filter raises warnings
        meshes.make_step(way, optax.sgd(0.1), mesh, reduce_every=reduce_every).init(
            spread
        )
    meshes.make_step(way, optax.sgd(0.1), mesh).init(init_params(0))
