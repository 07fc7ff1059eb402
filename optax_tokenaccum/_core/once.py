"""Runs a function once or not at all, as a traced value says."""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import memory_order
from optax_tokenaccum._core.trees import (
    M,
    T,
    TracedBool,
    as_varying,
    is_concrete,
    types_are_marked,
    varying_axes,
)

# XLA compiles a loop that holds smaller arrays alone as one function on a CPU: for 300
# of them that takes 20 s, where a conditional takes 1 s.
_WORTH_A_LOOP = 2**14  # bytes


class AtMostOnce(Protocol):
    """A way to run `carry = body(carry)`, only if `runs`."""

    def __call__(self, runs: TracedBool, body: Callable[[T], T], carry: T, /) -> T: ...


class OnlyIf(Protocol):
    """A way to run `carry = body(given, carry)`, only if `runs`.

    It returns the carry, and what is left of what the body was given.
    """

    def __call__(
        self, runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T, /
    ) -> tuple[T, M]: ...


def at_most_once(runs: TracedBool, body: Callable[[T], T], carry: T) -> T:
    """`body(carry)` if `runs`, else `carry`, in the memory of `carry`.

    It is a loop of zero or one trips, because a GPU copies what a conditional passes on
    in one branch and replaces in the other. JAX cannot differentiate it in reverse.
    """

    def trip(so_far: tuple[TracedBool, T]) -> tuple[TracedBool, T]:
        runs, carry = so_far
        return runs & False, body(carry)

    so_far = as_returned(trip, (runs, carry))
    return jax.lax.while_loop(lambda so_far: so_far[0], trip, so_far)[1]


def at_most_once_on_a_tpu(runs: TracedBool, body: Callable[[T], T], carry: T) -> T:
    """The same for a TPU, which copies no array to change the order of its axes."""

    def of_views(views: T) -> T:
        return memory_order.viewed(body(memory_order.restored(views, carry)))

    views = at_most_once(runs, of_views, memory_order.viewed(carry))
    return memory_order.restored(views, carry)


def in_conditional(
    runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
) -> tuple[T, M]:
    """In a `jax.lax.cond`, which JAX can differentiate in reverse, or a plain `if`.

    An eager `cond` would compile in every call. A compiled one holds what it is given
    until it ends, next to all that the body computes.
    """
    if is_concrete(runs):
        return (body(given, carry) if runs else carry), given
    run = functools.partial(body, given)
    return jax.lax.cond(runs, run, lambda carry: carry, carry), given


def in_loop(
    runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
) -> tuple[T, M]:
    """In a loop that may overwrite what the body is given, and leaves zeros of it.

    Tiny arrays are left to a conditional, which compiles faster.
    """
    return _in_loop(at_most_once, runs, body, given, carry)


def in_loop_on_a_tpu(
    runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
) -> tuple[T, M]:
    """The same for a TPU, see `at_most_once_on_a_tpu`."""
    return _in_loop(at_most_once_on_a_tpu, runs, body, given, carry)


def _in_loop(
    once: AtMostOnce,
    runs: TracedBool,
    body: Callable[[M, T], T],
    given: M,
    carry: T,
) -> tuple[T, M]:
    if _is_tiny(given):
        return in_conditional(runs, body, given, carry)

    def trip(so_far: tuple[T, M]) -> tuple[T, M]:
        carry, given = so_far
        carry = body(given, carry)
        # The zeros do not exist before the body has ended: until then their memory is
        # free for what it computes. Of a shared zero, XLA would fill one and copy it.
        zeros = jax.tree.map(lambda x: jnp.zeros((), x.dtype), given)
        zeros, _ = jax.lax.optimization_barrier((zeros, carry))
        return carry, jax.tree.map(
            lambda x, zero: jnp.zeros_like(x) + zero, given, zeros
        )

    return once(runs, trip, (carry, given))


def in_selection(
    runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
) -> tuple[T, M]:
    """Always, and the old carry stays unless `runs`.

    XLA then schedules the body with all around it, and frees every array that is given
    after its last use, if it need not be left as it is.
    """
    new = body(given, carry)
    return jax.tree.map(functools.partial(jax.lax.select, runs), new, carry), given


def emptying(only_if: OnlyIf) -> OnlyIf:
    """The same way, which leaves zeros of what the body was given."""

    def then_empty(
        runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
    ) -> tuple[T, M]:
        carry, given = only_if(runs, body, given, carry)
        return carry, jax.tree.map(jnp.zeros_like, given)

    return then_empty


def _is_tiny(given: object) -> bool:
    return all(x.nbytes < _WORTH_A_LOOP for x in jax.tree.leaves(given))


def as_returned(body: Callable[[T], T], carry: T) -> T:
    """The first carry of a loop, with the types that `body` returns."""
    if not types_are_marked():
        return carry
    return jax.tree.map(
        lambda x, y: as_varying(jnp.asarray(x), varying_axes(y)),
        carry,
        jax.eval_shape(body, carry),
    )
