"""The memory of gradients of stacked layers, from compiled programs: no second copy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import net_bytes, slow
from meshes import make_mesh, make_step

from optax_tokenaccum import _backward, make_train_step, window_value_and_grad

pytestmark = pytest.mark.skipif(
    not _backward.CAN_ADD_IN_PLACE, reason="adds whole gradients below jax 0.11"
)

WIDTH = 256


def batch_of(*axes: int) -> Any:
    x = jax.ShapeDtypeStruct((*axes, WIDTH), jnp.float32)
    return {"x": x, "mask": jax.ShapeDtypeStruct(axes, jnp.float32)}


def stacked_layers(dtype: Any = jnp.float32) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w.astype(dtype)), None

    def loss_fn(params: Any, batch: Any) -> Any:
        y, _ = jax.lax.scan(layer, batch["x"].astype(dtype), params["layers"])
        losses = jnp.sum(y.astype(jnp.float32) ** 2, -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    return loss_fn, {"layers": np.zeros((24, WIDTH, WIDTH), np.float32)}


def bytes_of_way(way: str, over_8: bool, loss_fn: Any, params: Any) -> int:
    """With the bytes of the sums, if the state brings them along."""
    if way == "function":
        f = jax.jit(window_value_and_grad(loss_fn))
        return net_bytes(f.lower(params, batch_of(8, 8)))
    over = {} if over_8 else {"data_axes": None}
    mesh = make_mesh((8,)) if over_8 else None
    step = make_step(way, optax.sgd(0.1), mesh, loss_fn=loss_fn, **over)
    state = step.init(params)
    if "window" in way:
        return net_bytes(step.lower(state, batch_of(8, 8)))
    lowered = step.accumulate.lower(state, batch_of(64 if over_8 else 8))
    sums = params["layers"].nbytes
    return net_bytes(lowered) + sums


def ratio(way: str, over_8: bool, loss_fn: Any, params: Any) -> float:
    """Over the memory of the gradients of one micro-batch, alone."""
    gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    alone = net_bytes(gradients.lower(params, batch_of(8)))
    return bytes_of_way(way, over_8, loss_fn, params) / alone


@pytest.mark.parametrize(
    ("way", "over_8", "dtype"),
    [
        ("function", False, jnp.float32),
        slow("two programs", True, jnp.float32),
        slow("nnx window", False, jnp.bfloat16),
    ],
)
def test_stacked_layers_need_one_gradient(way: str, over_8: bool, dtype: Any):
    assert ratio(way, over_8, *stacked_layers(dtype)) <= 1.06


@pytest.mark.slow
def test_whole_gradients_need_more(monkeypatch: pytest.MonkeyPatch):
    """The test above can fail."""
    monkeypatch.setattr(_backward, "CAN_ADD_IN_PLACE", False)
    assert ratio("two programs", True, *stacked_layers()) > 1.4


def unrolled_bfloat16_layers() -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"].astype(jnp.bfloat16)
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        losses = jnp.sum(x.astype(jnp.float32) ** 2, -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    return loss_fn, {"layers": [np.zeros((WIDTH, WIDTH), jnp.bfloat16)] * 12}


@pytest.mark.slow
def test_unrolled_bfloat16_layers_need_what_they_need_by_hand():
    loss_fn, params = unrolled_bfloat16_layers()

    def add(sums: Any, params: Any, batch: Any) -> Any:
        terms = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return jax.tree.map(jnp.add, sums, terms)

    sums = jax.eval_shape(lambda: ((0.0, 0.0), jax.tree.map(jnp.float32, params)))
    by_hand = net_bytes(jax.jit(add, donate_argnums=0).lower(sums, params, batch_of(8)))
    step = make_train_step(loss_fn, optax.sgd(0.1), 2)
    lowered = step.accumulate.lower(step.init(params), batch_of(8))
    assert net_bytes(lowered) <= 1.01 * by_hand
