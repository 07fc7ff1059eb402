"""What a way to accumulate is: its types, and the loops that several ways share."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads import Window, Workload

Optimizer = optax.GradientTransformation


class Program(NamedTuple):
    """A program of a loop, not compiled yet.

    Attributes:
      lowered: the program.
      held: the bytes of gradients, or of sums of them, among its arguments.
    """

    lowered: jax.stages.Lowered
    held: int = 0

    def peak(self, compiled: jax.stages.Compiled | None = None) -> int:
        """Counts temporaries, outputs that alias nothing, and `held`, on a device."""
        found: Any = (compiled or self.lowered.compile()).memory_analysis()
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        return found.temp_size_in_bytes + outputs + self.held


class Loop(NamedTuple):
    """A training loop, window by window.

    Attributes:
      init: `init(params) -> state`, in buffers of its own; the parameters are its first
        element.
      run: `run(state, window) -> state`; it may donate the state.
      lower: `lower(state, window) -> {name: program}`, the programs that it runs, the
        one of a micro-batch first. Shapes are enough.
    """

    init: Callable[[Any], Any]
    run: Callable[[Any, Window], Any]
    lower: Callable[[Any, Window], dict[str, Program]]


class Way(NamedTuple):
    """One way to accumulate.

    Attributes:
      kind: `"limit"`, `"optax"`, `"by hand"` or `"ours"`.
      build: `build(workload, inner, k)` makes the loop; steps take `mesh` too.
      exact: whether it should give the gradient of the whole window.
    """

    kind: str
    build: Callable[..., Loop]
    exact: bool = True


def one_program(
    workload: Workload,
    init: Callable[[Any], Any],
    step: Callable[..., Any],
    batches: str,
    holds_sums: bool = False,
) -> Loop:
    """A loop of `step(params, opt_state, batch, frozen) -> (params, opt_state, loss)`.

    A loop that did not return the loss would need less memory than one that people log.

    Args:
      workload: what to train.
      init: `init(params) -> opt_state`.
      step: called for every batch.
      batches: the attribute of `Window` with a batch, or with several.
      holds_sums: whether they are in the `opt_state`.
    """
    jitted = jax.jit(step, donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        for batch in batches_of(window, batches):
            params, opt_state, *_ = jitted(*state, batch, workload.frozen)
            state = params, opt_state
        return state

    def lower(state: Any, window: Window) -> Any:
        batch = batches_of(window, batches)[0]
        lowered = jitted.lower(*state, batch, workload.frozen)
        held = size_in_bytes(state[1].acc_grads) if holds_sums else 0
        return {"step": Program(lowered, held)}

    return Loop(lambda params: owned((params, init(params))), run, lower)


def optimizer_that_accumulates(workload: Workload, optimizer: Any, loss: Any) -> Loop:
    """A handwritten train step, which updates the optimizer on every micro-batch.

    Args:
      workload: what to train.
      optimizer: ours gets `num_tokens`; optax's ignores it.
      loss: the sum or the mean over a micro-batch, as the optimizer expects it.
    """

    def step(params: Any, opt_state: Any, batch: Any, frozen: Any) -> Any:
        (value, n), gradient = jax.value_and_grad(loss, has_aux=True)(
            params, batch, frozen
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state, value

    return one_program(workload, optimizer.init, step, "micro_batches", True)


def batches_of(window: Window, name: str) -> list[Any]:
    found = getattr(window, name)
    return found if name == "micro_batches" else [found]


def empty_sums(params: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Zero sums of losses, tokens and gradients, in float32."""
    gradients = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    return jnp.zeros(()), jnp.zeros(()), gradients


def add(sums: Any, terms: Any) -> Any:
    return jax.tree.map(jnp.add, sums, terms)


def apply_sums(inner: Optimizer, params: Any, opt_state: Any, sums: Any) -> Any:
    """Applies the inner optimizer to the window's gradient.

    Returns `(params, opt_state, loss)`, with the mean loss.
    """
    loss = sums[0] / sums[1]
    return *apply(inner, params, opt_state, mean_like(params, sums)), loss


def mean_like(params: Any, sums: Any) -> Any:
    """The window's gradient in the dtypes of the parameters."""
    _, num_tokens, gradients = sums
    return jax.tree.map(
        lambda g, p: (g / num_tokens).astype(p.dtype), gradients, params
    )


def apply(inner: Optimizer, params: Any, opt_state: Any, gradient: Any) -> Any:
    updates, opt_state = inner.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def owned(tree: Any) -> Any:
    """Copies a tree, so that donation does not delete another way's arrays."""
    return jax.tree.map(jnp.copy, tree)


def shardings_of(tree: Any) -> Any:
    """For the results of a program that do not follow from its arguments' shardings."""
    return jax.tree.map(lambda x: getattr(x, "sharding", None), tree)


def size_in_bytes(tree: Any) -> int:
    """The bytes of a tree of arrays, or of shapes, on a device."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = sharding.shard_shape(x.shape) if sharding else x.shape
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
