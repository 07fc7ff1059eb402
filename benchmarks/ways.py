"""Every way to accumulate.

First come two limits, then optax's ways and forms that people write by hand, then the
entry points of this library.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_tokenaccum
from benchmarks.loops import (
    Loop,
    Optimizer,
    Program,
    Way,
    add,
    apply,
    apply_sums,
    batches_of,
    empty_sums,
    mean_like,
    one_program,
    optimizer_that_accumulates,
    owned,
    shardings_of,
    size_in_bytes,
)
from benchmarks.workloads import Window, Workload
from optax_tokenaccum import (
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_value_and_grad,
)


def gradients_alone(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """Computes k gradients and discards each one."""
    gradient = jax.jit(jax.value_and_grad(workload.loss_fn, has_aux=True))

    def run(state: Any, window: Window) -> Any:
        params, last = state
        for batch in window.micro_batches:
            last = gradient(params, batch, workload.frozen)
        return params, last

    def lower(state: Any, window: Window) -> Any:
        params, batch = state[0], window.micro_batches[0]
        spread = jax.jit(gradient, out_shardings=(None, shardings_of(params)))
        return {"gradient": Program(spread.lower(params, batch, workload.frozen))}

    return Loop(lambda params: (owned(params), None), run, lower)


def gradients_and_step(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """Computes k gradients and one optimizer step on the last; adds up nothing."""
    gradients = gradients_alone(workload, inner, k)
    step = jax.jit(partial(apply, inner), donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        params, opt_state = state
        _, (_, last) = gradients.run((params, None), window)
        return step(params, opt_state, last)

    def lower(state: Any, window: Window) -> Any:
        lowered = step.lower(*state, state[0])
        return gradients.lower(state, window) | {
            "step": Program(lowered, size_in_bytes(state[0]))
        }

    return Loop(lambda params: owned((params, inner.init(params))), run, lower)


def optax_multi_steps(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The mean of the micro-batches' means; the inner optimizer runs k times."""
    optimizer = optax.MultiSteps(inner, every_k_schedule=k)
    return optimizer_that_accumulates(workload, optimizer, workload.mean_loss_fn)


