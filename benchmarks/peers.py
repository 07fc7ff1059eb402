"""optax's ways to accumulate, and the four forms that people write by hand."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.loops import (
    Contender,
    Loop,
    Program,
    add,
    apply_sums,
    call_per_micro_batch,
    call_per_window,
    empty_sums,
    owned,
    size_in_bytes,
)
from benchmarks.workloads import Window, Workload


def optax_multi_steps(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """The mean of the micro-batches' means; the inner optimizer runs k times."""
    optimizer = optax.MultiSteps(inner, every_k_schedule=k)

    def step(params: Any, opt_state: Any, batch: Any, frozen: Any) -> Any:
        gradient, _ = jax.grad(workload.mean_loss_fn, has_aux=True)(
            params, batch, frozen
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(workload.params)
    return call_per_micro_batch(
        workload, opt_state, step, lambda opt_state: opt_state.acc_grads
    )


def optax_microbatching(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
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

    opt_state = inner.init(workload.params)
    return call_per_window(workload, opt_state, step, lambda window: window.whole)


def scan_by_hand(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """Sums in a scan over the window and divides after it, like MaxText."""

    def step(params: Any, opt_state: Any, micro_batches: Any, frozen: Any) -> Any:
        def body(sums: Any, batch: Any) -> Any:
            return add(sums, _gradient(workload, params, batch, frozen)), None

        sums, _ = jax.lax.scan(body, empty_sums(params), micro_batches)
        return apply_sums(inner, params, opt_state, sums)

    opt_state = inner.init(workload.params)
    return call_per_window(workload, opt_state, step, lambda window: window.stacked)


def cond_by_hand(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """One program per micro-batch, with update and reset in a cond, like Tunix."""

    def step(params: Any, carried: Any, batch: Any, frozen: Any) -> Any:
        opt_state, sums, index = carried
        sums = add(sums, _gradient(workload, params, batch, frozen))

        def close() -> Any:
            updated = apply_sums(inner, params, opt_state, sums)
            return *updated, jax.tree.map(jnp.zeros_like, sums)

        params, opt_state, sums = jax.lax.cond(
            index == k - 1, close, lambda: (params, opt_state, sums)
        )
        return params, (opt_state, sums, (index + 1) % k)

    carried = (
        inner.init(workload.params),
        empty_sums(workload.params),
        jnp.zeros((), jnp.int32),
    )
    return call_per_micro_batch(workload, carried, step, lambda carried: carried[1])


def pair_by_hand(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """Two programs: one adds a micro-batch, one updates and resets the sums."""

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
        return close(params, opt_state, sums)

    def lower(state: Any, window: Window) -> Any:
        params, _, sums = state
        batch, held = window.micro_batches[0], size_in_bytes(sums)
        lowered = accumulate.lower(sums, params, batch, workload.frozen)
        return {
            "accumulate": Program(lowered, held),
            "close": Program(close.lower(*state), held),
        }

    opt_state = owned(inner.init(workload.params))
    start = (owned(workload.params), opt_state, empty_sums(workload.params))
    return Loop(start, run, lambda state: state[0], lower)


def loop_by_hand(
    workload: Workload, inner: optax.GradientTransformation, k: int
) -> Loop:
    """A jitted gradient, summed outside of jit, and a jitted update."""
    gradient = jax.jit(partial(_gradient, workload))
    close = jax.jit(partial(apply_sums, inner), donate_argnums=(0, 1))

    def run(state: Any, window: Window) -> Any:
        params, opt_state = state
        sums = None
        for batch in window.micro_batches:
            terms = gradient(params, batch, workload.frozen)
            sums = terms if sums is None else add(sums, terms)
        return close(params, opt_state, sums)

    def lower(state: Any, window: Window) -> Any:
        params, opt_state = state
        batch = window.micro_batches[0]
        sums = empty_sums(params)
        held = size_in_bytes(sums)
        lowered = gradient.lower(params, batch, workload.frozen)
        terms = jax.eval_shape(gradient, params, batch, workload.frozen)
        # Outside of jit, this is a program for each array, and allocates the same.
        lowered_add = jax.jit(add).lower(sums, terms)
        return {
            "gradient": Program(lowered, held),
            "add": Program(lowered_add, held + size_in_bytes(terms)),
            "close": Program(close.lower(params, opt_state, sums), held),
        }

    start = (owned(workload.params), owned(inner.init(workload.params)))
    return Loop(start, run, lambda state: state[0], lower)


def _gradient(workload: Workload, params: Any, batch: Any, frozen: Any) -> Any:
    """`(loss_sum, num_tokens, gradient)`, the start of every form."""
    (loss_sum, num_tokens), gradient = jax.value_and_grad(
        workload.loss_fn, has_aux=True
    )(params, batch, frozen)
    return loss_sum, num_tokens, gradient


PEERS: dict[str, Contender] = {
    "optax.MultiSteps": Contender("optax", optax_multi_steps, exact=False),
    "optax.microbatching": Contender("optax", optax_microbatching),
    "scan by hand": Contender("by hand", scan_by_hand),
    "cond by hand": Contender("by hand", cond_by_hand),
    "pair by hand": Contender("by hand", pair_by_hand),
    "loop by hand": Contender("by hand", loop_by_hand),
}
