"""Nothing of a call outlives it, or reaches the call of another thread."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import optax
import problems
import pytest
from helpers import run_step, stack
from problems import BATCHES, FEW

from optax_tokenaccum import window_value_and_grad

pytestmark = pytest.mark.slow

ADAM = optax.adam(0.1)


def new_step(way: str, over: str = "1", loss_fn: Any = problems.layered_loss) -> Any:
    options = {"mesh": None, "data_axes": None} | meshes.over(over)
    return meshes.make_step(way, ADAM, loss_fn=loss_fn, k=len(BATCHES), **options)


def loss_fn(params: Any, batch: Any) -> Any:
    """The batch is closed over, by the loss and by a scan in it."""

    def network(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w + batch["x"]), None

        return jax.lax.scan(layer, x, params["layers"])[0]

    return problems.loss_through(network)(params, batch)


# Not with `reduce_every="window"`: jax itself leaks from the gradient of a shard_map.
@pytest.mark.parametrize(
    ("way", "over"),
    [("two programs", "1"), ("nnx window", "8, each"), ("function", "1")],
)
def test_no_tracer_leaks(way: str, over: str):
    with jax.checking_leaks():
        if way == "function":
            window_value_and_grad(loss_fn)(FEW, stack(BATCHES))
            return
        step = new_step(way, over, loss_fn)
        calls = [stack(BATCHES)] if "window" in way else BATCHES
        run_step(step, step.init(FEW), calls)


@pytest.mark.parametrize("way", ["function", "window"])
def test_what_a_loss_refers_to_is_freed(way: str):
    refs = []

    def call() -> None:
        weights = jnp.ones(problems.FEATURES)
        refs.append(weakref.ref(weights))

        def network(params: Any, x: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return jnp.tanh(x @ w) + jax.jit(jnp.sum)(weights), None

            return jax.lax.scan(layer, x * weights, params["layers"])[0]

        weighted = problems.loss_through(network)
        if way == "function":
            window_value_and_grad(weighted)(FEW, stack(BATCHES))
        else:
            step = new_step(way, loss_fn=weighted)
            step(step.init(FEW), stack(BATCHES))

    for _ in range(3):
        call()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def train(step: Any, seed: int) -> Any:
    """Parameters after two windows; odd threads close a window by hand in between."""
    window = [problems.batch_of(10 * seed + i, [i + 1] * 8) for i in range(3)]
    state, metrics = run_step(step, step.init(FEW), window)
    if seed % 2:
        state, _ = step.accumulate(state, window[0])
        state, _ = step.close_window(state)
    state, metrics = run_step(step, state, window)
    return jax.device_get((state.params, metrics.num_tokens, metrics.mini_step))


def test_each_thread_gets_what_it_gets_alone():
    alone, shared = new_step("two programs"), new_step("two programs")
    expected = [train(alone, seed) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda seed: train(shared, seed), range(4)))
    finally:
        sys.setswitchinterval(before)
    chex.assert_trees_all_equal(got, expected)
