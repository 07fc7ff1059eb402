"""How an update needs the least memory, on each platform."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import dependence
from optax_tokenaccum._core.accumulation import First
from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.once import (
    OnlyIf,
    emptying,
    in_conditional,
    in_loop,
    in_selection,
)
from optax_tokenaccum._core.trees import M, OptState, T, TracedBool, is_concrete

Update = Callable[[optax.Updates, OptState, optax.Params], tuple[optax.Updates, Any]]
# The last axis of an array in a TPU's memory is padded to a multiple of this.
_LANES = 128


def in_least_memory(
    update: Update,
    sums: optax.Updates,
    state: OptState,
    params: optax.Params,
    layout: Layout,
    *,
    is_alone: bool,
    is_unrolled: bool,
) -> tuple[OnlyIf, First]:
    """A way to run an update that may overwrite the sums; what a TPU computes first.

    In a selection, XLA frees each sum after its last use, but may keep what is replaced
    next to what replaces it. That needs less if an update multiplies matrices, as
    Muon's does, or if sums are reduced or parameters gathered. In a loop or a
    conditional it holds all sums, but overwrites in place; a GPU copies what passes
    through a conditional, and a CPU what is selected.

    A TPU selects too, unless gradients are narrower than sums or the update has a
    conditional. Through a loop or a conditional it copies parameters that it lays out
    transposed.

    Zeros are left of the sums, whose memory is free until then. On a TPU, a selection
    that leaves sums of the same dtype as they are needs less.

    Args:
      update: of the inner optimizer.
      sums: of gradients.
      state: of the inner optimizer.
      params: the parameters.
      layout: of the sums.
      is_alone: whether there is one device.
      is_unrolled: whether gradients of unrolled layers are computed before the update
        in the same program.
    """
    operations = {*_operations(jax.make_jaxpr(update)(params, state, params))}
    reduces = bool(layout.leading_axes) or layout.gathers
    selects = reduces or "dot_general" in operations
    narrow = _narrows(sums, params)
    has_choice = "cond" in operations or narrow and not is_unrolled
    if has_choice and not selects and _are_laid_out_in_order(params):
        on_tpu, first = emptying(in_conditional), "quotients" if narrow else "norm"
    elif is_alone and not narrow:
        on_tpu, first = in_selection, "norm"
    else:
        on_tpu, first = emptying(in_selection), "norm"
    default = emptying(in_selection) if selects and not layout.gathers else _in_loop
    return _by_platform(cpu=_in_loop, tpu=on_tpu, default=default), first


def _by_platform(**ways: OnlyIf) -> OnlyIf:
    def only_if(
        runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
    ) -> tuple[T, M]:
        if is_concrete(runs):
            return in_conditional(runs, body, given, carry)
        traced_once = jax.jit(body)

        def way(only_if: OnlyIf) -> Callable[[TracedBool, M, T], tuple[T, M]]:
            return lambda runs, given, carry: only_if(runs, traced_once, given, carry)

        return jax.lax.platform_dependent(
            runs, given, carry, **{name: way(x) for name, x in ways.items()}
        )

    return only_if


# Where the backward pass adds, reverse-mode derivatives are lost already.
_in_loop = in_loop if BackwardPass.is_supported else in_conditional


def _narrows(sums: optax.Updates, params: optax.Params) -> bool:
    """Whether any sum has more bits than its parameter."""
    both = zip(*map(jax.tree.leaves, (params, sums)), strict=True)
    return any(p.dtype.itemsize < x.dtype.itemsize for p, x in both)


def _are_laid_out_in_order(params: optax.Params) -> bool:
    """Whether a TPU needs no padding to keep the last axes of matrices in order."""
    shapes = map(jnp.shape, jax.tree.leaves(params))
    return all(len(shape) < 2 or shape[-1] % _LANES == 0 for shape in shapes)


def _operations(traced: dependence.Traced) -> Iterator[str]:
    """The names of all operations, in called functions too."""
    for x in dependence.opened(traced).eqns:
        yield x.primitive.name
        for inner in dependence.functions_in(x):
            yield from _operations(inner)
