"""`step.init` of shapes: the state's shapes and shardings, without any array.

And its warning about parameters that are spread where their sums are not.
"""

import jax
import jax.numpy as jnp
import meshes
import optax
import pytest
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
        for state in meshes.state_and_shapes(step, meshes.placed(mesh, specs))
    ]
    assert texts[0] == texts[1]


def test_one_device_and_shapes_that_are_not_placed():
    step = meshes.make_step("two programs", optax.adam(0.1), None, data_axes=None)
    meshes.state_and_shapes(step, init_params(0))
    placed = jax.device_put(init_params(0), jax.devices()[1])
    meshes.state_and_shapes(step, placed)
    mesh = meshes.make_mesh((8,))
    step = meshes.make_step("two programs", optax.adam(0.1), mesh)
    meshes.state_and_shapes(step, init_params(0))


@pytest.mark.parametrize("way", ["two programs", "window", "nnx window"])
def test_whole_sums_of_spread_parameters_are_warned_about_once(way: str):
    shape, specs = meshes.LAYOUTS["fsdp"]
    mesh = meshes.make_mesh(shape)
    spread = meshes.placed(mesh, specs)
    step = meshes.make_step(way, optax.sgd(0.1), mesh)
    with pytest.warns(UserWarning, match=f"{meshes.GRADIENT:,} bytes") as warned:
        step.init(spread)
        step.init(spread)
    assert len(warned) == 1
    for reduce_every in "window", "micro_batch":  # the suite's filter raises warnings
        meshes.make_step(way, optax.sgd(0.1), mesh, reduce_every=reduce_every).init(
            spread
        )
    meshes.make_step(way, optax.sgd(0.1), mesh).init(init_params(0))
