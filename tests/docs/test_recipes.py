"""What `docs/recipes` says and does not run, on ragged text, against float64.

The pages' own code shows that each recipe equals full-batch training.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import equinox as eqx
import grain
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale

from optax_tokenaccum import (
    MultiSteps,
    StepState,
    check_loss_fn,
    close_window,
    has_updated,
    make_train_step,
    softmax_cross_entropy_sum,
    token_accumulation,
)

pytestmark = pytest.mark.slow

K = 8
RTOL = helpers.RTOL["float32"]
PARAMS = helpers.init_params(0)
BATCHES = [helpers.ragged_batch(seed) for seed in range(4)]
MICRO_BATCHES = [micro for batch in BATCHES for micro in helpers.cut(batch, K)]
RATE = 4.0
SGD, MOMENTUM = optax.sgd(RATE), optax.sgd(RATE, momentum=0.9)
# Keeps the gradient that it receives, see tests/core/test_exactness.py.
TRACE = optax.sgd(1.0, momentum=0.0)
SKIPS: Any = {"should_skip_update_fn": optax.skip_not_finite}


def exactly(inner: Any, k: int = K) -> Any:
    return token_accumulation(inner, k)


def naively(inner: Any, k: int = K) -> Any:
    theirs = optax.MultiSteps(inner, k)
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


def on_full_batches(inner: Any) -> tuple[Any, Any]:
    """Return parameters and state of the inner optimizer, run in float64."""
    inner, loss_fn = optax.with_extra_args_support(inner), helpers.loss_mean_fn
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, float), PARAMS)
        state, update = inner.init(params), jax.jit(inner.update)
        for batch in BATCHES:
            value, _ = helpers.in_float64(loss_fn)(params, batch)
            gradient = helpers.float64_gradient(params, batch)
            updates, state = update(gradient, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(np.asarray, (params, state))


def trace_of(state: Any) -> Any:
    return optax.tree.get(state.opt_state, "trace")


CLIP = optax.clip_by_global_norm(0.25)
DECAY = optax.add_decayed_weights(-0.05)
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
FROZEN = {"embed": True, "hidden": False, "out": False}
TRAINED = {name: not frozen for name, frozen in FROZEN.items()}
FREEZE = optax.freeze(FROZEN)
LABELS = {"embed": "slow", "hidden": "fast", "out": "fast"}
SCHEDULE = optax.linear_schedule(RATE, 0.5, 3)


def injected(tx: Any, rate: Any) -> Any:
    return optax.inject_hyperparams(lambda rate: tx(optax.sgd(rate)))(rate)


# An optimizer around an accumulation `tx`, or around nothing (on full batches), and
# whether both agree.
AROUND: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "scale before": (lambda tx: optax.chain(optax.scale(0.5), tx(MOMENTUM)), True),
    "freeze before": (lambda tx: optax.chain(FREEZE, tx(MOMENTUM)), True),
    "clip before": (lambda tx: optax.chain(CLIP, tx(SGD)), False),
    "clip behind": (lambda tx: optax.chain(tx(MOMENTUM), CLIP), True),
    "decay behind": (lambda tx: optax.chain(tx(SGD), DECAY), False),
    "plateau behind": (lambda tx: optax.chain(tx(SGD), PLATEAU), False),
    "masked and freeze": (
        lambda tx: optax.chain(optax.masked(tx(MOMENTUM), TRAINED), FREEZE),
        True,
    ),
    "partition": (
        lambda tx: optax.partition({"slow": tx(MOMENTUM), "fast": tx(SGD)}, LABELS),
        True,
    ),
    "inject_hyperparams": (lambda tx: injected(tx, RATE), True),
    "inject a schedule": (lambda tx: injected(tx, SCHEDULE), False),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx(MOMENTUM), 3), True),
    "schedule_free": (lambda tx: optax.contrib.schedule_free(tx(SGD), RATE), False),
}


@pytest.mark.parametrize(("around", "same"), AROUND.values(), ids=AROUND)
def test_around_an_accumulation(around: Any, same: bool):
    expected, _ = on_full_batches(around(lambda inner: inner))
    error = helpers.relative_error(run(around(exactly))[0], expected)
    assert error < RTOL if same else error > 0.01, error
    params, _ = run(around(naively), naive=True)
    assert helpers.relative_error(params, expected) > 0.01


@pytest.mark.parametrize("make", [exactly, naively])
def test_windows_of_each_group_of_a_partition(make: Any):
    """Two groups close every 4 micro-batches; the third, every 8, sees them move."""
    groups = {"slow": make(SGD, K), "fast": make(SGD, K // 2)}
    params, state = run(optax.partition(groups, LABELS), naive=make is naively)
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


def test_lookahead_around_takes_no_count():
    optimizer = optax.lookahead(exactly(SGD), 2, slow_step_size=0.5)
    pair = optax.LookaheadParams.init_synced(PARAMS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_tokens'"):
        optimizer.update(PARAMS, optimizer.init(pair), pair, num_tokens=1)


def loss_fn_of_marked(params: Any, batch: Any) -> Any:
    loss_sum, n = helpers.loss_sum_fn(params, batch)
    return loss_sum * jnp.where(batch["bad"], jnp.nan, 1.0), n


def test_apply_if_finite_inside_gives_up_after_windows():
    step = make_train_step(loss_fn_of_marked, optax.apply_if_finite(SGD, 2), 2)
    state = step.init(PARAMS)
    window = [m | {"bad": i == 0} for i, m in enumerate(MICRO_BATCHES[:2])]
    for done in range(3):
        chex.assert_trees_all_equal(state.params, PARAMS)
        state, metrics = helpers.run_step(step, state, window)
        assert metrics.updated and metrics.gradient_step == done + 1
    assert np.isnan(state.params["out"]).all()


def test_apply_if_finite_around_is_not_heard_by_the_accumulation():
    optimizer = optax.apply_if_finite(exactly(SGD, 1), 3)
    gradient = jax.tree.map(jnp.ones_like, PARAMS)
    nans = jax.tree.map(lambda g: g * jnp.nan, gradient)
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(gradient, state, PARAMS, num_tokens=1)
    updates, state = optimizer.update(nans, state, PARAMS, num_tokens=1)
    assert not any(map(np.any, updates.values()))
    assert has_updated(state)
    _, state = optimizer.update(nans, state, PARAMS, num_tokens=0)
    assert state.total_notfinite == 2


class EquinoxModel(eqx.Module):
    params: dict[str, jax.Array]
    order: jax.Array  # integers: an array that is not a parameter
    seen: eqx.nn.StateIndex
    activation: Callable[[Any], jax.Array]

    def __init__(self):
        self.params, self.order = PARAMS, jnp.arange(helpers.VOCABULARY)
        self.seen, self.activation = eqx.nn.StateIndex(jnp.float32(0)), jnp.tanh

    def __call__(self, batch: Any, state: Any) -> Any:
        state = state.set(self.seen, state.get(self.seen) + jnp.sum(batch["mask"]))
        x = self.params["embed"][self.order[batch["tokens"]]]
        return self.activation(x @ self.params["hidden"]) @ self.params["out"], state


def test_a_model_of_equinox_hands_its_state_on_as_aux():
    model, model_state = eqx.nn.make_with_state(EquinoxModel)()
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any, *, static: Any, model_state: Any) -> Any:
        logits, model_state = eqx.combine(params, static)(batch, model_state)
        loss = softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])
        return loss[0], (loss[1], model_state)

    step, seen = make_train_step(loss_fn, TRACE, K, has_aux=True), 0
    state = step.init(params)
    for batch in MICRO_BATCHES[:K]:
        state, metrics = step(state, batch, static=static, model_state=model_state)
        model_state, seen = metrics.aux, seen + batch["mask"].sum()
        assert float(model_state.get(model.seen)) == seen
    expected = helpers.float64_gradient(PARAMS, BATCHES[0])
    assert helpers.relative_error(trace_of(state), expected) < RTOL
    with helpers.count_compilations() as compiled:
        step(state, batch, static=static, model_state=model_state)
    assert compiled == []


@pytest.mark.parametrize("scale", [2.0**18, 2.0**8], ids=["shrinks", "grows"])
def test_float16_with_a_scale_of_flax_that_moves_within_the_window(scale: float):
    def half(params: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(jnp.float16), params)
        loss, n = helpers.loss_mean_fn(params, batch)
        return loss.astype(jnp.float16), n

    optimizer = token_accumulation(TRACE, K, gradients="mean", **SKIPS)

    @jax.jit
    def micro_step(state: Any, scaling: Any, batch: Any) -> Any:
        value_and_grad = scaling.value_and_grad(half, has_aux=True)
        scaling, _, (_, n), grads = value_and_grad(PARAMS, batch)
        _, state = optimizer.update(grads, state, PARAMS, num_tokens=n)
        return state, scaling

    state, calls = optimizer.init(PARAMS), 0
    scaling = DynamicScale(scale=jnp.float32(scale), growth_interval=2)
    while state.gradient_step < 1:
        state, scaling = micro_step(state, scaling, MICRO_BATCHES[int(state.mini_step)])
        calls += 1
    assert (calls > K + 2) if scale > 2.0**10 else (scaling.scale >= 4 * scale)
    expected = helpers.float64_gradient(PARAMS, BATCHES[0])
    error = helpers.relative_error(optax.tree.get(state, "trace"), expected)
    assert error < helpers.RTOL["float16"]


def log_probs(params: Any, sequences: Any) -> jax.Array:
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        helpers.logits_of(params, sequences["tokens"]), sequences["labels"]
    )
    return -jnp.sum(jnp.where(sequences["mask"], losses, 0), axis=-1)


def gain(params: Any, batch: Any) -> jax.Array:
    return log_probs(params, batch["chosen"]) - log_probs(params, batch["rejected"])


def kto(params: Any, batch: Any, of_the_window: bool = True) -> Any:
    """Compares each pair with the average gain of the window, or of the cut."""
    margin = gain(params, batch)
    baseline = batch["baseline"] if of_the_window else jnp.mean(margin)
    losses = batch["weight"] * jax.nn.sigmoid(0.1 * (baseline - margin))
    return jnp.sum(losses), jnp.sum(batch["weight"])


def test_a_mean_over_pairs_is_exact_only_where_it_is_made_for_the_window():
    batch: Any = {"chosen": BATCHES[0], "rejected": BATCHES[1]}
    margin = np.asarray(gain(PARAMS, batch))
    batch["baseline"] = np.full_like(margin, margin.mean())
    batch["weight"] = np.random.default_rng(2).uniform(size=len(margin))
    mean_gradient = jax.grad(lambda p, batch: jnp.divide(*kto(p, batch)))
    expected = helpers.in_float64(mean_gradient)(PARAMS, batch)
    for loss_fn, is_exact in (
        (kto, True),
        (functools.partial(kto, of_the_window=False), False),
    ):
        step = make_train_step(loss_fn, TRACE, K)
        state, _ = helpers.run_step(step, step.init(PARAMS), helpers.cut(batch, K))
        error = helpers.relative_error(trace_of(state), expected)
        assert error < RTOL if is_exact else error > 0.02
        assert check_loss_fn(loss_fn, PARAMS, [batch]).passed == is_exact


# Checkpoints: two windows of the same rows, which end with the same trace.


def by_train_step() -> Any:
    # Only the device knows where windows end.
    schedule = lambda _: K  # noqa: E731
    step = make_train_step(helpers.loss_sum_fn, MOMENTUM, schedule, donate=False)
    return step.init, lambda state, batch: step(state, batch)[0]


def by_loop(optimizer: Any, loss_fn: Any) -> Any:
    step = helpers.micro_step(optimizer, loss_fn)
    init = lambda params: StepState(params, optimizer.init(params))  # noqa: E731
    return init, lambda state, batch: StepState(*step(*state, batch))


TOKENS = int(BATCHES[0]["mask"].sum())
WAYS: dict[str, Any] = {
    "make_train_step": by_train_step,
    "token_accumulation": lambda: by_loop(
        token_accumulation(MOMENTUM, every_n_tokens=TOKENS, **SKIPS),
        helpers.loss_sum_fn,
    ),
    "MultiSteps": lambda: by_loop(MultiSteps(MOMENTUM, K), helpers.loss_mean_fn),
}


@pytest.mark.parametrize("name", WAYS)
def test_orbax_and_grain_resume_after_every_micro_batch(name: str, tmp_path: Path):
    init, step = WAYS[name]()
    rows = helpers.cut(BATCHES[0], helpers.ROWS)
    data = grain.MapDataset.source(rows).map(lambda row: jax.tree.map(np.ravel, row))
    batches = data.repeat(2).batch(helpers.ROWS // K).to_iter_dataset()
    dataset = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=3
    )
    iterator, states = iter(dataset), [init(PARAMS)]
    with ocp.CheckpointManager(tmp_path) as manager:
        for done in range(2 * K + 1):
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(states[-1]),
                data=grain.checkpoint.CheckpointSave(iterator),
            )
            manager.save(done, args=args)
            if done < 2 * K:
                states.append(step(states[-1], next(iterator)))
    assert states[-1].opt_state.gradient_step == 2
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, init(PARAMS))
    for done, saved in enumerate(states):
        with ocp.CheckpointManager(tmp_path) as manager:
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                data=grain.checkpoint.CheckpointRestore(iter(dataset)),
            )
            restored = manager.restore(done, args=args)
        chex.assert_trees_all_equal(restored.state, saved)
        end = functools.reduce(step, restored.data, restored.state)
        chex.assert_trees_all_equal(end, states[-1])
        lost = init(saved.params)  # the open window
        inner = saved.opt_state.inner_opt_state
        lost = lost._replace(opt_state=lost.opt_state._replace(inner_opt_state=inner))
        rest = itertools.islice(dataset, done, None)
        naive = trace_of(functools.reduce(step, rest, lost))
        error = helpers.relative_error(naive, trace_of(states[-1]))
        assert (error > 0.01) == (done % K > 0)
