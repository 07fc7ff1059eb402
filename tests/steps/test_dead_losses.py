"""A loss that no parameter reaches raises while it is traced, in every way in."""

from typing import Any

import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import optax
import problems
import pytest
from flax import nnx
from helpers import stack

from optax_tokenaccum import coupled_value_and_grad, window_value_and_grad
from optax_tokenaccum import nnx as nnx_steps

BATCH = problems.batch_of(0, [1.0] * 8)
OTHER = jax.tree.map(jnp.copy, problems.PARAMS)
CAUSES = r"No parameter reaches loss_sum.* swapped .* close over a model.* another mod"


def swapped(params: Any, batch: Any) -> Any:
    return problems.linear_loss(params, batch)[::-1]


@jax.jit
def closed_over(params: Any, batch: Any) -> Any:
    return problems.linear_loss(OTHER, batch)


LOSSES = {"swapped": swapped, "closed over": closed_over}


@pytest.mark.parametrize("over", ["1", "8", "8, each"])
@pytest.mark.parametrize(
    "way", ["two programs", "one program", "window", *nnx_ways.WAYS]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_step_raises(way: str, loss: str, over: str):
    options = {"mesh": None, "data_axes": None} | meshes.over(over)
    step = meshes.make_step(way, optax.sgd(0.1), loss_fn=LOSSES[loss], k=2, **options)
    batch = stack([BATCH, BATCH]) if way.endswith("window") else BATCH
    with pytest.raises(ValueError, match=CAUSES):
        step(step.init(problems.PARAMS), batch)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_function_raises(loss: str):
    window, model = stack([BATCH, BATCH]), nnx_ways.Holder(problems.PARAMS)

    def of_model(model: Any, batch: Any) -> Any:
        return LOSSES[loss](model.params(), batch)

    calls = [
        lambda: window_value_and_grad(LOSSES[loss])(problems.PARAMS, window),
        lambda: nnx_steps.window_value_and_grad(of_model)(model, window),
        lambda: coupled_value_and_grad(
            lambda params, batch: jnp.float32(LOSSES[loss](params, batch)[0]), jnp.sum
        )(problems.PARAMS, window),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=CAUSES):
            call()


def test_a_loss_of_one_of_many_parameters_or_of_none_that_trains_is_right():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))  # without its bias
    step = nnx_steps.make_window_step(
        lambda model, x: (jnp.sum(model.kernel[...] * x), 1)
    )
    step(
        model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jnp.ones((1, 3, 1))
    )
    f = window_value_and_grad(lambda params, x: (jnp.sum(x), 1))
    assert f({"ids": jnp.arange(3)}, jnp.ones((2, 3)))[0][0] == 3
