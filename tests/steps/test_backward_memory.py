"""The memory of gradients of stacked layers, from compiled programs: no second copy."""

from typing import Any

import jax
import jax.numpy as jnp
import nnx_ways
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass

pytestmark = pytest.mark.skipif(
    not BackwardPass.is_supported, reason="adds whole gradients below jax 0.11"
)

WIDTH = 256
SGD = optax.sgd(0.1)


def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def batch_of(rows: int, *leading: int) -> Any:
    return {
        "x": shape(*leading, rows, WIDTH),
        "ids": shape(*leading, rows, dtype=jnp.int32),
        "mask": shape(*leading, rows),
    }


def stacked_layers(dtype: Any, layers: int = 24) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w.astype(dtype)), None

    def loss_fn(params: Any, batch: Any) -> Any:
        y, _ = jax.lax.scan(layer, batch["x"].astype(dtype), params["layers"])
        losses = jnp.sum(y.astype(jnp.float32) ** 2, -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    return loss_fn, {"layers": shape(layers, WIDTH, WIDTH)}


def tied_embedding() -> Any:
    """A quarter of the parameters are an embedding, used at both ends."""

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    def loss_fn(params: Any, batch: Any) -> Any:
        embed = params["embed"]
        y, _ = jax.lax.scan(layer, embed[batch["ids"]], params["layers"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            y @ embed.T, batch["ids"]
        )
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    params = {"layers": shape(12, WIDTH, WIDTH), "embed": shape(4 * WIDTH, WIDTH)}
    return loss_fn, params


def net_bytes(lowered: Any) -> int:
    memory = lowered.compile().memory_analysis()
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def bytes_of(params: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def accumulate(loss_fn: Any, params: Any, **options: Any) -> int:
    """With the bytes of the sums, which the state brings along."""
    step = make_train_step(loss_fn, SGD, 8, **options)
    if options:  # each device has sums of its own
        state, rows = step.init(zeros_of(params)), 64
    else:
        state, rows = jax.eval_shape(step.init, params), 8
    return net_bytes(step.accumulate.lower(state, batch_of(rows))) + bytes_of(params)


def accumulate_on_8_devices(loss_fn: Any, params: Any) -> int:
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    return accumulate(loss_fn, params, mesh=mesh, data_axes="data")


def window_step(loss_fn: Any, params: Any) -> int:
    step = make_window_step(loss_fn, SGD)
    return net_bytes(step.lower(jax.eval_shape(step.init, params), batch_of(8, 8)))


def value_and_grad(loss_fn: Any, params: Any) -> int:
    f = jax.jit(window_value_and_grad(loss_fn))
    return net_bytes(f.lower(params, batch_of(8, 8)))


def nnx_accumulate(loss_fn: Any, params: Any) -> int:
    step = nnx_ways.make_step("nnx two programs", loss_fn, SGD, 8)
    state = step.init(zeros_of(params))
    return net_bytes(step.accumulate.lower(state, batch_of(8))) + bytes_of(params)


def nnx_window_step(loss_fn: Any, params: Any) -> int:
    step = nnx_ways.make_step("nnx window", loss_fn, SGD, 8)
    return net_bytes(step.lower(step.init(zeros_of(params)), batch_of(8, 8)))


def zeros_of(params: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)


WAYS = [
    accumulate,
    accumulate_on_8_devices,
    window_step,
    value_and_grad,
    nnx_accumulate,
    nnx_window_step,
]


def ratio(way: Any, loss_fn: Any, params: Any) -> float:
    """Over the memory of the gradients of one micro-batch, alone."""
    gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    return way(loss_fn, params) / net_bytes(gradients.lower(params, batch_of(8)))


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("way", WAYS)
def test_stacked_layers_need_one_gradient(way: Any, dtype: Any):
    assert ratio(way, *stacked_layers(dtype)) <= 1.06


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whole_gradients_need_more(way: Any, monkeypatch: pytest.MonkeyPatch):
    """The test above can fail."""
    monkeypatch.setattr(BackwardPass, "is_supported", False)
    assert ratio(way, *stacked_layers(jnp.float32)) > 1.4


@pytest.mark.parametrize("way", [accumulate, window_step, value_and_grad])
def test_a_tied_embedding_is_the_only_whole_gradient(way: Any):
    assert ratio(way, *tied_embedding()) <= 1.28
