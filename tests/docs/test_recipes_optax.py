"""The recipes of `docs/recipes/` for optax's wrappers, inside and around ours."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from wrapped_optimizers import (
    BATCHES,
    CLIP,
    FROZEN,
    LABELS,
    MICRO_BATCHES,
    MOMENTUM,
    PARAMS,
    PLATEAU,
    RATE,
    RECIPES,
    RTOL,
    SGD,
    TRAINED,
    K,
    Recipe,
    exactly,
    naively,
    on_full_batches,
    run,
)

from optax_tokenaccum import (
    close_window,
    has_updated,
    make_train_step,
    token_accumulation,
)

pytestmark = pytest.mark.slow


def by_transformation(recipe: Recipe) -> Any:
    params, state = run(exactly(recipe.inner), recipe=recipe)
    return recipe.read(params, state.inner_opt_state)


def by_train_step(recipe: Recipe) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        return helpers.loss_sum_fn(recipe.of(params), batch)

    step = make_train_step(loss_fn, recipe.inner, K)
    state = step.init(recipe.start(PARAMS))
    for batch in MICRO_BATCHES:
        state, metrics = step(state, batch)
    assert int(metrics.gradient_step) == len(BATCHES)
    return recipe.read(state.params, state.opt_state.inner_opt_state)


def by_optax(recipe: Recipe) -> Any:
    params, state = run(naively(recipe.inner), naive=True, recipe=recipe)
    return recipe.read(params, state.inner_opt_state)


@functools.cache
def expected_of(name: str) -> Any:
    return on_full_batches(RECIPES[name])


@pytest.mark.parametrize("way", [by_transformation, by_train_step, by_optax])
@pytest.mark.parametrize("name", RECIPES)
def test_windows_are_full_batches_and_those_of_optax_are_not(name: str, way: Any):
    error = helpers.relative_error(way(RECIPES[name]), expected_of(name))
    if way is by_optax:
        assert error > 0.01, error
    else:
        assert error < RTOL, error


# An optimizer around an accumulation, its counterpart on full batches, and whether
# both agree.
AROUND: dict[str, tuple[Callable[[Any], Any], Any, bool]] = {
    "scale before": (
        lambda tx: optax.chain(optax.scale(0.5), tx(MOMENTUM)),
        optax.chain(optax.scale(0.5), MOMENTUM),
        True,
    ),
    "freeze before": (
        lambda tx: optax.chain(optax.freeze(FROZEN), tx(MOMENTUM)),
        optax.chain(optax.freeze(FROZEN), MOMENTUM),
        True,
    ),
    "clip before": (
        lambda tx: optax.chain(CLIP, tx(SGD)),
        optax.chain(CLIP, SGD),
        False,
    ),
    "scale behind": (
        lambda tx: optax.chain(tx(optax.trace(0.9)), optax.scale(-RATE)),
        MOMENTUM,
        True,
    ),
    "clip behind": (
        lambda tx: optax.chain(tx(MOMENTUM), CLIP),
        optax.chain(MOMENTUM, CLIP),
        True,
    ),
    "momentum behind": (
        lambda tx: optax.chain(tx(optax.identity()), MOMENTUM),
        MOMENTUM,
        False,
    ),
    "decay behind": (
        lambda tx: optax.chain(tx(SGD), optax.add_decayed_weights(-0.05)),
        optax.chain(SGD, optax.add_decayed_weights(-0.05)),
        False,
    ),
    "plateau behind": (
        lambda tx: optax.chain(tx(SGD), PLATEAU),
        optax.chain(SGD, PLATEAU),
        False,
    ),
    "selective_transform": (
        lambda tx: optax.selective_transform(tx(MOMENTUM), freeze_mask=FROZEN),
        optax.selective_transform(MOMENTUM, freeze_mask=FROZEN),
        True,
    ),
    "masked and freeze": (
        lambda tx: optax.chain(
            optax.masked(tx(MOMENTUM), TRAINED), optax.freeze(FROZEN)
        ),
        optax.selective_transform(MOMENTUM, freeze_mask=FROZEN),
        True,
    ),
    "masked alone": (
        lambda tx: optax.masked(tx(MOMENTUM), TRAINED),
        optax.selective_transform(MOMENTUM, freeze_mask=FROZEN),
        False,
    ),
    "partition": (
        lambda tx: optax.partition({"slow": tx(MOMENTUM), "fast": tx(SGD)}, LABELS),
        optax.partition({"slow": MOMENTUM, "fast": SGD}, LABELS),
        True,
    ),
    "inject_hyperparams": (
        lambda tx: optax.inject_hyperparams(lambda rate: tx(optax.sgd(rate)))(RATE),
        SGD,
        True,
    ),
    "inject_hyperparams of a schedule": (
        lambda tx: optax.inject_hyperparams(lambda rate: tx(optax.sgd(rate)))(
            optax.linear_schedule(RATE, 0.5, 3)
        ),
        RECIPES["inject_hyperparams"].inner,
        False,
    ),
    "apply_if_finite": (
        lambda tx: optax.apply_if_finite(tx(MOMENTUM), 3),
        MOMENTUM,
        True,
    ),
    "schedule_free": (
        lambda tx: optax.contrib.schedule_free(tx(SGD), RATE),
        RECIPES["schedule_free"].inner,
        False,
    ),
}


@pytest.mark.parametrize(("around", "full", "same"), AROUND.values(), ids=AROUND)
def test_around_an_accumulation(around: Any, full: Any, same: bool):
    expected = on_full_batches(Recipe(full))
    params, _ = run(around(exactly))
    error = helpers.relative_error(params, expected)
    assert error < RTOL if same else error > 0.01, error
    params, _ = run(around(naively), naive=True)
    assert helpers.relative_error(params, expected) > 0.01


@pytest.mark.parametrize("make", [exactly, naively])
def test_windows_of_each_group_of_a_partition(make: Any):
    """Two groups close every 4 micro-batches; the third, every 8, sees them move."""
    optimizer = optax.partition(
        {"slow": make(SGD, K), "fast": make(SGD, K // 2)}, LABELS
    )
    params, state = run(optimizer, naive=make is naively)

    expected = jax.tree.map(np.float64, PARAMS)
    for batch in BATCHES:
        total, tokens = 0.0, 0
        for half in helpers.cut(batch, 2):
            gradient, n = helpers.float64_gradient(expected, half), half["mask"].sum()
            total, tokens = total + n * gradient["embed"], tokens + n
            for name in ("hidden", "out"):
                expected[name] = expected[name] - RATE * gradient[name]
        expected["embed"] = expected["embed"] - RATE * total / tokens

    error = helpers.relative_error(params, expected)
    if make is naively:
        assert error > 0.01, error
        return
    assert error < RTOL, error
    with pytest.raises(ValueError, match="exactly one .* got 2 in a PartitionState"):
        has_updated(state)
    assert all(map(has_updated, state.inner_states.values()))


@pytest.mark.parametrize(("n", "closed"), [(3, {"slow", "fast"}), (4, {"slow"})])
def test_close_window_closes_what_is_open_in_a_partition(n: int, closed: set[str]):
    optimizer = optax.partition(
        {"slow": exactly(SGD, 8), "fast": exactly(SGD, 4)}, LABELS
    )
    batch = {name: leaf[: 4 * n] for name, leaf in BATCHES[0].items()}
    params, state = run(optimizer, micro_batches=helpers.cut(batch, n))
    before = {name: int(s.inner_state.gradient_step) for name, s in state[0].items()}
    updates, state = close_window(optimizer, state, params)
    after = {name: int(s.inner_state.gradient_step) for name, s in state[0].items()}
    assert {name for name in after if after[name] > before[name]} == closed
    gradient = helpers.float64_gradient(PARAMS, batch)
    for name, update in updates.items():
        if LABELS[name] in closed:
            assert helpers.relative_error(update, -RATE * gradient[name]) < RTOL
        else:
            assert not np.any(update)


@pytest.mark.parametrize("around", ["selective_transform", "masked and freeze"])
def test_frozen_parameters_hold_no_sums(around: str):
    make, _, _ = AROUND[around]
    params, state = run(make(exactly), micro_batches=MICRO_BATCHES[:K])
    chex.assert_trees_all_equal(params["embed"], PARAMS["embed"])
    sums = optax.tree.get(state, "acc_grads")
    assert jax.tree.map(jnp.shape, sums) == {
        "embed": optax.MaskedNode(),
        "hidden": PARAMS["hidden"].shape,
        "out": PARAMS["out"].shape,
    }
    assert has_updated(state)
    inside = exactly(optax.selective_transform(MOMENTUM, freeze_mask=FROZEN))
    assert inside.init(PARAMS).acc_grads["embed"].shape == PARAMS["embed"].shape


@pytest.mark.parametrize("i", [0, 3, K - 1])
def test_learning_rate_changed_in_an_open_window(i: int):
    """The update uses the rate at the close, whatever the rate was before."""
    step = make_train_step(
        helpers.loss_sum_fn, optax.inject_hyperparams(optax.sgd)(RATE), K
    )
    state = step.init(PARAMS)
    for j, batch in enumerate(MICRO_BATCHES[:K]):
        if j == i:
            hyperparams = state.opt_state.inner_opt_state.hyperparams
            hyperparams["learning_rate"] = jnp.float32(1.5)
        state, _ = step(state, batch)
    gradient = helpers.float64_gradient(PARAMS, BATCHES[0])
    expected = jax.tree.map(lambda p, g: p - 1.5 * g, PARAMS, gradient)
    assert helpers.relative_error(state.params, expected) < RTOL
    other = jax.tree.map(lambda p, g: p - RATE * g, PARAMS, gradient)
    assert helpers.relative_error(state.params, other) > 0.01


@pytest.mark.parametrize(
    ("rate", "compilations"), [(jnp.float32(1.5), 0), (jnp.asarray(1.5), 1), (1.5, 1)]
)
def test_weakly_typed_learning_rate_compiles_once_more(rate: Any, compilations: int):
    inner = optax.inject_hyperparams(optax.sgd)(RATE)
    step = make_train_step(helpers.loss_sum_fn, inner, 2)
    state, batch = step.init(PARAMS), MICRO_BATCHES[0]
    with helpers.count_compilations() as before:
        for _ in range(4):
            state, _ = step(state, batch)
    assert len(before) == 2
    state.opt_state.inner_opt_state.hyperparams["learning_rate"] = rate
    with helpers.count_compilations() as after:
        for _ in range(4):
            state, _ = step(state, batch)
    assert len(after) == compilations
    got = state.opt_state.inner_opt_state.hyperparams["learning_rate"]
    assert float(got) == 1.5


def test_injected_k_has_to_be_static():
    def update(**kwargs: Any) -> Any:
        make = optax.inject_hyperparams(token_accumulation, **kwargs)
        optimizer = make(SGD, every_k_schedule=K)
        return run(optimizer, micro_batches=MICRO_BATCHES[:K])

    with pytest.raises(TypeError, match="every_k_schedule must be an integer"):
        update()
    params, _ = update(static_args="every_k_schedule")
    expected, _ = run(exactly(SGD), micro_batches=MICRO_BATCHES[:K])
    chex.assert_trees_all_equal(params, expected)


def test_schedule_free_around_moves_in_an_open_window():
    optimizer = optax.contrib.schedule_free(exactly(SGD, 2), RATE)
    params, state = run(optimizer, micro_batches=MICRO_BATCHES[:3])
    assert not has_updated(state)
    closed, _ = run(optimizer, micro_batches=MICRO_BATCHES[:2])
    assert helpers.relative_error(params, closed) > 1e-3


@pytest.mark.parametrize(
    ("around", "message"),
    [
        (lambda tx: tx, "unexpected keyword argument 'num_tokens'"),
        (optax.chain, "got None.*a wrapper that is a plain"),
    ],
    ids=["alone", "chain"],
)
def test_lookahead_around_takes_no_count(around: Any, message: str):
    optimizer = around(optax.lookahead(exactly(SGD), 2, slow_step_size=0.5))
    pair = optax.LookaheadParams.init_synced(PARAMS)
    with pytest.raises(TypeError, match=message):
        optimizer.update(PARAMS, optimizer.init(pair), pair, num_tokens=1)


def test_sums_of_a_lookahead():
    """With pairs there are twice as many sums, and half of them are zeros."""
    _, state = run(
        exactly(RECIPES["lookahead_of_pairs"].inner),
        recipe=RECIPES["lookahead_of_pairs"],
        micro_batches=MICRO_BATCHES[:1],
    )
    assert not any(map(np.any, state.acc_grads.slow.values()))
    assert all(map(np.any, state.acc_grads.fast.values()))
    in_state = exactly(RECIPES["lookahead_in_state"].inner).init(PARAMS)
    assert jax.tree.structure(in_state.acc_grads) == jax.tree.structure(PARAMS)


def test_both_forms_of_lookahead_are_the_same():
    pair, (fast, slow) = map(expected_of, ("lookahead_of_pairs", "lookahead_in_state"))
    chex.assert_trees_all_equal(pair, optax.LookaheadParams(fast=fast, slow=slow))
    assert helpers.relative_error(fast, slow) > 0.01


def test_average_by_the_flag_on_the_device():
    """An average that is updated on every micro-batch differs."""

    @jax.jit
    def average_where(updated: Any, params: Any, average: Any) -> Any:
        new = optax.incremental_update(params, average, 0.5)
        return jax.tree.map(lambda x, y: jnp.where(updated, x, y), new, average)

    step = make_train_step(helpers.loss_sum_fn, MOMENTUM, K)
    state, average, naive = step.init(PARAMS), PARAMS, PARAMS
    for batch in MICRO_BATCHES:
        state, metrics = step(state, batch)
        average = average_where(metrics.updated, state.params, average)
        naive = average_where(True, state.params, naive)
    expected = expected_of("parameter_average")
    assert helpers.relative_error(average, expected) < RTOL
    assert helpers.relative_error(naive, expected) > 0.01
