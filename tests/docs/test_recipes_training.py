"""Recipes of `docs/recipes` on clipping, schedules and loss scaling, on ragged text."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

from optax_tokenaccum import make_train_step, token_accumulation

pytestmark = pytest.mark.slow

PARAMS = helpers.init_params(0)
K = 8
WINDOWS = [helpers.ragged_batch(seed) for seed in range(3)]
RTOL = helpers.RTOL["float32"]
RATE = 25.0  # Large, so that updates are not lost to rounding in the parameters.


def train(optimizer: Any, windows: list[Any], gradients: str = "sum") -> Any:
    """Return the parameters after `windows`, by a loop around an optimizer."""
    is_mean = gradients == "mean"
    loss_fn = helpers.loss_mean_fn if is_mean else helpers.loss_sum_fn
    counted = not isinstance(optimizer, optax.MultiSteps)
    micro_step = helpers.micro_step(optimizer, loss_fn, counted)
    params, state = PARAMS, optimizer.init(PARAMS)
    for window in windows:
        for batch in helpers.cut(window, K):
            params, state = micro_step(params, state, batch)
    return params


def train_by_step(inner: Any, windows: list[Any], **schedule: Any) -> Any:
    """Train with `make_train_step`; also return the metrics of every micro-batch."""
    step = make_train_step(helpers.loss_sum_fn, inner, **schedule)
    state, seen = step.init(PARAMS), []
    for window in windows:
        for batch in helpers.cut(window, K):
            state, metrics = step(state, batch)
            seen.append(metrics)
    return state.params, seen


def full_batch(inner: Any, windows: list[Any]) -> Any:
    """Run the inner optimizer on gradients of whole windows, all in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), PARAMS)
        state = inner.init(params)
        for window in windows:
            grads = helpers.float64_gradient(params, window)
            updates, state = inner.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(np.asarray, params)


