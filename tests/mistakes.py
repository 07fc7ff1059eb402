"""Ways to make mistakes, for tests/docs/test_bad_input.py.

A mistake is a function that makes it. Its argument `keep` records a state that must
survive the mistake, and returns that state.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from optax_tokenaccum import (
    MultiSteps,
    from_multi_steps_state,
    make_train_step,
    make_window_step,
    token_accumulation,
)

Mistake = Callable[[Callable[[Any], Any]], Any]
# The mistake as named on the page, the type of the error, and ways to make it.
Row = tuple[str, type[Exception] | None, list[Mistake]]

PARAMS = {"w": jnp.zeros(3), "deep": {"b": jnp.zeros(())}}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
BATCH, WINDOW = jnp.ones(4), {"n": jnp.ones((4, 1)), "x": jnp.ones((4, 1))}
SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)
N: dict[str, Any] = {"num_tokens": 1}
SKIPS = {"should_skip_update_fn": optax.skip_not_finite}
OPTIMIZERS = [token_accumulation(SGD, 2), MultiSteps(SGD, 2)]


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * jnp.sum(batch), batch.size


def window_loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * jnp.sum(batch["x"]), jnp.sum(batch["n"])


train_step = functools.partial(make_train_step, loss_fn)
window_step = functools.partial(make_window_step, window_loss_fn)

OURS = token_accumulation(SGD, 1)
STATE = OURS.init(PARAMS)


def eager(f: Any) -> Any:
    return f


def constructed(
    *args: Any, by: Any = (token_accumulation, MultiSteps, train_step), **kwargs: Any
) -> list[Mistake]:
    """Return calls of every constructor with these arguments."""
    return [lambda _, f=f: f(*args, **kwargs) for f in by]


def updated(
    *optimizers: Any,
    grads: Any = GRADS,
    state: Any = None,
    modes: Any = (eager, jax.jit),
    **arguments: Any,
) -> list[Mistake]:
    """Return calls of every optimizer's `update`, with its own state or `state`."""

    def mistake(keep: Any, optimizer: Any, jit: Any) -> Any:
        given = optimizer.init(PARAMS) if state is None else state
        return jit(optimizer.update)(grads, keep(given), PARAMS, **arguments)

    return [
        functools.partial(mistake, optimizer=optimizer, jit=jit)
        for optimizer in optimizers or OPTIMIZERS
        for jit in modes
    ]


def copied(state: Any) -> Any:
    """Copy all arrays, so that a mistake cannot delete arrays of another."""
    return jax.tree.map(jnp.copy, state)


def stepped(
    state: Any, *steps: Any, batch: Any = BATCH, halves: bool = True
) -> list[Mistake]:
    """Return calls of every step, and of its halves, with copies of `state`."""
    calls = list(steps)
    for step in steps:
        if halves and hasattr(step, "accumulate"):
            calls += [step.accumulate, lambda s, _, step=step: step.close_window(s)]
    return [lambda keep, call=call: call(keep(copied(state)), batch) for call in calls]


def returned(value: Callable[[Any], Any], has_aux: bool = False) -> list[Mistake]:
    """Return calls of every step whose `loss_fn` returns `value(sum of w)`."""

    def loss(params: Any, batch: Any) -> Any:
        return value(jnp.sum(params["w"]))

    steps = [make_train_step(loss, SGD, k, has_aux=has_aux) for k in (2, lambda _: 2)]
    steps.append(make_window_step(loss, SGD, has_aux=has_aux))
    return [lambda keep, s=s: s(keep(s.init(PARAMS)), BATCH) for s in steps]


def with_full_disk(loss_fn: Any) -> Any:
    """The loss with a callback that raises while the program runs."""

    def write() -> None:
        raise OSError("disk full")

    def failing(*args: Any) -> Any:
        jax.debug.callback(write)
        return loss_fn(*args)

    return failing


