"""The memory of gradients of stacked layers, from compiled programs: no second copy."""

from typing import Any

import jax
import jax.numpy as jnp
import meshes
import optax
import pytest
from helpers import net_bytes, slow

from optax_tokenaccum import make_train_step, window_value_and_grad
from optax_tokenaccum._core import backward

pytestmark = pytest.mark.skipif(
    not backward.CAN_ADD_IN_PLACE, reason="adds whole gradients below jax 0.11"
)

LAYERS, WIDTH = 24, 256
SHAPE = jax.ShapeDtypeStruct
PARAMS = {"layers": jnp.zeros((LAYERS, WIDTH, WIDTH))}


def batch_of(*axes: int) -> Any:
    return {"x": SHAPE((*axes, WIDTH), jnp.float32), "mask": SHAPE(axes, jnp.float32)}


def loss_of(x: Any, batch: Any) -> Any:
    losses = jnp.sum(x.astype(jnp.float32) ** 2, -1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def ratio(way: str, over: str, dtype: Any = jnp.float32) -> float:
    """With sums, over the memory of the gradients of one micro-batch alone."""

    def loss_fn(params: Any, batch: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w.astype(dtype)), None

        x = batch["x"].astype(dtype)
        return loss_of(jax.lax.scan(layer, x, params["layers"])[0], batch)

    gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    alone = net_bytes(gradients.lower(PARAMS, batch_of(8)))
    if way == "function":
        f = jax.jit(window_value_and_grad(loss_fn))
        return net_bytes(f.lower(PARAMS, batch_of(8, 8))) / alone
    options = {"mesh": None, "data_axes": None} | meshes.over(over)
    step = meshes.make_step(way, optax.sgd(0.1), loss_fn=loss_fn, **options)
    state = step.init(PARAMS)
    if "window" in way:
        return net_bytes(step.lower(state, batch_of(8, 8))) / alone
    lowered = step.accumulate.lower(state, batch_of(8 * int(over)))
    return (net_bytes(lowered) + PARAMS["layers"].nbytes) / alone


@pytest.mark.parametrize(
    ("way", "over", "dtype"),
    [
        ("function", "1", jnp.float32),
        slow("two programs", "8", jnp.float32),
        slow("nnx window", "1", jnp.bfloat16),
    ],
)
def test_stacked_layers_need_one_gradient(way: str, over: str, dtype: Any):
    assert ratio(way, over, dtype) <= 1.06


@pytest.mark.slow
def test_whole_gradients_need_more(monkeypatch: pytest.MonkeyPatch):
    """The test above can fail."""
    monkeypatch.setattr(backward, "CAN_ADD_IN_PLACE", False)
    assert ratio("two programs", "8") > 1.4


@pytest.mark.slow
def test_unrolled_bfloat16_layers_need_what_they_need_by_hand():
    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"].astype(jnp.bfloat16)
        for w in params:
            x = jnp.tanh(x @ w)
        return loss_of(x, batch)

    def add(sums: Any, params: Any, batch: Any) -> Any:
        terms = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return jax.tree.map(jnp.add, sums, terms)

    params = [jnp.zeros((WIDTH, WIDTH), jnp.bfloat16)] * 12
    sums = jax.eval_shape(lambda: ((0.0, 0.0), jax.tree.map(jnp.float32, params)))
    by_hand = net_bytes(jax.jit(add, donate_argnums=0).lower(sums, params, batch_of(8)))
    step = make_train_step(loss_fn, optax.sgd(0.1), 2)
    lowered = step.accumulate.lower(step.init(params), batch_of(8))
    assert net_bytes(lowered) <= 1.01 * by_hand