def optax_microbatching(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """optax cuts the batch and sums everything; the division is by hand."""

    def step(params: Any, opt_state: Any, whole: Any, frozen: Any) -> Any:
        sums_over_window = optax.microbatching.microbatch(
            jax.value_and_grad(workload.loss_fn, has_aux=True),
            argnums=1,
            microbatch_size=len(jax.tree.leaves(whole)[0]) // k,
            accumulator=optax.microbatching.AccumulationType.SUM,
        )
        (loss_sum, num_tokens), gradients = sums_over_window(params, whole, frozen)
        sums = (loss_sum, num_tokens, gradients)
        return apply_sums(inner, params, opt_state, sums)

    return one_program(workload, inner.init, step, "whole")


def scan_by_hand(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """Sums in a scan over the window and divides after it, like MaxText."""

    def step(params: Any, opt_state: Any, micro_batches: Any, frozen: Any) -> Any:
        sums = sums_by_hand(workload, params, micro_batches, frozen)
        return apply_sums(inner, params, opt_state, sums)

    return one_program(workload, inner.init, step, "stacked")


def sums_by_hand(
    workload: Workload, params: Any, micro_batches: Any, frozen: Any
) -> Any:
    def body(sums: Any, batch: Any) -> Any:
        return add(sums, _gradient(workload, params, batch, frozen)), None

    return jax.lax.scan(body, empty_sums(params), micro_batches)[0]


def pair_by_hand(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """Two programs: one adds a micro-batch, one updates and resets the sums."""

    def init(params: Any) -> Any:
        return owned((params, inner.init(params), empty_sums(params)))

    @partial(jax.jit, donate_argnums=0)
    def accumulate(sums: Any, params: Any, batch: Any, frozen: Any) -> Any:
        return add(sums, _gradient(workload, params, batch, frozen))

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def close(params: Any, opt_state: Any, sums: Any) -> Any:
        updated = apply_sums(inner, params, opt_state, sums)
        return *updated, jax.tree.map(jnp.zeros_like, sums)

    def run(state: Any, window: Window) -> Any:
        params, opt_state, sums = state
        for batch in window.micro_batches:
            sums = accumulate(sums, params, batch, workload.frozen)
        params, opt_state, _, sums = close(params, opt_state, sums)
        return params, opt_state, sums

    def lower(state: Any, window: Window) -> Any:
        params, _, sums = state
        batch, held = window.micro_batches[0], size_in_bytes(sums)
        lowered = accumulate.lower(sums, params, batch, workload.frozen)
        params_spread, opt_spread, sums_spread = shardings_of(state)
        spread = jax.jit(
            close,
            donate_argnums=(0, 1, 2),
            out_shardings=(params_spread, opt_spread, None, sums_spread),
        )
        return {
            "accumulate": Program(lowered, held),
            "close": Program(spread.lower(*state), held),
        }

    return Loop(init, run, lower)


def _gradient(workload: Workload, params: Any, batch: Any, frozen: Any) -> Any:
    """`(loss_sum, num_tokens, gradient)`, the start of every form."""
    (loss_sum, num_tokens), gradient = jax.value_and_grad(
        workload.loss_fn, has_aux=True
    )(params, batch, frozen)
    return loss_sum, num_tokens, gradient


def transformation(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """`token_accumulation` in a handwritten train step."""
    optimizer = token_accumulation(inner, k)
    return optimizer_that_accumulates(workload, optimizer, workload.loss_fn)


def multi_steps(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """`MultiSteps` in the loop of `optax.MultiSteps`."""
    optimizer = optax_tokenaccum.MultiSteps(inner, every_k_schedule=k)
    return optimizer_that_accumulates(workload, optimizer, workload.mean_loss_fn)


def train_step(workload: Workload, inner: Optimizer, k: int, **options: Any) -> Loop:
    """`make_train_step`: two programs."""
    step = make_train_step(workload.loss_fn, inner, k, **options)

    def lower(state: Any, window: Window) -> Any:
        batch = window.micro_batches[0]
        accumulate = step.accumulate.lower(state, batch, frozen=workload.frozen)
        held = size_in_bytes(state.opt_state.acc_grads)
        return {
            "accumulate": Program(accumulate, held),
            "close": Program(step.close_window.lower(state), held),
        }

    return _loop(workload, step, "micro_batches", lower)


def window_step(workload: Workload, inner: Optimizer, k: int, **options: Any) -> Loop:
    """`make_window_step`: one window per call."""
    step = make_window_step(workload.loss_fn, inner, **options)

    def lower(state: Any, window: Window) -> Any:
        return {
            "step": Program(step.lower(state, window.stacked, frozen=workload.frozen))
        }

    return _loop(workload, step, "stacked", lower)


def gradient_by_hand(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The scan by hand, which returns the gradient, and an update of its own."""

    def gradient(params: Any, micro_batches: Any, frozen: Any) -> Any:
        sums = sums_by_hand(workload, params, micro_batches, frozen)
        return (sums[0] / sums[1], sums[1]), mean_like(params, sums)

    return _gradient_and_update(workload, inner, gradient)


def window_gradient(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """`window_value_and_grad`, and an update in a program of its own."""
    return _of_window(workload, inner, window_value_and_grad(workload.loss_fn))


def coupled_gradient(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The same with `coupled_value_and_grad`, of the token mean."""

    def token_mean(summaries: Any) -> Any:
        loss_sums, num_tokens = summaries
        return loss_sums.sum() / num_tokens.sum()

    of_window = coupled_value_and_grad(workload.loss_fn, token_mean)
    return _of_window(workload, inner, of_window)


def _of_window(workload: Workload, inner: Optimizer, f: Callable[..., Any]) -> Loop:
    def gradient(params: Any, micro_batches: Any, frozen: Any) -> Any:
        return f(params, micro_batches, frozen=frozen)

    return _gradient_and_update(workload, inner, gradient)


def _gradient_and_update(
    workload: Workload, inner: Optimizer, gradient: Callable[..., Any]
) -> Loop:
    gradient = jax.jit(gradient)
    update = jax.jit(partial(apply, inner), donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        _, mean = gradient(state[0], window.stacked, workload.frozen)
        return update(*state, mean)

    def lower(state: Any, window: Window) -> Any:
        spread = jax.jit(gradient, out_shardings=(None, shardings_of(state[0])))
        lowered = spread.lower(state[0], window.stacked, workload.frozen)
        held = size_in_bytes(state[0])
        return {
            "window": Program(lowered),
            "update": Program(update.lower(*state, state[0]), held),
        }

    return Loop(lambda params: owned((params, inner.init(params))), run, lower)


def _loop(workload: Workload, step: Any, batches: str, lower: Any) -> Loop:
    def run(state: Any, window: Window) -> Any:
        for batch in batches_of(window, batches):
            state, _ = step(state, batch, frozen=workload.frozen)
        return state

    return Loop(step.init, run, lower)


WAYS: dict[str, Way] = {
    "gradients alone": Way("limit", gradients_alone, exact=False),
    "gradients + one step": Way("limit", gradients_and_step, exact=False),
    "optax.MultiSteps": Way("optax", optax_multi_steps, exact=False),
    "optax.microbatching": Way("optax", optax_microbatching),
    "scan by hand": Way("by hand", scan_by_hand),
    "pair by hand": Way("by hand", pair_by_hand),
    "gradient by hand": Way("by hand", gradient_by_hand),
    "token_accumulation": Way("ours", transformation),
    "MultiSteps": Way("ours", multi_steps),
    "train step": Way("ours", train_step),
    "window step": Way("ours", window_step),
    "window_value_and_grad": Way("ours", window_gradient),
    "coupled_value_and_grad": Way("ours", coupled_gradient),
}
