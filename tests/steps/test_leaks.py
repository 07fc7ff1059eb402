"""Nothing of a call outlives it: no tracer, and no array that a loss refers to."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import ALL_WAYS, make_mesh, make_step

from optax_tokenaccum import accumulate_over_window, window_value_and_grad

X = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)
MASK = np.float32(np.arange(32).reshape(4, 8) % 3 > 0)
BATCH = {"x": X, "mask": MASK}
PARAMS = {"w": jnp.ones((2, 3))}


def loss_fn(params: Any, batch: Any) -> Any:
    """The batch is closed over, by the loss and by a scan in it."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x * w + batch["x"]), None

    y, _ = jax.lax.scan(layer, batch["x"], params["w"])
    return jnp.sum(jnp.sum(y, -1) * batch["mask"]), jnp.sum(batch["mask"])


@pytest.mark.parametrize("devices", ["one", "window", "micro_batch"])
@pytest.mark.parametrize("way", ALL_WAYS)
def test_no_tracer_leaks_from_a_step(way: str, devices: str):
    options: dict[str, Any] = {"mesh": None, "data_axes": None}
    if devices != "one":
        options = {"mesh": make_mesh((8,)), "reduce_every": devices}
    step = make_step(way, optax.adam(0.1), loss_fn=loss_fn, k=2, **options)
    state = step.init(PARAMS)
    batches = (
        [BATCH]
        if "window" in way
        else [{n: x[i] for n, x in BATCH.items()} for i in range(2)]
    )
    with jax.checking_leaks():
        for batch in batches:
            state, _ = step(state, batch)


def gradients(params: Any, batch: Any) -> Any:
    return jax.value_and_grad(loss_fn, has_aux=True)(params, batch)


@pytest.mark.parametrize(
    "f",
    [window_value_and_grad(loss_fn), accumulate_over_window(gradients)],
    ids=["window_value_and_grad", "accumulate_over_window"],
)
def test_no_tracer_leaks_from_a_function(f: Any, maybe_jit: Any):
    with jax.checking_leaks():
        maybe_jit(f)(PARAMS, BATCH)


def test_what_a_loss_refers_to_is_freed():
    refs = []

    def call() -> None:
        weights = jnp.ones((4, 3))
        refs.append(weakref.ref(weights))

        def weighted(params: Any, batch: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return jnp.tanh(x * w) + jax.jit(jnp.sum)(weights), None

            y, _ = jax.lax.scan(layer, batch["x"] * weights[0], params["w"])
            return jnp.sum(y), jnp.sum(batch["mask"])

        window_value_and_grad(weighted)(PARAMS, BATCH)

    for _ in range(3):
        call()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