# Each leaves some gradients unclipped: where all are clipped, scale does not matter.
CLIPS = {
    "global norm": optax.clip_by_global_norm(0.08),
    "element": optax.clip(1e-3),
    "adaptive": optax.adaptive_grad_clip(0.005),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_inside_is_the_full_batchs_and_outside_is_not(name: str):
    clip, sgd = CLIPS[name], optax.sgd(RATE)
    inner = optax.chain(clip, sgd)
    expected = full_batch(inner, WINDOWS)
    assert helpers.relative_error(full_batch(sgd, WINDOWS), expected) > 0.1
    for got in (
        train(token_accumulation(inner, K), WINDOWS),
        train(token_accumulation(inner, K, gradients="mean"), WINDOWS, "mean"),
        train_by_step(inner, WINDOWS, every_k_schedule=K)[0],
    ):
        assert helpers.relative_error(got, expected) < RTOL
    for gradients in ("sum", "mean"):
        accumulated = token_accumulation(sgd, K, gradients=gradients)
        outside = train(optax.chain(clip, accumulated), WINDOWS, gradients)
        assert helpers.relative_error(outside, expected) > 0.1
    naive = train(optax.MultiSteps(inner, K), WINDOWS, "mean")
    assert helpers.relative_error(naive, expected) > 0.01


def warmup_cosine(num_updates: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=RATE,
        warmup_steps=num_updates // 3,
        decay_steps=num_updates,
        end_value=RATE / 10,
    )


def test_schedules_count_updates():
    windows = WINDOWS * 2
    schedule = warmup_cosine(len(windows))
    inner = optax.sgd(schedule)
    expected = full_batch(inner, windows)
    by_step, metrics = train_by_step(inner, windows, every_k_schedule=K)
    for got in (by_step, train(token_accumulation(inner, K), windows)):
        assert helpers.relative_error(got, expected) < RTOL
    # As the page logs it.
    rates = [float(schedule(m.gradient_step - 1)) for m in metrics if m.updated]
    assert rates == [float(schedule(i)) for i in range(len(windows))]

    count_of_micro_batches = optax.sgd(warmup_cosine(K * len(windows)))
    late, _ = train_by_step(count_of_micro_batches, windows, every_k_schedule=K)
    assert helpers.relative_error(late, expected) > 0.1
    outside = optax.chain(
        token_accumulation(optax.sgd(1.0), K), optax.scale_by_schedule(schedule)
    )
    assert helpers.relative_error(train(outside, windows), expected) > 0.1
    naive = train(optax.MultiSteps(inner, K), windows, "mean")
    assert helpers.relative_error(naive, expected) > 0.01


def test_schedules_of_windows_of_tokens():
    """Small windows first; window size and rate follow the number of updates."""

    def every_n_tokens(gradient_step: Any) -> Any:
        return jnp.where(gradient_step < 3, 300, 700)

    batches = [batch for window in WINDOWS for batch in helpers.cut(window, K)]
    cut: list[list[Any]] = [[]]
    for batch in batches:
        cut[-1].append(batch)
        tokens = sum(int(b["mask"].sum()) for b in cut[-1])
        if tokens >= every_n_tokens(len(cut) - 1):
            cut.append([])
    del cut[-1]
    windows = [jax.tree.map(lambda *x: np.concatenate(x), *window) for window in cut]
    total = sum(int(batch["mask"].sum()) for batch in batches)
    assert 3 < len(windows) <= total // 300

    inner = optax.sgd(warmup_cosine(len(windows)))
    got, metrics = train_by_step(inner, WINDOWS, every_n_tokens=every_n_tokens)
    assert metrics[-1].gradient_step == len(windows)
    assert helpers.relative_error(got, full_batch(inner, windows)) < RTOL
    of_means, _ = train_by_step(inner, WINDOWS, every_k_schedule=K)
    assert helpers.relative_error(of_means, full_batch(inner, windows)) > 0.01


# float16: float32 parameters, whose gradients are computed in half precision.

Scaling = Any


def in_float16(loss_fn: Any) -> Any:
    def wrapped(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
        loss, n = loss_fn(half, batch)
        return loss.astype(jnp.float16), n

    return wrapped


def by_hand(scaling: Scaling, loss_fn: Any, params: Any, batch: Any) -> Any:
    """The rule on the page, with faster growth."""
    scale, num_accepted = scaling

    def scaled_loss_fn(params: Any) -> Any:
        loss, n = loss_fn(params, batch)
        return loss.astype(jnp.float32) * scale, n

    grads, n = jax.grad(scaled_loss_fn, has_aux=True)(params)
    grads = jax.tree.map(lambda g: g / scale, grads)
    is_finite = jnp.isfinite(optax.tree.norm(grads))
    num_accepted = jnp.where(is_finite, num_accepted + 1, 0)
    factor = jnp.where(is_finite, jnp.where(num_accepted % 2, 1.0, 2.0), 0.5)
    return (scale * factor, num_accepted), grads, n


def by_flax(scaling: Scaling, loss_fn: Any, params: Any, batch: Any) -> Any:
    value_and_grad = scaling.value_and_grad(loss_fn, has_aux=True)
    scaling, _, (_, n), grads = value_and_grad(params, batch)
    return scaling, grads, n


def start_by_hand(scale: float) -> Scaling:
    return jnp.float32(scale), jnp.int32(0)


def start_of_flax(scale: float) -> Scaling:
    return DynamicScale(scale=jnp.float32(scale), growth_interval=2)


SCALINGS = {"by hand": (by_hand, start_by_hand), "by flax": (by_flax, start_of_flax)}

MEAN_FN, SUM_FN = map(in_float16, (helpers.loss_mean_fn, helpers.loss_sum_fn))


def accept_window(optimizer: Any, kind: str, scale: float, undo: bool = True) -> Any:
    """Run one window, repeating each micro-batch until it is accepted.

    Returns:
      The applied update, the scale of each micro-batch, and the number of rejections.
    """
    gradients_of, start = SCALINGS[kind]
    takes_count = not isinstance(optimizer, optax.MultiSteps)

    @jax.jit
    def micro_step(params: Any, state: Any, scaling: Scaling, batch: Any) -> Any:
        scale = scaling[0] if kind == "by hand" else scaling.scale
        scaling, grads, n = gradients_of(scaling, MEAN_FN, params, batch)
        if not undo:
            grads = jax.tree.map(lambda g: g * scale, grads)
        count = {"num_tokens": n} if takes_count else {}
        updates, state = optimizer.update(grads, state, params, **count)
        return optax.apply_updates(params, updates), state, scaling, scale

    params, state, scaling = PARAMS, optimizer.init(PARAMS), start(scale)
    scales, rejected = [], 0
    for batch in helpers.cut(WINDOWS[0], K):
        is_rejected = True
        while is_rejected:
            chex.assert_trees_all_equal(params, PARAMS)
            params, state, scaling, scale = micro_step(params, state, scaling, batch)
            is_rejected = bool(state.skip_state["should_skip"])
            rejected += is_rejected
        scales.append(float(scale))
    assert state.gradient_step == 1
    return helpers.difference(PARAMS, params), scales, rejected


@pytest.mark.parametrize("kind", SCALINGS)
def test_float16_with_a_scale_that_moves_within_the_window(kind: str):
    skips = {"should_skip_update_fn": optax.skip_not_finite}
    optimizer = token_accumulation(optax.sgd(1.0), K, gradients="mean", **skips)
    expected = helpers.float64_gradient(PARAMS, WINDOWS[0])
    rtol = helpers.RTOL["float16"]
    got, _, rejected = accept_window(optimizer, kind, 2.0**18)
    assert rejected > 2
    assert helpers.relative_error(got, expected) < rtol
    got, scales, _ = accept_window(optimizer, kind, 2.0**8)
    assert scales[-1] >= 4 * scales[0]
    assert helpers.relative_error(got, expected) < rtol
    scaled, *_ = accept_window(optimizer, kind, 2.0**8, undo=False)
    for scale in {*scales}:
        undone_late = jax.tree.map(lambda x, scale=scale: x / scale, scaled)
        assert helpers.relative_error(undone_late, expected) > 0.01
    theirs = optax.MultiSteps(optax.sgd(1.0), K, **skips)
    naive, *_ = accept_window(theirs, kind, 2.0**8)
    assert helpers.relative_error(naive, expected) > 0.01


def test_float16_holds_the_gradient_of_a_mean_where_that_of_a_sum_overflows():
    def is_finite(loss_fn: Any, batch: Any) -> bool:
        _, grads, _ = jax.jit(by_hand, static_argnums=1)(
            (np.float32(2**15), np.int32(0)), loss_fn, PARAMS, batch
        )
        return bool(jnp.isfinite(optax.tree.norm(grads)))

    batches = helpers.cut(WINDOWS[0], K)
    assert all(is_finite(MEAN_FN, batch) for batch in batches)
    overflowing = [not is_finite(SUM_FN, batch) for batch in batches]
    assert sum(overflowing) > K / 2
