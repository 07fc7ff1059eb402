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
from meshes import make_step

# Its state is a key, and moments that are narrower than the parameters.
OPTIMIZER = optax.chain(
    optax.add_noise(0.1, 0.5, jax.random.key(0)),
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
)


def placed(layout: str, kind: str = "auto") -> Any:
    """A mesh, and parameters that are placed on it."""
    shape, specs = meshes.LAYOUTS[layout]
    mesh = meshes.make_mesh(shape, kind)
    return mesh, meshes.placed(mesh, specs)


def check_programs_are_alike(way: str, step: Any, *states: Any) -> None:
    batch = meshes.make_batch(8)
    part = step if "window" in way else step.accumulate
    batch = meshes.stacked(batch) if "window" in way else batch
    first, second = (part.lower(state, batch).as_text() for state in states)
    assert first == second


@pytest.mark.parametrize(
    ("way", "layout", "kind"),
    [
        ("two programs", "data parallel", "auto"),
        slow("window", "fsdp and tensor parallel", "explicit"),
    ],
)
def test_states_and_programs_are_those_of_arrays(way: str, layout: str, kind: str):
    mesh, params = placed(layout, kind)
    step = make_step(way, OPTIMIZER, mesh, reduce_every="micro_batch")
    check_programs_are_alike(way, step, *meshes.state_and_shapes(step, params))
    naive = jax.tree.leaves(jax.eval_shape(step.init, params))
    assert not all(isinstance(x.sharding, NamedSharding) for x in naive)


def test_one_device_and_shapes_that_are_not_placed():
    params, adam = init_params(0), optax.adam(0.1)
    step = make_step("two programs", adam, None, data_axes=None)
    for given in (params, jax.device_put(params, jax.devices()[-1])):
        meshes.state_and_shapes(step, given)
    step = make_step("two programs", adam, meshes.make_mesh((8,)))
    meshes.state_and_shapes(step, params)


def test_an_abstract_model_and_its_optimizer():
    """They are laid out in place, and their programs those of arrays."""
    way, (mesh, params) = "nnx two programs", placed("fsdp")
    step = make_step(way, optax.adamw(0.1), mesh, reduce_every="micro_batch")
    real = step.init(params)
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
    mesh, spread = placed("fsdp")

    def new_step(**options: Any) -> Any:
        return make_step(way, optax.sgd(0.1), mesh, **options)

    step = new_step()
    with pytest.warns(UserWarning, match=f"{meshes.GRADIENT:,} bytes") as warned:
        step.init(spread)
        step.init(spread)
    assert len(warned) == 1
    assert warned[0].filename == __file__ or way in nnx_ways.WAYS
    for reduce_every in "window", "micro_batch":  # the suite's filter raises warnings
        new_step(reduce_every=reduce_every).init(spread)
    new_step().init(init_params(0))
