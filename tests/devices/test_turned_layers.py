"""Layers along another axis than the first, whose sums are turned during a window."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import problems
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import BATCHES, FEATURES, KEEPS, LAYERS, loss_through

from optax_tokenaccum import make_train_step, make_window_step
from optax_tokenaccum._core import backward
from optax_tokenaccum.debug._whole_gradients import whole_gradients

NEW_JAX = backward.CAN_ADD_IN_PLACE
PARAMS = {
    "w": problems.normal(1, FEATURES, LAYERS, FEATURES) / 2,
    "scale": problems.normal(2, FEATURES, LAYERS),
    "out": problems.normal(3, FEATURES),
}


def scan_over(axis: int) -> Any:
    def network(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w["w"]) * w["scale"], None

        layers = {k: jnp.moveaxis(params[k], axis, 0) for k in ("w", "scale")}
        return jax.lax.scan(layer, x, layers)[0]

    return network


loss_fn = loss_through(scan_over(1))


def with_aux(params: Any, batch: Any) -> Any:
    """The same; its gradients are NaN without tokens."""
    loss_sum, n = loss_fn(params, batch)
    return loss_sum / n * n, (n, {"loss_sum": loss_sum})


def placed(mesh: Any, params: Any, specs: dict[str, P]) -> Any:
    shardings = {k: NamedSharding(mesh, specs.get(k, P())) for k in params}
    return jax.device_put(params, shardings)


def check(state: Any, loss_fn: Any, params: Any) -> None:
    expected = problems.by_hand(loss_fn, params, BATCHES)
    assert helpers.relative_error(state.opt_state.inner_opt_state, expected) < 1e-6


@pytest.mark.parametrize(
    ("over", "spec"),
    [
        ("8, each", P()),  # ZeRO-2
        helpers.slow("8, explicit, each", P("data")),  # FSDP
        helpers.slow("8", P()),  # a sum on each
    ],
)
def test_over_devices(over: str, spec: P):
    options = meshes.over(over)
    step = make_window_step(with_aux, KEEPS, has_aux=True, **options)
    specs = {"w": spec, "scale": spec}
    state = step.init(placed(options["mesh"], PARAMS, specs))
    window = helpers.stack(BATCHES)
    assert not NEW_JAX or [*whole_gradients(step, state, window)] == ["['out']"]
    before = jax.tree.map(lambda x: x.sharding, state)
    state, _ = step(state, window)
    check(state, loss_fn, PARAMS)
    assert jax.tree.map(lambda x: x.sharding, state) == before


def test_layers_that_are_spread_are_added_next_to_layers_that_are_not():
    """A scan over layers that are spread would gather their sum."""
    shapes = {"w": (8, FEATURES, FEATURES), "scale": (8, FEATURES), "out": (FEATURES,)}
    params = {k: problems.normal(1, *shape) / 2 for k, shape in shapes.items()}
    options = meshes.over("8, each")
    of_first_axis = loss_through(scan_over(0))
    step = make_train_step(of_first_axis, KEEPS, len(BATCHES), **options)
    specs = {"w": P("data"), "scale": P(None, "data")}
    state = step.init(placed(options["mesh"], params, specs))
    found = whole_gradients(step, state, BATCHES[0])
    if NEW_JAX:
        assert {*found} == {"['w']", "['out']"}
        # What the step knows; "..., spread another axis" would be found by looking.
        assert found["['w']"] == "its first axis is spread"
    state, _ = helpers.run_step(step, state, BATCHES)
    check(state, of_first_axis, params)


def test_a_skip_function_is_shown_gradients_as_they_are():
    def skip(gradients: Any, *_: Any) -> Any:
        chex.assert_trees_all_equal_shapes(gradients, PARAMS)
        return jnp.asarray(False), ()

    step = make_window_step(loss_fn, KEEPS, should_skip_update_fn=skip)
    jax.eval_shape(step, step.init(PARAMS), helpers.stack(BATCHES))
