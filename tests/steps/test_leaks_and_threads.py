"""Nothing of a call outlives it, or reaches the call of another thread."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import cut, init_params, ragged_batch, run_step
from meshes import K, make_mesh, make_step

from optax_tokenaccum import window_value_and_grad

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)
BATCH = {"x": X, "mask": np.float32(np.arange(32).reshape(4, 8) % 3 > 0)}
PARAMS = {"w": jnp.ones((2, 3))}


def layout(name: str) -> dict[str, Any]:
    if name == "one":
        return {"mesh": None, "data_axes": None}
    return {"mesh": make_mesh((8,)), "reduce_every": name}


def loss_fn(params: Any, batch: Any) -> Any:
    """The batch is closed over, by the loss and by a scan in it."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x * w + batch["x"]), None

    y, _ = jax.lax.scan(layer, batch["x"], params["w"])
    return jnp.sum(jnp.sum(y, -1) * batch["mask"]), jnp.sum(batch["mask"])


# Not with `reduce_every="window"`: jax itself leaks from the gradient of a shard_map.
@pytest.mark.parametrize(
    ("way", "devices"),
    [("two programs", "one"), ("nnx window", "micro_batch")],
)
def test_no_tracer_leaks_from_a_step(way: str, devices: str):
    step = make_step(way, optax.adam(0.1), loss_fn=loss_fn, k=2, **layout(devices))
    micro_batches = [{n: x[i] for n, x in BATCH.items()} for i in range(2)]
    with jax.checking_leaks():
        run_step(step, step.init(PARAMS), [BATCH] if "window" in way else micro_batches)


def test_no_tracer_leaks_from_a_function():
    with jax.checking_leaks():
        window_value_and_grad(loss_fn)(PARAMS, BATCH)


@pytest.mark.parametrize("devices", ["function", "one"])
def test_what_a_loss_refers_to_is_freed(devices: str):
    refs = []

    def call() -> None:
        weights = jnp.ones((4, 3))
        refs.append(weakref.ref(weights))

        def weighted(params: Any, batch: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return jnp.tanh(x * w) + jax.jit(jnp.sum)(weights), None

            y, _ = jax.lax.scan(layer, batch["x"] * weights[0], params["w"])
            return jnp.sum(y), jnp.sum(batch["mask"])

        if devices == "function":
            window_value_and_grad(weighted)(PARAMS, BATCH)
        else:
            tx = optax.sgd(0.1)
            step = make_step("window", tx, loss_fn=weighted, k=4, **layout(devices))
            step(step.init(PARAMS), BATCH)

    for _ in range(3):
        call()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def train(step: Any, seed: int) -> Any:
    """Parameters after two windows; odd threads close a window by hand in between."""
    window = cut(ragged_batch(seed, rows=8 * K), K)
    state, metrics = run_step(step, step.init(init_params(seed)), window)
    if seed % 2:
        state, _ = step.accumulate(state, window[0])
        state, _ = step.close_window(state)
    state, metrics = run_step(step, state, window)
    return jax.device_get((state.params, metrics.num_tokens, metrics.mini_step))


def test_each_thread_gets_what_it_gets_alone():
    alone, shared = (
        make_step("two programs", optax.adam(1e-2), **layout("one")) for _ in "ab"
    )
    expected = [train(alone, seed) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda seed: train(shared, seed), range(4)))
    finally:
        sys.setswitchinterval(before)
    chex.assert_trees_all_equal(got, expected)
