"""Devices with few tokens, none, or rejected rows, and windows that change devices."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import Mesh
from meshes import make_mesh

from optax_tokenaccum import make_train_step, regroup_sums

DEVICES = 8
SGD = optax.sgd(1.0)


def loss_fn(w: Any, x: Any) -> Any:
    """A loss in which tokens are the nonzero numbers.

    It takes the mean of each row first, which is 0/0 in a row without tokens.
    """
    n = jnp.sum(x != 0, axis=-1)
    means = jnp.sum(w * x, axis=-1) / n
    return jnp.sum(jnp.where(n > 0, means * n, 0)), jnp.sum(n)


def make_step(way: str, loss_fn: Any, optimizer: Any = SGD, **options: Any) -> Any:
    options = {"mesh": make_mesh((DEVICES,)), "loss_fn": loss_fn, "k": 3} | options
    return meshes.make_step(way, optimizer, **options)


def ragged(*, rows: int = DEVICES) -> np.ndarray:
    """Return 3 micro-batches `[rows, 4]` of numbers, 0 where there is no token."""
    rng = np.random.default_rng(0)
    window = rng.integers(1, 9, (3, rows, 4)).astype(np.float32)
    return np.where(np.arange(4) < rng.integers(1, 5, (3, rows, 1)), window, 0)


def mean_of(window: np.ndarray) -> float:
    return window.sum() / (window != 0).sum()


def test_token_budget_counts_all_devices():
    mesh = make_mesh((DEVICES,))
    step = make_train_step(loss_fn, SGD, every_n_tokens=40, mesh=mesh, data_axes="data")
    state, closed = step.init(jnp.zeros(())), []
    for row in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]):  # 8, 24, 56 tokens
        state, metrics = step(state, np.tile(np.float32(row), (DEVICES, 1)))
        closed.append((bool(metrics.updated), float(metrics.num_tokens)))
    assert closed == [(False, 8), (False, 24), (True, 56)]
    state, _ = step(state, np.tile(np.float32([3, 0, 0, 0]), (DEVICES, 1)))
    state, metrics = step.close_window(state)
    assert metrics.updated and metrics.num_tokens == 8
    assert state.params == -1 - 3


def step_on(devices: int | str, loss_fn: Any = loss_fn) -> Any:
    others: dict[Any, Any] = {
        "4 x 2": {"mesh": make_mesh((4, 2))},
        "sharded sums": {"reduce_every": "micro_batch"},
        "no mesh": {"mesh": None, "data_axes": None},
    }
    options = others.get(devices)
    if options is None:
        options = {"mesh": Mesh(jax.devices()[:devices], "data")}
    return make_step("two programs", loss_fn, **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [(8, 3), helpers.slow("no mesh", 8), helpers.slow("sharded sums", "4 x 2")],
)
def test_open_window_goes_on_with_other_devices(before: Any, after: Any):
    window = ragged(rows=24)
    params = {"w": 0.0, "unused": np.zeros((4, 8)), "empty": np.zeros((0, 4))}
    params = jax.tree.map(jnp.float32, params)

    def loss(params: Any, x: Any) -> Any:
        return loss_fn(params["w"], x)

    steps = [step_on(devices, loss) for devices in (before, after)]
    state, _ = steps[0](steps[0].init(params), window[0])
    like = steps[1].init(params)
    saved = jax.device_get(state)  # as in a checkpoint

    def in_jit(saved: Any, like: Any) -> Any:
        return jax.jit(lambda saved: regroup_sums(saved, like))(saved)

    for regroup, held in (
        (regroup_sums, serialization.to_state_dict(saved)),  # without a target
        (in_jit, saved),
        (regroup_sums, state),
    ):
        state = regroup(held, like)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state, like)
        assert regroup is in_jit or all(jax.tree.leaves(same))
        assert state.opt_state.mini_step == 1
        for micro_batch in window[1:]:
            state, metrics = steps[1](state, micro_batch)
        assert metrics.updated and metrics.num_tokens == (window != 0).sum()
        np.testing.assert_allclose(state.params["w"], -mean_of(window), rtol=1e-6)


def test_a_state_gets_the_dtypes_of_the_step_that_resumes():
    """Otherwise sums in bfloat16 go on in a step that adds up in float32."""
    step = step_on(8)
    like, expected = step.init(jnp.zeros(())), step.init(jnp.zeros(()))
    expected, _ = step(expected, ragged()[0])
    saved = jax.device_get(expected)
    held = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, saved
    )
    for given in (held, jax.tree.map(jnp.asarray, held), saved):  # saved: bit for bit
        state = regroup_sums(given, like)
        types = [[*map(jax.typeof, jax.tree.leaves(x))] for x in (state, expected)]
        assert types[0] == types[1]  # weak types, too
        chex.assert_trees_all_equal(state, expected)  # whole numbers, exact in bfloat16
