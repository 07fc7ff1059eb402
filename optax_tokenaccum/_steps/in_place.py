"""How an update needs the least memory, on each platform."""

from collections.abc import Callable

import jax

from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum._core.once import OnlyIf, in_conditional, in_loop, in_selection
from optax_tokenaccum._core.trees import M, T, TracedBool, is_concrete


def in_place(*, narrows: bool, gathers: bool) -> OnlyIf:
    """A way to run an update that may overwrite the sums.

    In a selection, XLA frees each sum after its last use, where a loop holds all of
    them. But with a selection a CPU copies; so does a TPU if the update `narrows` every
    element of the sums by itself, for example to bfloat16, and a GPU if it `gathers`
    what it spread over devices.
    """

    def only_if(
        runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
    ) -> tuple[T, M]:
        if is_concrete(runs):
            return in_conditional(runs, body, given, carry)
        traced_once = jax.jit(body)

        def way(only_if: OnlyIf) -> Callable[[TracedBool, M, T], tuple[T, M]]:
            return lambda runs, given, carry: only_if(runs, traced_once, given, carry)

        # Where the backward pass adds, reverse-mode derivatives are lost already.
        loop = way(in_loop if BackwardPass.is_supported else in_conditional)
        selection = way(in_selection)
        return jax.lax.platform_dependent(
            runs,
            given,
            carry,
            cpu=loop,
            tpu=loop if narrows else selection,
            default=loop if gathers else selection,
        )

    return only_if
