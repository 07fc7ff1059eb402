"""The loop of https://github.com/google-deepmind/optax/issues/1567.

Its author applied `updates` only in every k-th call, in a second jitted function, and
discarded what `optax.MultiSteps` returned in the other calls, which is zeros. This is
right as long as the loop and `mini_step` count in step.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_train_step

K, WINDOWS = 4, 40
WEIGHTS = np.array([1.5, -2.0, 0.5], np.float32)


def predict(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


def data() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(K * WINDOWS, 8, 3)).astype(np.float32)
    y = x @ WEIGHTS + 0.7 + 0.5 * rng.normal(size=x.shape[:-1]).astype(np.float32)
    return list(zip(x, y, strict=True))


def new_params() -> Any:
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def final_loss(params: Any) -> float:
    x, y = map(np.concatenate, zip(*data(), strict=True))
    return float(jnp.mean((predict(params, x) - y) ** 2))


def their_loop(offset: int, discard: bool = True) -> Any:
    """Calls `offset`, `offset + k`, ... apply the updates; the others discard them."""
    optimizer = optax.MultiSteps(optax.adamw(0.1), K)

    def mse(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((predict(params, x) - y) ** 2)

    @jax.jit
    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(mse)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def train_step_accum(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(mse)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state

    params = new_params()
    opt_state = optimizer.init(params)
    for i, (x, y) in enumerate(data()):
        applies = not discard or i % K == offset
        step = train_step if applies else train_step_accum
        params, opt_state = step(params, opt_state, x, y)
    return params


def our_loop() -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.sum((predict(params, x) - y) ** 2), y.size

    step = make_train_step(loss_fn, optax.adamw(0.1), K)
    state = step.init(new_params())
    for batch in data():
        state, _ = step(state, batch)
    return state.params


def test_discarding_is_harmless_while_loop_and_mini_step_are_aligned():
    aligned, applied = their_loop(K - 1), their_loop(0, discard=False)
    chex.assert_trees_all_equal(aligned, applied)
    assert final_loss(aligned) < 0.1 * final_loss(new_params())


@pytest.mark.parametrize("offset", range(K - 1))
def test_discarding_is_fatal_once_they_are_not(offset: int):
    """The one real update of every window is discarded, so the model never trains."""
    chex.assert_trees_all_equal(their_loop(offset), new_params())


def test_train_step_has_nothing_to_discard():
    ours, applied = our_loop(), their_loop(0, discard=False)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), ours, applied
    )
    assert final_loss(ours) < 0.1 * final_loss(new_params())
