"""Every way to accumulate.

First come two limits, then optax's ways and forms that people write by hand, then the
entry points of this library.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads import Window, Workload
from optax_tokenaccum import (
    MultiSteps,
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_value_and_grad,
)

Optimizer = optax.GradientTransformation
ADAMW = optax.adamw(1e-4)


class Program(NamedTuple):
    """A program of a loop, not compiled yet."""

    lowered: Any  # of JAX, or of a step
    held: int = 0  # the bytes of gradients, or of their sums, among its arguments

    def peak(self, compiled: jax.stages.Compiled | None = None) -> int:
        """Counts temporaries, outputs that alias nothing, and `held`, on a device.

        This leaves out parameters, optimizer state and batch.
        """
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
    lower: Callable[[Any, Window], dict[str, Program]] = lambda *_: {}


class Way(NamedTuple):
    """One way to accumulate.

    Attributes:
      build: `build(workload, inner, k)` makes the loop; steps take `mesh` too.
      exact: whether it gives the gradient of the window; `None` for a limit.
    """

    build: Callable[..., Loop]
    exact: bool | None = True


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

    def last(params: Any, window: Window) -> Any:
        return gradients.run((params, None), window)[1][1]

    return gradient_and_update(inner, last, gradients.lower)


def optax_multi_steps(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The mean of the micro-batches' means; the inner optimizer runs k times."""
    optimizer = optax.MultiSteps(inner, every_k_schedule=k)
    return optimizer_that_accumulates(workload, optimizer, workload.mean_loss_fn)


