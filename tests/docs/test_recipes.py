"""What `docs/recipes` says and does not run, on ragged text, against float64."""

from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import close_window, token_accumulation

pytestmark = pytest.mark.slow

K, RATE = 8, 4.0
RTOL = helpers.RTOL["float32"]
PARAMS = helpers.init_params(0)
BATCHES = [helpers.ragged_batch(seed) for seed in range(4)]
MICRO_BATCHES = [micro for batch in BATCHES for micro in helpers.cut(batch, K)]
SGD, MOMENTUM = optax.sgd(RATE), optax.sgd(RATE, momentum=0.9)


def exactly(inner: Any, k: int = K) -> Any:
    return token_accumulation(inner, k)


def naively(inner: Any) -> Any:
    theirs = optax.MultiSteps(inner, K)
    return optax.GradientTransformationExtraArgs(theirs.init, theirs.update)


def run(optimizer: Any, batches: Any = MICRO_BATCHES, naive: bool = False) -> Any:
    """Return parameters and state after a hand-written loop over micro-batches."""
    loss_fn = helpers.loss_mean_fn if naive else helpers.loss_sum_fn

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, n), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        extra = {} if naive else {"num_tokens": n}
        updates, state = optimizer.update(grads, state, params, value=value, **extra)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def on_full_batches(inner: Any) -> Any:
    """Return the parameters of a run of the inner optimizer in float64."""
    inner, loss_fn = optax.with_extra_args_support(inner), helpers.loss_mean_fn
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, float), PARAMS)
        state, update = inner.init(params), jax.jit(inner.update)
        for batch in BATCHES:
            value, _ = helpers.in_float64(loss_fn)(params, batch)
            gradient = helpers.float64_gradient(params, batch)
            updates, state = update(gradient, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(np.asarray, params)


DECAY = optax.add_decayed_weights(-0.05)
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
FREEZE = optax.freeze({"embed": True, "hidden": False, "out": False})
LABELS = {"embed": "slow", "hidden": "fast", "out": "fast"}
SCHEDULE = optax.linear_schedule(RATE, 0.5, 3)


def injected(tx: Any, rate: Any) -> Any:
    return optax.inject_hyperparams(lambda rate: tx(optax.sgd(rate)))(rate)


# An optimizer around an accumulation `tx`, or around nothing (on full batches), and
# whether both agree.
AROUND: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "scale before": (lambda tx: optax.chain(optax.scale(0.5), tx(MOMENTUM)), True),
    "freeze before": (lambda tx: optax.chain(FREEZE, tx(MOMENTUM)), True),
    "clip behind": (
        lambda tx: optax.chain(tx(MOMENTUM), optax.clip_by_global_norm(0.25)),
        True,
    ),
    "decay behind": (lambda tx: optax.chain(tx(SGD), DECAY), False),
    "plateau behind": (lambda tx: optax.chain(tx(SGD), PLATEAU), False),
    "inject_hyperparams": (lambda tx: injected(tx, RATE), True),
    "inject a schedule": (lambda tx: injected(tx, SCHEDULE), False),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx(MOMENTUM), 3), True),
    "schedule_free": (lambda tx: optax.contrib.schedule_free(tx(SGD), RATE), False),
}


@pytest.mark.parametrize(("around", "same"), AROUND.values(), ids=AROUND)
def test_around_an_accumulation(around: Any, same: bool):
    expected = on_full_batches(around(lambda inner: inner))
    error = helpers.relative_error(run(around(exactly))[0], expected)
    assert error < RTOL if same else error > 0.01, error
    params, _ = run(around(naively), naive=True)
    assert helpers.relative_error(params, expected) > 0.01


@pytest.mark.parametrize(("n", "closed"), [(3, {"slow", "fast"}), (4, {"slow"})])
def test_close_window_closes_what_is_open_in_a_partition(n: int, closed: set[str]):
    groups = {"slow": exactly(SGD, 8), "fast": exactly(SGD, 4)}
    optimizer = optax.partition(groups, LABELS)
    batch = {name: leaf[: 4 * n] for name, leaf in BATCHES[0].items()}
    params, state = run(optimizer, helpers.cut(batch, n))
    updates, _ = close_window(optimizer, state, params)
    gradient = helpers.float64_gradient(PARAMS, batch)
    for name, update in updates.items():
        if LABELS[name] in closed:
            assert helpers.relative_error(update, -RATE * gradient[name]) < RTOL
        else:
            assert not np.any(update)
