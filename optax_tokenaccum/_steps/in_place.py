"""How an update needs the least memory, on each platform."""

from collections.abc import Callable, Iterator
from typing import Literal

import jax
import optax

from optax_tokenaccum._core import dependence, platforms
from optax_tokenaccum._core.accumulation import First
from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.memory_order import is_row_major
from optax_tokenaccum._core.once import (
    OnlyIf,
    emptying,
    in_conditional,
    in_loop,
    in_loop_on_a_tpu,
    in_selection,
)
from optax_tokenaccum._core.trees import M, T, TracedBool, is_concrete

# How the layers of a window run whose update is in the same program.
Layers = Literal["scanned", "unrolled"]


def in_least_memory(
    update: dependence.Traced,
    sums: optax.Updates,
    params: optax.Params,
    layout: Layout,
    *,
    is_alone: bool,
    window: Layers | None,
) -> tuple[OnlyIf, First]:
    """A way to run an update that may overwrite the sums; what comes first.

    In a loop or a conditional, XLA holds all sums, but overwrites in place; a GPU
    copies what passes through a conditional, and a CPU what is selected. In a
    selection, XLA frees each sum after its last use, but may keep what is replaced next
    to what replaces it.

    A GPU and a TPU select if the update multiplies matrices, as Muon's does, or sums
    are reduced. A TPU also selects if most parameters are gathered, and if the window
    is in the same program, unless either gradients are narrower than sums, of layers
    that are scanned, or the update has a conditional, but not both.

    A TPU stores gradients that are narrower than sums, and holds the sums next to what
    a conditional in the update reads, unless they are divided in their own memory. It
    copies what enters a conditional if it keeps its axes in another order. There it
    divides and updates in a loop, of views in that order; else in a conditional, which
    divides where the update reads. Where a GPU selects, sums wait for the norm, unless
    they are reduced: it would hold all results.

    Zeros are left of the sums, whose memory is free until then. A lone TPU leaves sums
    as they are, which needs less, unless it divided them in place or they are wider
    than parameters.

    Args:
      update: of the inner optimizer.
      sums: of gradients.
      params: the parameters.
      layout: of the sums.
      is_alone: whether there is one device.
      window: how the layers of the window run, if that is in the same program.
    """
    operations = {*_operations(update)}
    reduces, gathers = bool(layout.leading_axes), layout.gathers(params)
    multiplies, branches = _MULTIPLIES in operations, "cond" in operations
    narrow = _narrows(sums, params)
    selects = reduces or gathers or multiplies
    if window:
        selects = selects or narrow == branches or narrow and window == "unrolled"
    loops = narrow or branches or not _are_in_row_major_order(params)
    first: First = "norm on a TPU"
    if loops and not selects:
        on_tpu, first = _in_loop_on_a_tpu, "quotients on a TPU"
    else:
        on_tpu = in_selection if selects else in_conditional
        on_tpu = on_tpu if is_alone and not narrow else emptying(on_tpu)
    if multiplies and not reduces and not gathers:
        first = "norm"
    selects = (reduces or multiplies) and not gathers
    default = emptying(in_selection) if selects else _in_loop
    return _by_platform(cpu=_in_loop, tpu=on_tpu, default=default), first


def _by_platform(default: OnlyIf, **ways: OnlyIf) -> OnlyIf:
    own = {name: way for name, way in ways.items() if way is not default}

    def only_if(
        runs: TracedBool, body: Callable[[M, T], T], given: M, carry: T
    ) -> tuple[T, M]:
        if is_concrete(runs):
            return in_conditional(runs, body, given, carry)
        traced_once = jax.jit(body)

        def run(way: OnlyIf) -> Callable[[TracedBool, M, T], tuple[T, M]]:
            return lambda runs, given, carry: way(runs, traced_once, given, carry)

        return platforms.by_platform(
            runs,
            given,
            carry,
            **{name: run(way) for name, way in own.items()},
            default=run(default),
        )

    return only_if


# Where the backward pass adds, reverse-mode derivatives are lost already.
_in_loop = in_loop if BackwardPass.is_supported else in_conditional
_in_loop_on_a_tpu = (
    in_loop_on_a_tpu if BackwardPass.is_supported else emptying(in_conditional)
)


def _narrows(sums: optax.Updates, params: optax.Params) -> bool:
    """Whether any sum has more bits than its parameter."""
    both = zip(*map(jax.tree.leaves, (params, sums)), strict=True)
    return any(p.dtype.itemsize < x.dtype.itemsize for p, x in both)


def _are_in_row_major_order(params: optax.Params) -> bool:
    """Whether a TPU keeps all parameters with their axes in order."""
    return all(is_row_major(x.shape) for x in jax.tree.leaves(params))


_MULTIPLIES = "matrix product"


def _operations(traced: dependence.Traced) -> Iterator[str]:
    """The names of all operations, in called functions too."""
    for x in dependence.opened(traced).eqns:
        is_product = x.primitive is jax.lax.dot_general_p and x.outvars[0].aval.ndim
        yield _MULTIPLIES if is_product else x.primitive.name
        for inner in dependence.functions_in(x):
            yield from _operations(inner)
