"""Token budgets over devices, and windows that go on with other devices."""

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

from optax_tokenaccum import make_train_step, reshard_state

SGD = optax.sgd(1.0)


def loss_fn(w: Any, x: Any) -> Any:
    """A loss in which tokens are the nonzero numbers; 0/0 in a row without them."""
    n = jnp.sum(x != 0, axis=-1)
    means = jnp.sum(w * x, axis=-1) / n
    return jnp.sum(jnp.where(n > 0, means * n, 0)), jnp.sum(n)


def ragged() -> np.ndarray:
    """Return 3 micro-batches `[24, 4]` of numbers, 0 in the places of padding."""
    rng = np.random.default_rng(0)
    window = rng.integers(1, 9, (3, 24, 4)).astype(np.float32)
    return np.where(np.arange(4) < rng.integers(1, 5, (3, 24, 1)), window, 0)


def test_token_budget_counts_all_devices():
    step = make_train_step(loss_fn, SGD, every_n_tokens=40, **meshes.over("8"))
    state, closed = step.init(jnp.zeros(())), []
    for row in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]):  # 8, 24, 56 tokens
        state, metrics = step(state, np.tile(np.float32(row), (8, 1)))
        closed.append((bool(metrics.updated), float(metrics.num_tokens)))
    assert closed == [(False, 8), (False, 24), (True, 56)]
    state, _ = step(state, np.tile(np.float32([3, 0, 0, 0]), (8, 1)))
    state, metrics = step.close_window(state)
    assert metrics.updated and metrics.num_tokens == 8
    assert state.params == -1 - 3


def step_on(devices: int | str) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return loss_fn(params["w"], x)

    if devices == "4 x 2":
        options = {"mesh": meshes.make_mesh((4, 2)), "data_axes": "data"}
    elif isinstance(devices, int):
        options = {"mesh": Mesh(jax.devices()[:devices], "data"), "data_axes": "data"}
    else:
        options = meshes.over(devices)
    return make_train_step(loss, SGD, 3, **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [(8, 3), helpers.slow("1", 8), helpers.slow("8, each", "4 x 2")],
)
def test_open_window_goes_on_with_other_devices(before: Any, after: Any):
    window = ragged()
    params = {"w": 0.0, "unused": np.zeros((4, 8)), "empty": np.zeros((0, 4))}
    params = jax.tree.map(jnp.float32, params)
    first, then = step_on(before), step_on(after)
    state, _ = first(first.init(params), window[0])
    like = then.init(params)
    saved = jax.device_get(state)  # as in a checkpoint

    def in_jit(saved: Any, like: Any) -> Any:
        return jax.jit(lambda saved: reshard_state(saved, like))(saved)

    for regroup, held in (
        (reshard_state, serialization.to_state_dict(saved)),  # without a target
        (in_jit, saved),
        (reshard_state, state),
    ):
        state = regroup(held, like)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state, like)
        assert regroup is in_jit or all(jax.tree.leaves(same))
        assert state.opt_state.mini_step == 1
        state, metrics = helpers.run_step(then, state, window[1:])
        assert metrics.updated and metrics.num_tokens == (window != 0).sum()
        mean = window.sum() / (window != 0).sum()
        np.testing.assert_allclose(state.params["w"], -mean, rtol=1e-6)


def test_a_state_gets_the_dtypes_of_the_step_that_resumes():
    """Otherwise sums in bfloat16 go on in a step that adds up in float32."""
    step, params = step_on(8), {"w": jnp.zeros(())}
    like, expected = step.init(params), step.init(params)
    expected, _ = step(expected, ragged()[0])
    saved = jax.device_get(expected)
    held = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, saved
    )
    for given in (held, jax.tree.map(jnp.asarray, held), saved):  # saved: bit for bit
        state = reshard_state(given, like)
        types = [[*map(jax.typeof, jax.tree.leaves(x))] for x in (state, expected)]
        assert types[0] == types[1]  # weak types, too
        chex.assert_trees_all_equal(state, expected)  # whole numbers, exact in bfloat16
