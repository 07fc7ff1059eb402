"""Limits that no way to accumulate can beat."""

from functools import partial
from typing import Any

import jax
import optax

from benchmarks.loops import (
    Contender,
    Loop,
    Program,
    apply,
    empty_sums,
    owned,
    size_in_bytes,
)
from benchmarks.workloads import Window, Workload


def gradients_alone(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """Computes k gradients and discards each one."""
    gradient = jax.jit(jax.value_and_grad(workload.loss_fn, has_aux=True))

    def run(state: Any, window: Window) -> Any:
        params, last = state
        for batch in window.micro_batches:
            last = gradient(params, batch, workload.frozen)
        return params, last

    def lower(state: Any, window: Window) -> Any:
        batch = window.micro_batches[0]
        return {"gradient": Program(gradient.lower(state[0], batch, workload.frozen))}

    return Loop((owned(workload.params), None), run, lambda state: state[0], lower)


def gradients_and_step(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """Computes k gradients and one optimizer step on the last; adds up nothing."""
    gradient = jax.jit(jax.value_and_grad(workload.loss_fn, has_aux=True))
    step = jax.jit(partial(apply, inner), donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        params, opt_state = state
        last = params
        for batch in window.micro_batches:
            _, last = gradient(params, batch, workload.frozen)
        return step(params, opt_state, last)

    def lower(state: Any, window: Window) -> Any:
        batch = window.micro_batches[0]
        return {
            "gradient": Program(gradient.lower(state[0], batch, workload.frozen)),
            "step": Program(step.lower(*state, state[0]), size_in_bytes(state[0])),
        }

    start = (owned(workload.params), owned(inner.init(workload.params)))
    return Loop(start, run, lambda state: state[0], lower)


def bytes_at_copy_speed(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """Reads and writes in place the fewest bytes that a window can move."""
    needed = bytes_of_a_window(workload, inner, k)
    buffers = owned((workload.params, workload.frozen))
    touch = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)

    def run(buffers: Any, window: Window) -> Any:
        for _ in range(round(needed / (2 * size_in_bytes(buffers)))):
            buffers = touch(buffers)
        return buffers

    return Loop(buffers, run, lambda buffers: buffers[0], lambda *_: {})


def bytes_of_a_window(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> int:
    """The bytes that a window must read and write, not counting activations.

    Every gradient reads the weights in the forward and in the backward pass. The first
    gradient writes the sums, and each later gradient reads and writes them. The close
    reads the sums, and reads and writes the parameters and the optimizer state.
    """
    params = size_in_bytes(workload.params)
    weights = params + size_in_bytes(workload.frozen)
    sums = size_in_bytes(jax.eval_shape(empty_sums, workload.params))
    opt_state = size_in_bytes(jax.eval_shape(inner.init, workload.params))
    return k * 2 * weights + (2 * k - 1) * sums + sums + 2 * (params + opt_state)


LIMITS: dict[str, Contender] = {
    "gradients alone": Contender("limit", gradients_alone, exact=False),
    "gradients + one step": Contender("limit", gradients_and_step, exact=False),
    "bytes at copy speed": Contender("limit", bytes_at_copy_speed, exact=False),
}
