"""Flax's 8-bit floats: scales are overwritten once per window, as by a full batch."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp

from optax_tokenaccum import accumulate_over_window, window_value_and_grad

K, ROWS = 2, 8
# Stateless, because each window is compared from where the last one ended. The loss is
# linear, because rounding to 8 bits would amplify float32 rounding differences.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)
)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, dot_general_cls=lambda: Fp8DirectDotGeneralOp(4))(x)


MODEL = Model()
PARAMS = MODEL.init(jax.random.key(0), jnp.ones((1, 16)))


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    losses = MODEL.apply(params, batch["x"]) * batch["y"]
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def make_window(seed: int) -> list[Any]:
    """Return micro-batches of unequal counts; the first has the largest inputs.

    They are in its last row, whose device has no tokens.
    """
    rng = np.random.default_rng(seed)
    window = [
        {
            "x": np.float32(rng.normal(size=(ROWS, 16)) * (K - i)),
            "y": np.float32(rng.normal(size=(ROWS, 4))),
            "mask": np.float32(rng.uniform(size=(ROWS, 4)) < (i + 1) / K / 2),
        }
        for i in range(K)
    ]
    window[0]["mask"][-1] = 0
    window[0]["x"][-1] *= 4
    return window


WINDOWS = [make_window(seed) for seed in range(3)]
gradient_of = jax.jit(jax.grad(loss_fn, has_aux=True))


def scales(params: Any) -> Any:
    return params[OVERWRITE_WITH_GRADIENT]


@jax.jit
def full_batch(params: Any, window: list[Any]) -> Any:
    """A step of flax's own `TrainState` on the whole batch."""
    batch = jax.tree.map(lambda *xs: jnp.concatenate(xs), *window)
    gradient, n = gradient_of(params, batch)
    mean = {"params": jax.tree.map(lambda g: g / n, gradient["params"])}
    trained = {"params": params["params"]}
    updates, _ = OPTIMIZER.update(mean, OPTIMIZER.init(trained), trained)
    moved = optax.apply_updates(trained, updates)
    return moved | {OVERWRITE_WITH_GRADIENT: scales(gradient)}


ONE: dict[str, Any] = {"mesh": None, "data_axes": None}


def make_step(way: str, k: int = K, over: str = "1", **options: Any) -> Any:
    options |= meshes.OVER[over]
    return meshes.make_step(way, OPTIMIZER, loss_fn=loss_fn, k=k, **(ONE | options))


def after(step: Any, window: list[Any], params: Any = PARAMS) -> Any:
    """Return the parameters after one window."""
    is_whole = not hasattr(step, "accumulate")
    batches = [helpers.stack(window)] if is_whole else window
    state, _ = helpers.run_step(step, step.init(params), batches)
    return jax.device_get(state.params)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("two programs", {}),
        ("one program", helpers.SKIPS),
        ("two programs", {"over": "8"}),
        helpers.slow("window", {}),
        helpers.slow("two programs", {"over": "8, each"}),
        helpers.slow("window", {"over": "8"}),
        helpers.slow("two programs", {"over": "8, explicit"}),
        helpers.slow("window", {"over": "8, each"}),
    ],
)
def test_windows_are_the_full_batches(way: str, options: Any):
    step, params = make_step(way, **options), PARAMS
    for window in WINDOWS:
        parts = [gradient_of(params, batch)[0] for batch in window]
        expected = full_batch(params, window)
        for naive in parts[-1], jax.tree.map(lambda *xs: sum(xs), *parts):
            assert helpers.relative_error(scales(naive), scales(expected)) > 0.1
        params = after(step, window, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(params, expected)
        chex.assert_trees_all_close(
            params, expected, rtol=helpers.RTOL["float32"], atol=1e-7
        )


@pytest.mark.parametrize("over", [helpers.slow("1"), "8"])
def test_what_adds_nothing_leaves_no_trace_in_the_scales(over: str):
    """A rejected micro-batch, and one without tokens, both with NaN activations.

    A skip function is not shown the scales, and sums that are narrow leave them as
    wide as they are.
    """

    def skips(updates: Any, gradient_step: Any, params: Any) -> Any:
        skip, state = optax.skip_not_finite(updates, gradient_step, params)
        return skip | (optax.tree.norm(scales(updates)) > 0), state

    window = WINDOWS[0]
    rejected = window[0] | {"x": np.full_like(window[0]["x"], np.nan)}
    empty = rejected | {"mask": np.zeros_like(rejected["mask"])}
    clean = scales(after(make_step("two programs", over=over), window))
    chex.assert_tree_all_finite(clean)
    skipping = make_step("one program", should_skip_update_fn=skips, over=over)
    got = after(skipping, [rejected, *window])
    chex.assert_trees_all_equal(scales(got), clean)
    options: Any = {"accumulator_dtype": jnp.bfloat16, "over": over}
    got = after(make_step("two programs", K + 1, **options), [empty, *window])
    chex.assert_trees_all_equal(scales(got), clean)
    nothing = after(make_step("two programs", 1, **options), [empty])
    chex.assert_trees_all_equal(nothing, PARAMS)


def test_the_functions_of_a_window_return_the_next_scales():
    """Those of the full batch; without tokens, the old ones."""
    value_and_grad = jax.jit(window_value_and_grad(loss_fn))
    window = WINDOWS[0]
    _, grads = value_and_grad(PARAMS, helpers.stack(window))
    expected = full_batch(PARAMS, window)
    chex.assert_trees_all_close(scales(grads), scales(expected), rtol=1e-6)
    empty = [batch | {"mask": 0 * batch["mask"]} for batch in window]
    _, grads = value_and_grad(PARAMS, helpers.stack(empty))
    chex.assert_trees_all_equal(scales(grads), scales(PARAMS))
    assert not np.any(grads["params"]["Dense_0"]["kernel"])
    summed = jax.jit(accumulate_over_window(jax.value_and_grad(loss_fn, has_aux=True)))
    _, grads = summed(PARAMS, helpers.stack(window))
    chex.assert_trees_all_close(scales(grads), scales(expected), rtol=1e-6)
    _, grads = summed(PARAMS, helpers.stack(empty))
    assert all(np.all(x == 0) for x in jax.tree.leaves(scales(grads)))
