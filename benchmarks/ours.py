"""The entry points of this library."""

from typing import Any

import jax
import optax

import optax_tokenaccum
from benchmarks.loops import (
    Contender,
    Loop,
    Program,
    call_per_micro_batch,
    size_in_bytes,
)
from benchmarks.workloads import Window, Workload
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation


def transformation(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """`token_accumulation` in a handwritten train step."""
    optimizer = token_accumulation(inner, k)

    def step(params: Any, opt_state: Any, batch: Any, frozen: Any) -> Any:
        gradient, n = jax.grad(workload.loss_fn, has_aux=True)(params, batch, frozen)
        updates, opt_state = optimizer.update(gradient, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    return call_per_micro_batch(
        workload, optimizer.init(workload.params), step, _sums_of
    )


def multi_steps(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """`MultiSteps` in the loop of `optax.MultiSteps`."""
    optimizer = optax_tokenaccum.MultiSteps(inner, every_k_schedule=k)

    def step(params: Any, opt_state: Any, batch: Any, frozen: Any) -> Any:
        gradient, n = jax.grad(workload.mean_loss_fn, has_aux=True)(
            params, batch, frozen
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    return call_per_micro_batch(
        workload, optimizer.init(workload.params), step, _sums_of
    )


def train_step(
    workload: Workload, inner: optax.GradientTransformation, k: int, **options: Any
) -> Loop:
    """`make_train_step` if the host knows when a window closes: two programs."""
    step = make_train_step(workload.loss_fn, inner, k, **options)

    def lower(state: Any, window: Window) -> Any:
        batch = window.micro_batches[0]
        accumulate = step.accumulate.lower(state, batch, frozen=workload.frozen)
        held = size_in_bytes(_sums_of(state.opt_state))
        return {
            "accumulate": Program(accumulate, held),
            "close": Program(step.close_window.lower(state), held),
        }

    return _steps(workload, step, lower)


def train_step_in_one(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """`make_train_step` if only the device knows, for example with a token budget."""
    step = make_train_step(workload.loss_fn, inner, lambda gradient_step: k)
    # `step` does not expose the program behind its call.
    program = jax.jit(
        lambda state, batch: step(state, batch, frozen=workload.frozen),
        donate_argnums=0,
    )

    def lower(state: Any, window: Window) -> Any:
        lowered = program.lower(state, window.micro_batches[0])
        return {"step": Program(lowered, size_in_bytes(_sums_of(state.opt_state)))}

    return _steps(workload, step, lower)


def window_step(
    workload: Workload, inner: optax.GradientTransformation, k: int, **options: Any
) -> Loop:
    """`make_window_step`: one window per call."""
    step = make_window_step(workload.loss_fn, inner, **options)

    def run(state: Any, window: Window) -> Any:
        return step(state, window.stacked, frozen=workload.frozen)[0]

    def lower(state: Any, window: Window) -> Any:
        lowered = step.lower(state, window.stacked, frozen=workload.frozen)
        return {"step": Program(lowered)}

    return Loop(step.init(workload.params), run, lambda state: state.params, lower)


def _steps(workload: Workload, step: Any, lower: Any) -> Loop:
    def run(state: Any, window: Window) -> Any:
        for batch in window.micro_batches:
            state, _ = step(state, batch, frozen=workload.frozen)
        return state

    return Loop(step.init(workload.params), run, lambda state: state.params, lower)


def _sums_of(opt_state: Any) -> Any:
    return opt_state.acc_grads


OURS: dict[str, Contender] = {
    "token_accumulation": Contender("ours", transformation),
    "MultiSteps": Contender("ours", multi_steps),
    "train step": Contender("ours", train_step),
    "train step, one program": Contender("ours", train_step_in_one),
    "window step": Contender("ours", window_step),
}
