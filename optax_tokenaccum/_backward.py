"""The backward pass that adds each gradient to its sum.

`jax.vjp(...).with_refs` adds gradients to mutable arrays within the backward pass. The
gradient of layers that a scan takes is then added layer by layer, and never exists as a
whole next to the sums. Every other gradient is added as soon as it is whole. Without
such layers, gradients are added after the backward pass if the loss has loops, or if
the compiler may spread the sums over devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import ArrayLike

from optax_tokenaccum._scans import (
    Alone,
    Trace,
    TwinArrays,
    equations,
    exchanges,
    output_alone,
    traced_with_reads,
)
from optax_tokenaccum._trees import (
    Aux,
    DType,
    Leaf,
    Params,
    T,
    TracedBool,
    Tree,
    are_wide,
    as_returned,
    as_varying,
    at_least_float32,
    is_concrete,
    is_float,
    named_leaves,
    varying_axes,
)

# A loss of the twins of parameters -> loss_sum, (num_tokens, aux).
LossOfTwins = Callable[[TwinArrays], tuple[jax.Array, tuple[jax.Array, Aux]]]

# Below jax 0.11, two gradients of a scan can be swapped when they are added to mutable
# arrays, without an error (fixed in jax commit 5991d42590).
CAN_ADD_IN_PLACE = jax.__version_info__ >= (0, 11)


class Passed(NamedTuple):
    """What a backward pass leaves behind."""

    sums: list[jax.Array]
    num_tokens: jax.Array
    loss_sum: jax.Array
    aux: Aux


def twins_of(sums: list[jax.Array], params: list[jax.Array]) -> TwinArrays:
    """A twin for each parameter that can be differentiated, else `None`."""
    return [
        jnp.zeros_like(x, at_least_float32(x.dtype)) if is_float(p) else None
        for x, p in zip(sums, params, strict=True)
    ]


class LossTrace(NamedTuple):
    """A trace of a loss of twins, without the values that the loss closes over.

    These are arguments of its methods, because a `custom_vmap` maps nothing but
    arguments, and because jax keeps in its caches what a traced function holds.
    """

    jaxpr: Jaxpr
    shapes: Tree  # of what the loss returns

    def loss(self, consts: list[Leaf]) -> LossOfTwins:
        def loss(twins: TwinArrays) -> Any:
            inputs = jax.tree.leaves(twins)
            outputs = jax.core.eval_jaxpr(self.jaxpr, consts, *inputs)
            return jax.tree.unflatten(jax.tree.structure(self.shapes), outputs)

        return loss

    def tokens(self, consts: list[Leaf], twins: TwinArrays) -> Alone:
        """The number of tokens, without the rest of the loss."""
        return output_alone(self.jaxpr, consts, jax.tree.leaves(twins), 1)


def add_gradients(
    loss: LossOfTwins,
    sums: list[jax.Array],
    params: Params,
    is_first: TracedBool,
    is_spread: list[bool],
) -> Passed:
    """Adds the gradients of a micro-batch, and nothing if it has no tokens.

    Only paths, shapes and dtypes of `params` matter. If `is_first`, the sums are
    emptied before. A scan over a sum whose first axis is spread over devices
    (`is_spread`) would gather it.
    """
    twins = twins_of(sums, jax.tree.leaves(params))
    closed, shapes, reads = traced_with_reads(loss, twins)
    jaxpr, consts = closed.jaxpr, [*closed.consts]
    if hasattr(jaxpr, "with_consts"):  # newer jax, where it holds them
        jaxpr = jaxpr.with_consts([None] * len(consts))
    trace = LossTrace(jaxpr, shapes)
    leaves = [i for i, x in enumerate(twins) if x is not None]
    layered = {i for i in leaves if 0 in reads[i]}
    # Why gradients are returned, and added after the backward pass.
    whole = {i: "its first axis is spread" for i in layered if is_spread[i]}
    for i in leaves:
        if not are_wide(sums[i]):
            whole[i] = f"a {sums[i].dtype} sum is rounded with every addition"
    why_all = _why_after(loss, closed, trace, twins)
    why = {i: why_all or whole.get(i) or _why_whole(reads[i]) for i in leaves}
    report(params, why)
    has_layers = bool(layered - {*whole})
    are_better_after = not has_layers and _are_better_after(closed, sums)
    if why_all or are_better_after or not {*leaves} - {*whole}:
        return _add_after(trace, consts, sums, twins, is_first)
    # The functions must not hold values: see `LossTrace`.
    like = jax.eval_shape(lambda: params)

    def add_mapped(
        consts: list[Leaf],
        sums: list[jax.Array],
        twins: TwinArrays,
        is_first: TracedBool = False,
    ) -> Passed:
        report(like, dict.fromkeys(leaves, "jax.vmap cannot map mutable arrays"))
        return _add_after(trace, consts, sums, twins, is_first)

    dtypes = {i: jax.tree.leaves(like)[i].dtype for i in whole}
    add_within = functools.partial(_add_within, trace, dtypes, has_layers)
    add = _unless_mapped(add_within, add_mapped)
    empties = () if is_first is False else (jnp.asarray(is_first),)
    return add(consts, sums, twins, *empties)


def _add_after(
    trace: LossTrace,
    consts: list[Leaf],
    sums: list[jax.Array],
    twins: TwinArrays,
    is_first: TracedBool,
) -> Passed:
    """With whole gradients, in a backward pass that always runs."""
    loss = trace.loss(consts)
    (value, (n, aux)), gradients = jax.value_and_grad(loss, has_aux=True)(twins)
    added = [
        x if g is None else add_or_zero(n > 0, emptied(x, is_first), g)
        for x, g in zip(sums, gradients, strict=True)
    ]
    return Passed(added, n, value, aux)


def _add_within(
    trace: LossTrace,
    whole: dict[int, DType],
    has_layers: bool,
    consts: list[Leaf],
    sums: list[jax.Array],
    twins: TwinArrays,
    is_first: TracedBool = False,
) -> Passed:
    """Within the backward pass, which does not run without tokens.

    `whole` has the dtypes of parameters whose gradients are returned.
    """
    loss = trace.loss(consts)
    # With a count from inside the conditional, XLA would have to keep all that the
    # backward pass needs of the forward pass.
    n = trace.tokens(consts, twins).value()
    floats = [i for i, x in enumerate(twins) if x is not None]
    refs = {i: jax.new_ref(sums[i]) for i in floats if i not in whole}

    def empty() -> None:
        if is_first is not False:
            so_far = {i: ref[...] for i, ref in refs.items()}
            # Not `emptied`: a select would need a copy.
            zeros = functools.partial(jax.tree.map, jnp.zeros_like)
            for i, x in at_most_once(is_first, zeros, so_far).items():
                refs[i][...] = x

    # Emptying sums of layers in the conditional costs a GPU a copy (FSDP 791 -> 992
    # MB); emptying others ahead of it costs a TPU memory (bfloat16 893 -> 989 MB).
    if has_layers:
        empty()

    def run() -> tuple[jax.Array, Aux, dict[int, jax.Array]]:
        # Its type does not know with_refs.
        differentiated: Any = jax.vjp(loss, twins, has_aux=True)
        value, vjp, (_, aux) = differentiated
        if not has_layers:
            empty()
        to = [x if x is None else refs.get(i, False) for i, x in enumerate(twins)]
        [gradients] = vjp.with_refs(to)(jnp.ones_like(value))
        # In the dtypes of the parameters, which they had before.
        returned = {i: gradients[i].astype(dtype) for i, dtype in whole.items()}
        return value, aux, returned

    def leave() -> tuple[jax.Array, Aux, dict[int, jax.Array]]:
        value, (_, aux) = trace.shapes
        if jax.tree.leaves(aux):
            _, (_, aux) = loss(twins)
        returned = {i: jnp.zeros_like(sums[i], d) for i, d in whole.items()}
        zero = jnp.zeros(value.shape, value.dtype)
        return as_varying(zero, varying_axes(value)), aux, returned

    if is_concrete(n):
        value, aux, returned = run() if n > 0 else leave()
    else:
        value, aux, returned = jax.lax.cond(n > 0, run, leave)
    added = [*sums]
    for i, g in returned.items():
        added[i] = add(emptied(sums[i], is_first), g)
    for i, ref in refs.items():
        added[i] = jax.freeze(ref)
    return Passed(added, jnp.asarray(n), value, aux)


def _why_after(
    loss: LossOfTwins, closed: ClosedJaxpr, trace: LossTrace, twins: TwinArrays
) -> str | None:
    """Why all gradients are added after the backward pass, if they must be."""
    if not CAN_ADD_IN_PLACE:
        return "this version of jax is older than 0.11"
    if closed.effects:
        return "loss_fn has side effects, which happen without tokens too"
    if any(trace.tokens(closed.consts, twins).needed):
        return "num_tokens depends on the parameters"
    if _would_block(loss, closed, twins):
        return "devices send each other values, also if one of them has no tokens"
    return None


def _are_better_after(traced: ClosedJaxpr, sums: list[jax.Array]) -> bool:
    """Whether gradients without layers are better added after the backward pass.

    Within it, nothing is selected. With a select, a CPU adds bfloat16 gradients in
    twice the time, and a GPU holds more (956 instead of 870 MB). But over devices, the
    conditional keeps XLA from reducing the gradients of a window once, after its loop;
    and with layers along another axis it costs a TPU memory (8215 -> 11274 MB).
    """
    has_loops = any(x.primitive.name in ("scan", "while") for x in equations(traced))
    return has_loops or any(_has_other_axes(jax.typeof(x).sharding.mesh) for x in sums)


def _why_whole(reads: set[int | str]) -> str | None:
    """Why a gradient is whole, unless scans alone read a parameter, layer by layer."""
    names = {"transpose" if isinstance(x, int) else x for x in reads - {0}}
    others = ", ".join(sorted(names))
    return f"not only a scan takes it, layer by layer: {others}" if others else None


# A parameter's shape, and why its gradient is whole, if it is.
Report = tuple[tuple[int, ...], str | None]
# What `whole_gradients` collects while it traces a program, by the path of parameters.
_reports: ContextVar[dict[str, Report] | None] = ContextVar("reports", default=None)


@contextlib.contextmanager
def collected_reports() -> Iterator[dict[str, Report]]:
    found: dict[str, Report] = {}
    token = _reports.set(found)
    try:
        yield found
    finally:
        _reports.reset(token)


def report(params: Params, reasons: Mapping[int, str | None]) -> None:
    """Tells `whole_gradients` why gradients are whole.

    `None` is the reason of a gradient that is added layer by layer.
    """
    found = _reports.get()
    if found is not None:
        named = named_leaves(params)
        for i, reason in reasons.items():
            path, x = named[i]
            found[path] = jnp.shape(x), reason


def _would_block(loss: LossOfTwins, traced: Trace, twins: TwinArrays) -> bool:
    """Whether devices of a `shard_map` around would wait for one without tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return False
    if _has_other_axes(mesh) or any(exchanges(traced)):
        return True
    gradient = jax.make_jaxpr(jax.grad(loss, has_aux=True))(twins)
    return any(exchanges(gradient))