def transformation(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """`token_accumulation` in a handwritten train step."""
    optimizer = token_accumulation(inner, k)
    return optimizer_that_accumulates(workload, optimizer, workload.loss_fn)


def multi_steps(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The class that replaces `optax.MultiSteps`, in the same loop."""
    return optimizer_that_accumulates(
        workload, MultiSteps(inner, k), workload.mean_loss_fn
    )


def optimizer_that_accumulates(workload: Workload, optimizer: Any, loss: Any) -> Loop:
    """A handwritten train step, which updates the optimizer on every micro-batch.

    The loss is a sum or a mean, as the optimizer expects it.
    """

    def step(params: Any, opt_state: Any, batch: Any, frozen: Any) -> Any:
        (value, n), gradient = jax.value_and_grad(loss, has_aux=True)(
            params, batch, frozen
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state, value

    return one_program(workload, optimizer.init, step, "micro_batches", True)


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
        sums = loss_sum, num_tokens, gradients
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
        return added(sums, workload, params, batch, frozen), None

    return jax.lax.scan(body, empty_sums(params), micro_batches)[0]


def pair_by_hand(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """Two programs: one adds a micro-batch, one updates.

    New sums are made outside of both: XLA for GPUs may not write all zeros that a
    program returns in donated buffers (upstream/README.md).
    """

    def init(params: Any) -> Any:
        return owned((params, inner.init(params), empty_sums(params)))

    @partial(jax.jit, donate_argnums=0)
    def accumulate(sums: Any, params: Any, batch: Any, frozen: Any) -> Any:
        return added(sums, workload, params, batch, frozen)

    close = jax.jit(partial(apply_sums, inner), donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        params, opt_state, sums = state
        for batch in window.micro_batches:
            sums = accumulate(sums, params, batch, workload.frozen)
        params, opt_state, _ = close(params, opt_state, sums)
        del sums
        return params, opt_state, empty_sums(params)

    def lower(state: Any, window: Window) -> Any:
        params, _, sums = state
        batch, held = window.micro_batches[0], size_in_bytes(sums)
        lowered = accumulate.lower(sums, params, batch, workload.frozen)
        params_spread, opt_spread, _ = shardings_of(state)
        spread = jax.jit(
            close,
            donate_argnums=(0, 1),
            out_shardings=(params_spread, opt_spread, None),
        )
        return {
            "accumulate": Program(lowered, held),
            "close": Program(spread.lower(*state), held),
        }

    return Loop(init, run, lower)


def train_step(workload: Workload, inner: Optimizer, k: int, **options: Any) -> Loop:
    """`make_train_step`: two programs."""
    step = make_train_step(workload.loss_fn, inner, k, **options)

    def lower(state: Any, window: Window) -> Any:
        batch = window.micro_batches[0]
        accumulate = step.accumulate.lower(state, batch, frozen=workload.frozen)
        held = size_in_bytes(state.opt_state.grad_sums)
        return {
            "accumulate": Program(accumulate, held),
            "close": Program(step.close_window.lower(state), held),
        }

    return loop_of(workload, step, "micro_batches", lower)


def window_step(workload: Workload, inner: Optimizer, k: int, **options: Any) -> Loop:
    """`make_window_step`: one window per call."""
    step = make_window_step(workload.loss_fn, inner, **options)

    def lower(state: Any, window: Window) -> Any:
        lowered = step.lower(state, window.stacked, frozen=workload.frozen)
        return {"step": Program(lowered)}

    return loop_of(workload, step, "stacked", lower)


def loop_of(workload: Workload, step: Any, batches: str, lower: Any) -> Loop:
    """Calls a step of ours for every batch."""

    def run(state: Any, window: Window) -> Any:
        for batch in batches_of(window, batches):
            state, _ = step(state, batch, frozen=workload.frozen)
        return state

    return Loop(step.init, run, lower)


def gradient_by_hand(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The scan by hand, which returns the gradient, and an update of its own."""

    def gradient(params: Any, micro_batches: Any, *, frozen: Any) -> Any:
        sums = sums_by_hand(workload, params, micro_batches, frozen)
        return (sums[0] / sums[1], sums[1]), mean_like(params, sums)

    return gradient_of_window(workload, inner, gradient)


def window_gradient(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """`window_value_and_grad`, and an update in a program of its own."""
    return gradient_of_window(workload, inner, window_value_and_grad(workload.loss_fn))


def coupled_gradient(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """The same with `coupled_value_and_grad`, of the token mean."""
    gradient = coupled_value_and_grad(
        workload.loss_fn, lambda sums: sums[0].sum() / sums[1].sum()
    )
    return gradient_of_window(workload, inner, gradient)


def gradient_of_window(
    workload: Workload, inner: Optimizer, gradient: Callable[..., Any]
) -> Loop:
    """A program for `gradient(params, micro_batches, frozen=) -> (value, gradient)`."""

    def of_window(params: Any, micro_batches: Any, frozen: Any) -> Any:
        return gradient(params, micro_batches, frozen=frozen)

    jitted = jax.jit(of_window)

    def run(params: Any, window: Window) -> Any:
        return jitted(params, window.stacked, workload.frozen)[1]

    def lower(state: Any, window: Window) -> Any:
        spread = jax.jit(of_window, out_shardings=(None, shardings_of(state[0])))
        lowered = spread.lower(state[0], window.stacked, workload.frozen)
        return {"window": Program(lowered)}

    return gradient_and_update(inner, run, lower)


def gradient_and_update(inner: Optimizer, gradient: Any, lower: Any) -> Loop:
    """`gradient(params, window)`, and an update in a program of its own."""
    update = jax.jit(partial(apply, inner), donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        return update(*state, gradient(state[0], window))

    def lower_both(state: Any, window: Window) -> Any:
        lowered = update.lower(*state, state[0])
        held = size_in_bytes(state[0])
        return lower(state, window) | {"update": Program(lowered, held)}

    return Loop(lambda params: owned((params, inner.init(params))), run, lower_both)


def one_program(
    workload: Workload,
    init: Callable[[Any], Any],
    step: Callable[..., Any],
    batches: str,
    holds_sums: bool = False,
) -> Loop:
    """A loop of `step(params, opt_state, batch, frozen) -> (params, opt_state, loss)`.

    A loop that did not return the loss would need less memory than one that people log.
    The batches are those of an attribute of `Window`.
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
        held = 0
        if holds_sums:  # optax holds means
            name = "grad_sums" if hasattr(state[1], "grad_sums") else "acc_grads"
            held = size_in_bytes(getattr(state[1], name))
        return {"step": Program(lowered, held)}

    return Loop(lambda params: owned((params, init(params))), run, lower)


def batches_of(window: Window, name: str) -> list[Any]:
    found = getattr(window, name)
    return found if name == "micro_batches" else [found]


def empty_sums(params: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Zero sums of losses, tokens and gradients, in float32."""
    gradients = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    return jnp.zeros(()), jnp.zeros(()), gradients


def added(sums: Any, workload: Workload, params: Any, batch: Any, frozen: Any) -> Any:
    """The sums with a micro-batch: its loss, its tokens and its gradient."""
    (loss_sum, num_tokens), gradient = jax.value_and_grad(
        workload.loss_fn, has_aux=True
    )(params, batch, frozen)
    return jax.tree.map(jnp.add, sums, (loss_sum, num_tokens, gradient))


def apply_sums(inner: Optimizer, params: Any, opt_state: Any, sums: Any) -> Any:
    """`(params, opt_state, loss)` after a window, with the mean loss."""
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


WAYS: dict[str, Way] = {
    "gradients alone": Way(gradients_alone, exact=None),
    "gradients + one step": Way(gradients_and_step, exact=None),
    "optax.MultiSteps": Way(optax_multi_steps, exact=False),
    "optax.microbatching": Way(optax_microbatching),
    "scan by hand": Way(scan_by_hand),
    "pair by hand": Way(pair_by_hand),
    "gradient by hand": Way(gradient_by_hand),
    "token_accumulation": Way(transformation),
    "MultiSteps": Way(multi_steps),
    "train step": Way(train_step),
    "window step": Way(window_step),
    "window_value_and_grad": Way(window_gradient),
    "coupled_value_and_grad": Way(coupled_gradient),
}
