"""The contenders' types, and their two kinds of loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads import Window, Workload


class Program(NamedTuple):
    """A program of a loop, not compiled yet.

    Attributes:
      lowered: the program.
      held: the bytes of gradients, or of sums of them, among its arguments.
    """

    lowered: jax.stages.Lowered
    held: int = 0


class Loop(NamedTuple):
    """A training loop, window by window.

    Attributes:
      state: the initial state.
      run: `run(state, window) -> state`; it may donate the state.
      params: `params(state)` returns the parameters.
      lower: `lower(state, window) -> {name: program}`, the programs that it runs.
    """

    state: Any
    run: Callable[[Any, Window], Any]
    params: Callable[[Any], Any]
    lower: Callable[[Any, Window], dict[str, Program]]


class Contender(NamedTuple):
    """One way to accumulate.

    Attributes:
      kind: `"limit"`, `"optax"`, `"by hand"` or `"ours"`.
      build: `build(workload, inner, k)` makes the loop.
      exact: whether it should give the gradient of the whole window.
    """

    kind: str
    build: Callable[[Workload, optax.GradientTransformation, int], Loop]
    exact: bool = True


def call_per_micro_batch(
    workload: Workload,
    opt_state: Any,
    step: Callable[..., Any],
    sums: Callable[[Any], Any],
) -> Loop:
    """A loop of `step(params, opt_state, batch, frozen) -> (params, opt_state)`.

    `sums(opt_state)` returns the sums.
    """
    jitted = jax.jit(step, donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        for batch in window.micro_batches:
            state = jitted(*state, batch, workload.frozen)
        return state

    def lower(state: Any, window: Window) -> Any:
        batch = window.micro_batches[0]
        lowered = jitted.lower(*state, batch, workload.frozen)
        return {"step": Program(lowered, size_in_bytes(sums(opt_state)))}

    start = (owned(workload.params), owned(opt_state))
    return Loop(start, run, lambda state: state[0], lower)


def call_per_window(
    workload: Workload,
    opt_state: Any,
    step: Callable[..., Any],
    data: Callable[[Window], Any],
) -> Loop:
    """A loop of `step(params, opt_state, data, frozen) -> (params, opt_state)`."""
    jitted = jax.jit(step, donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        return jitted(*state, data(window), workload.frozen)

    def lower(state: Any, window: Window) -> Any:
        return {"step": Program(jitted.lower(*state, data(window), workload.frozen))}

    start = (owned(workload.params), owned(opt_state))
    return Loop(start, run, lambda state: state[0], lower)


def empty_sums(params: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Zero sums of losses, tokens and gradients, in float32."""
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jnp.zeros(()), jnp.zeros(()), gradients


def add(sums: Any, terms: Any) -> Any:
    return jax.tree.map(jnp.add, sums, terms)


def apply_sums(
    inner: optax.GradientTransformation, params: Any, opt_state: Any, sums: Any
) -> tuple[Any, Any]:
    """Divides the sums once and applies the inner optimizer to the mean gradient."""
    _, num_tokens, gradients = sums
    mean = jax.tree.map(
        lambda g, p: (g / num_tokens).astype(p.dtype), gradients, params
    )
    return apply(inner, params, opt_state, mean)


def apply(
    inner: optax.GradientTransformation, params: Any, opt_state: Any, gradient: Any
) -> tuple[Any, Any]:
    updates, opt_state = inner.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def owned(tree: Any) -> Any:
    """Copies a tree, so that donation does not delete another contender's arrays."""
    return jax.tree.map(jnp.copy, tree)


def size_in_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