def _has_other_axes(mesh: Any) -> bool:
    """Whether a mesh has axes along which the compiler may spread arrays."""
    left = {*mesh.axis_names} - {*mesh.manual_axes}
    return any(mesh.shape[name] > 1 for name in left)


def _unless_mapped(
    f: Callable[..., T], otherwise: Callable[..., T]
) -> Callable[..., T]:
    """`f`, replaced under `vmap`, which JAX does not have for mutable arrays."""
    mapped = jax.custom_batching.custom_vmap(f)

    @mapped.def_vmap
    def _(axis_size: int, in_batched: list[Any], *args: Any) -> tuple[T, Tree]:
        if not any(jax.tree.leaves(in_batched)):  # in forward mode
            outputs = otherwise(*args)
            return outputs, jax.tree.map(lambda _: False, outputs)
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        outputs = jax.vmap(otherwise, tuple(axes), axis_size=axis_size)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped


def emptied(total: jax.Array, is_first: TracedBool) -> jax.Array:
    """The sum so far: nothing before the first micro-batch of a window."""
    if is_concrete(is_first) and not is_first:
        return total
    return jax.lax.select(is_first, jnp.zeros_like(total), total)


def at_most_once(runs: TracedBool, body: Callable[[T], T], carry: T) -> T:
    """`body(carry)` if `runs`, else `carry`, in the memory of `carry`.

    It is a loop of zero or one trips, because a GPU copies what a conditional passes on
    in one branch and replaces in the other. JAX cannot differentiate it in reverse.
    """

    def trip(so_far: tuple[TracedBool, T]) -> tuple[TracedBool, T]:
        runs, carry = so_far
        return runs & False, body(carry)

    so_far = as_returned(trip, (jnp.asarray(runs), carry))
    return jax.lax.while_loop(lambda x: x[0], trip, so_far)[1]


def add(so_far: jax.Array, x: ArrayLike) -> jax.Array:
    """The sum of both, rounded once to the dtype of `so_far`."""
    wide = at_least_float32(so_far.dtype)
    return (so_far.astype(wide) + jnp.asarray(x).astype(wide)).astype(so_far.dtype)


def add_or_zero(counts: TracedBool, so_far: jax.Array, x: jax.Array) -> jax.Array:
    """`add`, with zeros in the place of `x` unless `counts`.

    Selected, not multiplied by a mask: 0 x NaN is NaN. In a loop, XLA can then reduce
    `x` over devices once, after it. It cannot where a sum is selected.
    """
    return add(so_far, jax.lax.select(counts, x, jnp.zeros_like(x)))
