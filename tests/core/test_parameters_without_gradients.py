"""Integers, bools and random keys: their gradients are float0, without numbers."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import optax
import pytest
from helpers import SKIPS, run_step

from optax_tokenaccum import close_window, token_accumulation

MIXED = {
    "w": jnp.zeros(3),
    "index": jnp.arange(3, dtype=jnp.int32),
    "flag": True,
    "codes": jnp.array([1, 1, 1]).astype(jnp.int4),
}
DECAY = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))


def mixed_loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x * params["codes"].astype(jnp.float32)
    loss = jnp.sum(jnp.where(params["flag"], params["w"][params["index"]] * x, 0))
    return loss, jnp.float32(2)


def freezing(names: set[str], frozen: Any, trained: Any) -> Any:
    labels = {name: "frozen" if name in names else "trained" for name in MIXED}
    return optax.partition({"frozen": frozen, "trained": trained}, labels)


@pytest.mark.parametrize(("way", "options"), [("one program", SKIPS), ("window", {})])
def test_integer_parameters_are_left_alone_even_by_weight_decay(way: str, options: Any):
    inner = freezing({"codes"}, optax.set_to_zero(), DECAY)  # JAX promotes no int4
    batches = jnp.array([[1.0] * 3, [3.0] * 3])
    on_one = {"mesh": None, "data_axes": None}
    step = meshes.make_step(way, inner, loss_fn=mixed_loss, k=2, **on_one, **options)
    calls = [batches] if way == "window" else batches
    state, metrics = run_step(step, step.init(MIXED), calls)
    chex.assert_trees_all_equal(state.params, MIXED | {"w": jnp.full(3, -1.0)})
    assert not metrics.skipped
    decayed = optax.apply_updates(MIXED["index"], -0.5 * MIXED["index"])
    assert (decayed != MIXED["index"]).any()


def test_float0_reaches_inner_as_it_would_without_accumulation():
    def see(updates: Any, state: Any, params: Any = None) -> Any:
        for x in jax.tree.leaves(updates):
            assert x.dtype in (jax.dtypes.float0, jnp.int32, jnp.bool_, jnp.int4)
        return updates, state

    seeing = optax.GradientTransformation(lambda _: (), see)
    inner = freezing({*MIXED} - {"w"}, seeing, optax.sgd(1.0))
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
