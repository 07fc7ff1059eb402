"""How an update needs the least memory, on each platform."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_tokenaccum._core import dependence
from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum._core.once import (
    OnlyIf,
    emptying,
    in_conditional,
    in_loop,
    in_selection,
)
from optax_tokenaccum._core.trees import M, OptState, T, TracedBool, is_concrete

Update = Callable[[optax.Updates, OptState, optax.Params], tuple[optax.Updates, Any]]


def in_place(*, by_element: bool, leaves_sums: bool, gathers: bool) -> OnlyIf:
    """A way to run an update that may overwrite the sums.

    In a selection, XLA frees each sum after its last use, where a loop holds all of
    them. But with a selection a CPU copies; so does a TPU if the update narrows the
    sums `by_element`, for example to bfloat16, and a GPU if it `gathers` what it spread
    over devices.

    Zeros are left of the sums, whose memory is free until then. On a TPU, an update
    that `leaves_sums` as they are needs less.
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
        selection = way(emptying(in_selection))
        on_tpu = way(in_selection) if leaves_sums else selection
        return jax.lax.platform_dependent(
            runs,
            given,
            carry,
            cpu=loop,
            tpu=loop if by_element else on_tpu,
            default=loop if gathers else selection,
        )

    return only_if


def narrows(sums: optax.Updates, params: optax.Params) -> bool:
    """Whether any sum has more bits than its parameter."""
    both = zip(*map(jax.tree.leaves, (params, sums)), strict=True)
    return any(p.dtype.itemsize < x.dtype.itemsize for p, x in both)


def is_by_element(update: Update, state: OptState, params: optax.Params) -> bool:
    """Whether each element of a gradient changes one of the parameters alone.

    Not with a norm or a product of matrices, as in clipping or Muon. An answer that is
    wrong costs memory alone.
    """
    return not _mixes(jax.make_jaxpr(update)(params, state, params))


def _mixes(traced: dependence.Traced) -> bool:
    """Whether an operation combines elements of an array."""
    equations = dependence.opened(traced).eqns
    names = {x.primitive.name for x in equations} - {"reduce_precision"}
    if any(name == "dot_general" or name.startswith("reduce_") for name in names):
        return True
    inner = itertools.chain.from_iterable(map(dependence.functions_in, equations))
    return any(map(_mixes, inner))
