"""The backward pass that adds each gradient to its sum.

`jax.vjp(...).with_refs` adds gradients to mutable arrays within the backward pass. The
gradient of layers that a scan takes is then added layer by layer, and never exists as a
whole next to the sums. That of a large parameter which a scan is given whole is added
in every iteration. Every other gradient is materialized: it is added as soon as it is
whole. Without such scans, gradients are added after the backward pass.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.jaxprs import TRANSPOSE
from optax_tokenaccum._core.perturbations import (
    FIRST_AXIS,
    IN_LOOP,
    Perturbations,
    PerturbedLoss,
)
from optax_tokenaccum._core.trees import Aux, Gradients, Params, T, TracedBool, Tree

# Below jax 0.11, two gradients of a scan can be swapped when they are added to mutable
# arrays, without an error (fixed in jax commit 5991d42590).
CAN_ADD_IN_PLACE = jax.__version_info__ >= (0, 11)

# Asks `with_refs` for a gradient as a value.
AS_VALUE: Any = jax.ad.GradValue() if hasattr(jax, "ad") else False

# What a backward pass leaves behind: sums, loss_sum, (num_tokens, aux).
AddedGradients = tuple[list[jax.Array], jax.Array, tuple[jax.Array, Aux]]


def zero_perturbations(sums: list[jax.Array], params: list[jax.Array]) -> Perturbations:
    """A perturbation for each parameter that can be differentiated, else `None`."""
    return [
        jnp.zeros_like(x, trees.at_least_float32(x.dtype))
        if trees.is_float(p)
        else None
        for x, p in zip(sums, params, strict=True)
    ]


def add_gradients(
    loss: PerturbedLoss, sums: list[jax.Array], params: Params, is_spread: list[bool]
) -> AddedGradients:
    """Adds the gradients of a micro-batch to the sums.

    Only paths, shapes and dtypes of `params` matter. `is_spread`: whether the first
    axis of a sum is spread over devices.
    """
    perturbations = zero_perturbations(sums, jax.tree.leaves(params))
    evaluate, args, consumers = loss
    leaves = [i for i, x in enumerate(perturbations) if x is not None]
    layered = {i for i in leaves if FIRST_AXIS in consumers[i]}
    # Why gradients are returned, and added after the backward pass. A scan over a sum
    # whose first axis is spread would gather it.
    returned = {i: "its first axis is spread" for i in layered if is_spread[i]}
    for i in leaves:
        if not trees.are_wide(sums[i]):
            returned[i] = f"a {sums[i].dtype} sum is rounded with every addition"
    why_all = _why_after()
    why = {
        i: why_all or returned.get(i) or _why_materialized(consumers[i]) for i in leaves
    }
    report(params, why)
    within = {i for i in leaves if not consumers[i].isdisjoint({FIRST_AXIS, IN_LOOP})}
    if why_all or not within - {*returned}:
        return _add_after(evaluate, args, sums, perturbations)
    # The functions must not hold values: see `PerturbedLoss`.
    like = jax.eval_shape(lambda: params)

    def add_mapped(
        args: Tree, sums: list[jax.Array], perturbations: Perturbations
    ) -> AddedGradients:
        report(like, dict.fromkeys(leaves, "jax.vmap cannot map mutable arrays"))
        return _add_after(evaluate, args, sums, perturbations)

    add_within = functools.partial(_add_within, evaluate, {*returned})
    return _unless_mapped(add_within, add_mapped)(args, sums, perturbations)


def _add_after(
    evaluate: Callable[..., Any],
    args: Tree,
    sums: list[jax.Array],
    perturbations: Perturbations,
) -> AddedGradients:
    """After a backward pass that returns materialized gradients."""
    loss = functools.partial(evaluate, args)
    differentiate = jax.value_and_grad(loss, has_aux=True)
    (value, rest), gradients = differentiate(perturbations)
    pairs = zip(sums, gradients, strict=True)
    added = [x if g is None else add(x, g) for x, g in pairs]
    return added, value, rest


def _add_within(
    evaluate: Callable[..., Any],
    returned: set[int],
    args: Tree,
    sums: list[jax.Array],
    perturbations: Perturbations,
) -> AddedGradients:
    """Within the backward pass.

    `returned` are the parameters whose gradients are returned, and added after it.
    """
    floats = [i for i, x in enumerate(perturbations) if x is not None]
    refs = {i: jax.new_ref(sums[i]) for i in floats if i not in returned}
    loss = functools.partial(evaluate, args)
    # Its type does not know with_refs.
    differentiated: Any = jax.vjp(loss, perturbations, has_aux=True)
    value, vjp, rest = differentiated
    to = [
        x if x is None else refs.get(i, AS_VALUE) for i, x in enumerate(perturbations)
    ]
    [gradients] = vjp.with_refs(to)(jnp.ones_like(value))
    added = [*sums]
    for i in returned:
        added[i] = add(sums[i], gradients[i])
    for i, ref in refs.items():
        added[i] = jax.freeze(ref)
    return added, value, rest


def _why_after() -> str | None:
    """Why all gradients are added after the backward pass, if they must be."""
    if not CAN_ADD_IN_PLACE:
        return "this version of jax is older than 0.11"
    if os.environ.get("OPTAX_TOKENACCUM_ADD_AFTER") == "1":
        return "OPTAX_TOKENACCUM_ADD_AFTER=1 is in the environment"
    return None


def _why_materialized(consumers: set[int | str]) -> str | None:
    """Why a gradient is materialized, unless scans alone read it, in the right way."""
    others = consumers - {FIRST_AXIS, IN_LOOP}
    names = {TRANSPOSE if isinstance(x, int) else x for x in others}
    if not names:
        return None
    return (
        f"not only scans take it, layer by layer or large: {', '.join(sorted(names))}"
    )


# A parameter's shape, and why its gradient is materialized, if it is.
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
    """Tells `whole_gradients` why gradients are materialized.

    `None` is the reason of one that is added layer by layer, or in every iteration.
    """
    found = _reports.get()
    if found is not None:
        named = trees.named_leaves(params)
        for i, reason in reasons.items():
            path, x = named[i]
            found[path] = jnp.shape(x), reason


def _unless_mapped(
    f: Callable[..., T], otherwise: Callable[..., T]
) -> Callable[..., T]:
    """`f`, replaced under `vmap`, which JAX does not have for mutable arrays."""
    mapped = jax.custom_batching.custom_vmap(f)

    @mapped.def_vmap
    def _(axis_size: int, in_batched: list[Any], *args: Any) -> tuple[T, Tree]:
        if not any(jax.tree.leaves(in_batched)):  # as the rule for `jvp` calls it
            outputs = otherwise(*args)
            return outputs, jax.tree.map(lambda _: False, outputs)
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        outputs = jax.vmap(otherwise, tuple(axes), axis_size=axis_size)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped


def zero_if(empties: TracedBool, sums: T) -> T:
    """Zeros if `empties`, in the memory of the sums, else the sums."""
    if trees.is_concrete(empties):
        return trees.unshared_zeros(sums) if empties else sums
    if can_overwrite(sums):
        return at_most_once(empties, trees.unshared_zeros, sums)
    keeps = jnp.logical_not(empties)
    return jax.tree.map(functools.partial(trees.zero_unless, keeps), sums)


def can_overwrite(sums: Gradients) -> bool:
    """Whether the end of a window may run in loops, in the memory of the sums."""
    # Below jax 0.11 the sums are not in mutable arrays, and nothing is gained.
    # XLA compiles a loop over small arrays as one function on a CPU: for 300 of them
    # that takes 20 s, where a conditional takes 1 s.
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(sums)]
    return CAN_ADD_IN_PLACE and max(sizes, default=0) >= 2**14


def at_most_once(runs: TracedBool, body: Callable[[T], T], carry: T) -> T:
    """`body(carry)` if `runs`, else `carry`, in the memory of `carry`."""
    # A loop of zero or one trips, because a GPU copies what a conditional passes on in
    # one branch and replaces in the other. JAX cannot differentiate it in reverse.

    def trip(so_far: tuple[TracedBool, T]) -> tuple[TracedBool, T]:
        runs, carry = so_far
        return runs & False, body(carry)

    so_far = trees.as_returned(trip, (jnp.asarray(runs), carry))
    return jax.lax.while_loop(lambda x: x[0], trip, so_far)[1]


@jax.jit
def add(so_far: jax.Array, x: ArrayLike) -> jax.Array:
    """The sum of both, rounded once to the dtype of `so_far`."""
    wide = trees.at_least_float32(so_far.dtype)
    return (so_far.astype(wide) + jnp.asarray(x).astype(wide)).astype(so_far.dtype)
