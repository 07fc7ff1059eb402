"""Threads that share a step, each with a state of its own."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import chex
import jax
import optax
import pytest
from helpers import cut, init_params, ragged_batch, run_step
from meshes import ALL_WAYS, K, make_mesh, make_step, stacked

THREADS = 4


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def train(way: str, step: Any, seed: int) -> Any:
    """Parameters after two windows; odd threads close a window by hand in between."""
    window = ragged_batch(seed, rows=8 * K)
    windows = [stacked(window)] if "window" in way else cut(window, K)
    state, metrics = run_step(step, step.init(init_params(seed)), windows)
    if seed % 2 and "window" not in way:
        state, _ = step.accumulate(state, windows[0])
        state, _ = step.close_window(state)
    state, metrics = run_step(step, state, windows)
    return jax.device_get((state.params, metrics.num_tokens, metrics.mini_step))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("way", ALL_WAYS)
def test_each_thread_gets_what_it_gets_alone(way: str, devices: int):
    mesh = make_mesh((8,)) if devices == 8 else None
    options = {} if mesh else {"data_axes": None}
    alone, shared = (make_step(way, optax.adam(1e-2), mesh, **options) for _ in "ab")
    expected = [train(way, alone, seed) for seed in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as threads:
        got = list(threads.map(lambda seed: train(way, shared, seed), range(THREADS)))
    chex.assert_trees_all_equal(got, expected)
