"""One key for the whole run: the train step and the window step draw the same masks."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_train_step, make_window_step

ROWS, K = 16, 3
PARAMS = {"w": jnp.asarray([0.5, -1.0], jnp.float32)}
ADAM = optax.adam(0.1)


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    mask = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    losses = jnp.sum(params["w"] * jnp.where(mask, batch["x"], 0), -1)
    return jnp.sum(losses * batch["mask"]), (jnp.sum(batch["mask"]), mask)


def windows() -> list[list[Any]]:
    """Return windows; one has no tokens, and in another a micro-batch is NaN."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(4, K, ROWS, 2)))
    mask = rng.uniform(size=(4, K, ROWS)) < 0.7
    mask[0, 0] = mask[2] = False
    x[1, 1] = np.nan
    return [[{"x": x[i, j], "mask": mask[i, j]} for j in range(K)] for i in range(4)]


def steps_of(kind: str, options: Any) -> Any:
    """A train step, whose windows are closed by hand, and a window step."""
    options = {"has_aux": True} | options
    if kind == "core":
        makes = make_train_step, make_window_step
        return tuple(make(loss_fn, ADAM, **options) for make in makes)
    return tuple(
        nnx_ways.make_step(way, loss_fn, ADAM, None, **options)
        for way in ("nnx two programs", "nnx window")
    )


@pytest.mark.parametrize(
    ("kind", "over", "new_key"),
    [
        ("core", "8", jax.random.PRNGKey),
        helpers.slow("nnx", "8, each", jax.random.key),
    ],
)
def test_both_steps_draw_the_same_masks_and_no_two_windows_do(
    kind: str, over: str, new_key: Any
):
    key = new_key(7)
    train, whole = steps_of(kind, meshes.over(over) | helpers.SKIPS)
    train_state, window_state = train.init(PARAMS), whole.init(PARAMS)
    placement = [x.sharding for x in jax.tree.leaves(window_state)]
    masks, updates = [], 0
    for i, window in enumerate(windows()):
        drawn = []
        for batch in window:
            train_state, metrics = train.accumulate(train_state, batch, rng=key)
            drawn.append(metrics.aux)
        train_state, metrics = train.close_window(train_state)
        window_state, window_metrics = whole(
            window_state, helpers.stack(window), rng=key
        )
        masks.append(np.stack(jax.device_get(drawn)))
        np.testing.assert_array_equal(masks[-1], window_metrics.aux)
        updates += i != 2  # no tokens, no update
        assert window_metrics.gradient_step == metrics.gradient_step == updates
        assert window_metrics.mini_step == 0
        assert window_metrics.updated == metrics.updated == (i != 2)
    assert [x.sharding for x in jax.tree.leaves(window_state)] == placement
    # A window without an update leaves its keys to the next one, and a rejected
    # micro-batch too. An empty micro-batch has a key of its own. A key for one window
    # alone would repeat every mask.
    np.testing.assert_array_equal(masks[3], masks[2])
    np.testing.assert_array_equal(masks[1][1], masks[1][2])
    different = {mask.tobytes() for window in masks[:3] for mask in window}
    assert len(different) == 3 * K - 1
    chex.assert_trees_all_close(train_state.params, window_state.params, rtol=1e-5)


def test_a_state_of_a_window_step_holds_numbers_and_no_sums():
    step = make_window_step(loss_fn, ADAM, has_aux=True)
    shapes, state = jax.eval_shape(step.init, PARAMS), step.init(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    inner = ADAM.init(PARAMS)
    chex.assert_trees_all_equal(state.opt_state.inner_opt_state, inner)
    assert jax.tree.leaves(state.opt_state.grad_sums) == []
    rest = state.opt_state._replace(inner_opt_state=())
    assert [x.shape for x in jax.tree.leaves(rest)] == [()] * 5
