"""Integers, bools and random keys: their gradients are float0, without numbers."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import SKIPS, run_step

from optax_tokenaccum import (
    close_window,
    make_train_step,
    make_window_step,
    token_accumulation,
)

MIXED = {"w": jnp.zeros(3), "index": jnp.arange(3, dtype=jnp.int32), "flag": True}


def mixed_loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss = jnp.sum(jnp.where(params["flag"], params["w"][params["index"]] * x, 0))
    return loss, jnp.float32(2)


@pytest.mark.parametrize(
    "options",
    [{"every_k_schedule": lambda _: 2} | SKIPS, None],
    ids=["one program, skip function", "window"],
)
def test_integer_parameters_are_left_alone_even_by_weight_decay(options: Any):
    inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    batches = jnp.array([[1.0] * 3, [3.0] * 3])
    if options is None:
        step = make_window_step(mixed_loss, inner)
        state, metrics = step(step.init(MIXED), batches)
    else:
        step = make_train_step(mixed_loss, inner, **options)
        state, metrics = run_step(step, step.init(MIXED), batches)
    chex.assert_trees_all_equal(state.params, MIXED | {"w": jnp.full(3, -1.0)})
    assert not metrics.skipped
    decayed = optax.apply_updates(MIXED["index"], -0.5 * MIXED["index"])
    assert (decayed != MIXED["index"]).any()


def test_frozen_parameters_of_4_bits_are_left_alone():
    params = {"codes": jnp.arange(-3, 3).astype(jnp.int4), "scale": jnp.float32(1.0)}

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.sum(params["scale"] * params["codes"].astype(jnp.float32) * x), 2.0

    labels = {"codes": "frozen", "scale": "trained"}
    inner = optax.partition(
        {"frozen": optax.set_to_zero(), "trained": optax.sgd(1.0)}, labels
    )
    step = make_train_step(loss_fn, inner, 2)
    state, _ = run_step(step, step.init(params), jnp.array([[1.0] * 6, [3.0] * 6]))
    chex.assert_trees_all_equal(state.params, params | {"scale": jnp.float32(4.0)})


def test_float0_reaches_inner_as_it_would_without_accumulation():
    def see(updates: Any, state: Any, params: Any = None) -> Any:
        for leaf in jax.tree.leaves(updates):
            assert leaf.dtype in (jax.dtypes.float0, jnp.int32, jnp.bool_)
        return updates, state

    freeze = optax.GradientTransformation(lambda _: (), see)
    labels = {name: "train" if name == "w" else "freeze" for name in MIXED}
    inner = optax.partition({"train": optax.sgd(1.0), "freeze": freeze}, labels)
    optimizer = token_accumulation(inner, 2, **SKIPS)

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        gradient, n = jax.grad(mixed_loss, has_aux=True, allow_int=True)(MIXED, x)
        updates, state = optimizer.update(gradient, state, MIXED, num_tokens=n)
        for x in (gradient["index"], updates["index"]):
            assert (x.dtype, x.shape) == (jax.dtypes.float0, (3,))
        return updates["w"], state

    state = optimizer.init(MIXED)
    for scale, expected in ((1.0, 0.0), (3.0, -1.0)):
        updates, state = update(state, jnp.full(3, scale))
        chex.assert_trees_all_equal(updates, jnp.full(3, expected))
    _, state = update(state, jnp.ones(3))
    updates, _ = close_window(optimizer, state, MIXED)
    chex.assert_trees_all_equal(updates["w"], jnp.full(3, -0.5))