def failed_while_it_ran(make: Any, batch: Any) -> list[Mistake]:
    """Return a call with a state that a call has taken along."""

    def mistake(_: Any) -> None:
        step = make(with_full_disk(window_loss_fn), SGD)
        state = step.init(PARAMS)
        with pytest.raises(Exception, match="disk full"):
            step(state, batch)
        step(state, batch)

    return [mistake]


def reused(use: Callable[[Any, Any, Any], Any], k: int = 2) -> list[Mistake]:
    """Return uses of a state that a step has consumed; its loss is intended."""

    def mistake(_: Any, step: Any, batch: Any) -> None:
        state = step.init(PARAMS)
        step(state, batch)
        use(step, state, batch)

    steps = train_step(SGD, k), train_step(SGD, lambda _: k)
    calls = [(step, BATCH) for step in steps] + [(window_step(SGD), WINDOW)]
    return [functools.partial(mistake, step=step, batch=batch) for step, batch in calls]


def taken_over(state: Any, *optimizers: Any) -> list[Mistake]:
    return [
        lambda keep, tx=tx: from_multi_steps_state(tx, keep(state), PARAMS)
        for tx in optimizers or OPTIMIZERS
    ]


def state_of_multi_steps(inner: Any = SGD, calls: int = 0) -> Any:
    optimizer = optax.MultiSteps(inner, 2)
    state = optimizer.init(PARAMS)
    for _ in range(calls):
        _, state = optimizer.update(GRADS, state, PARAMS)
    return state


def in_a_plain_transformation(optimizer: Any) -> Any:
    return optax.chain(optax.GradientTransformation(optimizer.init, optimizer.update))


def in_a_wrapper_of_optax(optimizer: Any) -> list[Any]:
    return [
        optax.chain(optimizer),
        optax.partition({"all": optimizer}, jax.tree.map(lambda _: "all", PARAMS)),
        optax.masked(optimizer, jax.tree.map(lambda _: True, PARAMS)),
    ]


def applied_by_linen(keep: Any, tx: Any) -> None:
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    keep(state).apply_gradients(grads=GRADS, num_tokens=3)


def wrapped_by_optax(keep: Any) -> None:
    optimizer = optax.MultiSteps(token_accumulation(SGD, 2), 2)
    update, state, moved = jax.jit(optimizer.update), optimizer.init(PARAMS), []
    for _ in range(8):
        updates, state = update(GRADS, state, PARAMS, num_tokens=1)
        moved.append(bool(updates["deep"]["b"] != 0))
    assert moved == [False, False, False, True] * 2


def counted_badly_in_jit(keep: Any, count: float) -> None:
    optimizer = token_accumulation(SGD, 2)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    _, state = update(GRADS, state, PARAMS, num_tokens=count)
    assert (int(state.mini_step), float(state.acc_tokens)) == (1, 0.0)
    updates, state = update(GRADS, state, PARAMS, num_tokens=2.0)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda g: -g / 2, GRADS))


def returned_a_mean(keep: Any) -> None:
    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return loss_sum / n, n

    right, wrong = (make_train_step(f, SGD, 1) for f in (loss_fn, mean_fn))
    (expected, _), (got, _) = (s(s.init(PARAMS), BATCH) for s in (right, wrong))
    np.testing.assert_array_equal(got.params["w"], expected.params["w"] / BATCH.size)
    assert expected.params["w"][0] != 0


def bound_too_large_in_jit(keep: Any) -> None:
    step = window_step(SGD)
    state, metrics = step(step.init(PARAMS), WINDOW, num_micro_batches=jnp.asarray(9))
    assert metrics.updated and float(metrics.num_tokens) == 4.0


def schedule_of_0_in_jit(keep: Any) -> None:
    optimizer = token_accumulation(SGD, lambda step: 0 * step)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = update(GRADS, state, PARAMS, num_tokens=1)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.negative, GRADS))
