"""Optimizers in optax's wrappers, as in `docs/recipes/`, and loops to run them.

Every window has 32 rows in micro-batches of 4. The reference is the same optimizer run
in float64 on the gradients of the full batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum import token_accumulation

K = 8
RTOL = helpers.RTOL["float32"]
PARAMS = helpers.init_params(0)
BATCHES = [helpers.ragged_batch(seed) for seed in range(4)]
MICRO_BATCHES = [micro for batch in BATCHES for micro in helpers.cut(batch, K)]

RATE = 4.0
SGD = optax.sgd(RATE)
MOMENTUM = optax.sgd(RATE, momentum=0.9)
CLIP = optax.clip_by_global_norm(0.25)
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
FROZEN = {"embed": True, "hidden": False, "out": False}
TRAINED = {name: not frozen for name, frozen in FROZEN.items()}
LABELS = {"embed": "slow", "hidden": "fast", "out": "fast"}

mean_loss = helpers.in_float64(helpers.loss_mean_fn)


def exactly(inner: Any, k: int = K) -> Any:
    return token_accumulation(inner, k)


def naively(inner: Any, k: int = K) -> Any:
    multi_steps = optax.MultiSteps(inner, k)
    return optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update)


def average_parameters(decay: float) -> optax.GradientTransformation:
    """The recipe of `docs/recipes/parameter_average.md`."""

    def update(updates: Any, average: Any, params: Any) -> Any:
        new_params = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(new_params, average, 1 - decay)

    return optax.GradientTransformation(lambda params: params, update)


def debiased_average(decay: float) -> optax.GradientTransformation:
    """The average of `optax.ema`, of new parameters instead of updates."""
    ema = optax.ema(decay)

    def update(updates: Any, state: Any, params: Any) -> Any:
        average, ema_state = ema.update(optax.apply_updates(params, updates), state[1])
        return updates, (average, ema_state)

    return optax.GradientTransformation(lambda p: (p, ema.init(p)), update)


def lookahead_of_pairs(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
    """The recipe of `docs/recipes/lookahead.md` that trains pairs."""
    optimizer = optax.lookahead(*args, **kwargs)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads.fast, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def lookahead_in_state(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
    """The recipe of `docs/recipes/lookahead.md` with slow weights in its state."""
    optimizer = optax.lookahead(*args, **kwargs)

    def init(params: Any) -> Any:
        return params, optimizer.init(optax.LookaheadParams.init_synced(params))

    def update(grads: Any, state: Any, params: Any) -> Any:
        slow, state = state
        pair = optax.LookaheadParams(fast=params, slow=slow)
        updates, state = optimizer.update(grads, state, pair)
        return updates.fast, (optax.apply_updates(slow, updates.slow), state)

    return optax.GradientTransformation(init, update)


class Recipe(NamedTuple):
    """An inner optimizer and how its loop differs from the plain one.

    Attributes:
      inner: the optimizer that runs once per window.
      read: selects what to compare, from parameters and the inner optimizer's state.
      start: makes the trained tree from the model's parameters.
      of: returns the model's parameters from the trained tree.
    """

    inner: Any
    read: Callable[[Any, Any], Any] = lambda params, inner_state: params
    start: Callable[[Any], Any] = lambda params: params
    of: Callable[[Any], Any] = lambda params: params


RECIPES = {
    "chain": Recipe(
        optax.chain(CLIP, optax.add_decayed_weights(0.01), MOMENTUM),
    ),
    "partition": Recipe(
        optax.partition({"slow": optax.adam(0.1, eps=0.1), "fast": MOMENTUM}, LABELS)
    ),
    "masked": Recipe(
        optax.chain(optax.masked(optax.add_decayed_weights(0.05), TRAINED), SGD)
    ),
    "inject_hyperparams": Recipe(
        optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(RATE, 0.5, 3))
    ),
    "apply_if_finite": Recipe(optax.apply_if_finite(MOMENTUM, 3)),
    "schedule_free": Recipe(
        optax.contrib.schedule_free(SGD, RATE),
        lambda params, state: optax.contrib.schedule_free_eval_params(state, params),
    ),
    "reduce_on_plateau": Recipe(
        optax.chain(SGD, PLATEAU),
        lambda params, state: (params, state[1].best_value, state[1].scale),
    ),
    "lookahead_of_pairs": Recipe(
        lookahead_of_pairs(MOMENTUM, sync_period=3, slow_step_size=0.5),
        start=optax.LookaheadParams.init_synced,
        of=lambda pair: pair.fast,
    ),
    "lookahead_in_state": Recipe(
        lookahead_in_state(MOMENTUM, sync_period=3, slow_step_size=0.5),
        lambda params, state: (params, state[0]),
    ),
    "parameter_average": Recipe(
        optax.chain(MOMENTUM, average_parameters(0.5)), lambda _, state: state[1]
    ),
    "debiased_average": Recipe(
        optax.chain(MOMENTUM, debiased_average(0.5)), lambda _, state: state[1][0]
    ),
}
PLAIN = Recipe(SGD)


def on_full_batches(recipe: Recipe) -> Any:
    """Return `recipe.read` after all full batches, in float64."""
    inner = optax.with_extra_args_support(recipe.inner)
    with jax.enable_x64(True):
        params = recipe.start(jax.tree.map(lambda p: jnp.asarray(p, float), PARAMS))
        state, update = inner.init(params), jax.jit(inner.update)
        for batch in BATCHES:
            value, _ = mean_loss(recipe.of(params), batch)
            gradient = helpers.float64_gradient(recipe.of(params), batch)
            _, pull_back = jax.vjp(recipe.of, params)
            updates, state = update(*pull_back(gradient), state, params, value=value)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(np.asarray, recipe.read(params, state))


def run(
    optimizer: Any,
    *,
    naive: bool = False,
    recipe: Recipe = PLAIN,
    micro_batches: list[Any] = MICRO_BATCHES,
    loss_sum_fn: Any = helpers.loss_sum_fn,
) -> tuple[Any, Any]:
    """Return parameters and state after a hand-written loop over micro-batches."""

    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_sum_fn(recipe.of(params), batch)
        return loss_sum / n if naive else loss_sum, n

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, n), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        extra = {} if naive else {"num_tokens": n}
        updates, state = optimizer.update(grads, state, params, value=value, **extra)
        return optax.apply_updates(params, updates), state

    params = recipe.start(PARAMS)
    state = optimizer.init(params)
    for batch in micro_batches:
        params, state = step(params, state, batch)
    return params, state
