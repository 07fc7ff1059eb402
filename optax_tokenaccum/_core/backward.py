"""A backward pass that adds each gradient to its sum as soon as it is computed.

`jax.vjp(...).with_refs` adds gradients to mutable arrays within the backward pass. The
gradient of layers that are stacked for a scan is then added layer by layer. Otherwise
it exists as a whole next to the sums, which costs a second buffer of its size.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core import dependence, trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.sums import Kind, at_least_float32

# In place of a mutable array: the gradient is returned, not added.
_RETURNED = False

# What JAX raises for operations whose transposition has no rule for mutable arrays, or
# a wrong one: an optimization barrier, or an Explicit mesh that is not set.
_UNSUPPORTED = AssertionError, NotImplementedError, TypeError, ValueError

# (sums, loss_sum, num_tokens, aux)
Added = tuple[list[jax.Array], jax.Array, Any, Any]

_reasons: ContextVar[dict[str, str] | None] = ContextVar("reasons", default=None)


@contextlib.contextmanager
def collect_reasons() -> Iterator[dict[str, str]]:
    """Collects, from micro-batches that are traced inside the block, whole gradients.

    By the path of each parameter, why its gradient exists as a whole next to its sum.
    """
    collected: dict[str, str] = {}
    token = _reasons.set(collected)
    try:
        yield collected
    finally:
        _reasons.reset(token)


def report(reasons: dict[str, str]) -> None:
    collected = _reasons.get()
    if collected is not None:
        collected |= reasons


class Whole(NamedTuple):
    """Every gradient is added only after it is computed, for this reason."""

    reason: str


class CannotAdd(Exception):
    """JAX cannot differentiate this loss into mutable arrays."""


def plan(
    loss: Callable[[list[Any]], tuple[Any, tuple[Any, Any]]],
    named: list[tuple[str, Any]],
    sums: list[jax.Array],
    kinds: list[Kind],
    usable_tokens: Callable[[Any], jax.Array],
    layout: Layout,
) -> "BackwardPass | Whole":
    """Decides whether gradients are added as they are made.

    A backward pass that adds must not run without tokens, because what was added cannot
    be taken back. Where it must run, all gradients are whole.

    Args:
      loss: `loss(leaves) -> (loss_sum, (num_tokens, aux))`.
      named: the parameters, with their paths.
      sums: of their gradients.
      kinds: how each of these adds up.
      usable_tokens: the number of tokens as a scalar, 0 if it must not count.
      layout: of the sums.
    """
    if not BackwardPass.is_supported:
        return Whole("this version of jax is older than 0.11")
    names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
    planned = BackwardPass(loss, names, leaves, sums, kinds, usable_tokens, layout)
    reason = planned.reason_to_run_always(leaves)
    return planned if reason is None else Whole(reason)


class BackwardPass:
    """The loss of one micro-batch, ready to be differentiated; see `plan`."""

    # Below jax 0.11, two gradients of a scan can be swapped when they are added to
    # mutable arrays, without an error (fixed in jax commit 5991d42590).
    is_supported = jax.__version_info__ >= (0, 11)

    def __init__(
        self,
        loss: Callable[[list[Any]], tuple[Any, tuple[Any, Any]]],
        names: list[str],
        leaves: list[Any],
        sums: list[jax.Array],
        kinds: list[Kind],
        usable_tokens: Callable[[Any], jax.Array],
        layout: Layout,
    ):
        self._names, self._kinds = names, kinds
        self._usable_tokens, self._layout = usable_tokens, layout
        # A scan over an axis that is spread over devices would gather the whole sum.
        is_whole = layout.has_whole_first_axes(sums)
        self._reasons: dict[int, str] = {}
        for i, (x, total, kind) in enumerate(zip(leaves, sums, kinds, strict=True)):
            if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                continue
            if not kind.is_gradient:
                self._reasons[i] = "the gradient is its next value"
            elif not _adds_alike(x, total):
                self._reasons[i] = (
                    f"a {jnp.result_type(x)} gradient rounds differently when it is "
                    f"added to a {total.dtype} sum in place"
                )
            elif not is_whole[i]:
                self._reasons[i] = "its first axis is spread over devices"
        self._known_tokens: Any = None
        tokens_vary: frozenset[str] = frozenset()

        def traced(leaves: list[Any]) -> Any:
            nonlocal tokens_vary
            loss_sum, (num_tokens, aux) = loss(leaves)
            if trees.is_concrete(num_tokens):
                self._known_tokens, num_tokens = num_tokens, None
            else:
                tokens_vary = trees.varying_axes(num_tokens)
            return num_tokens, loss_sum, aux

        # What the loss closes over becomes an argument: custom_vmap maps only these.
        closed, shape = jax.make_jaxpr(traced, return_shape=True)(leaves)
        # On the supported versions of JAX, the jaxpr would keep them too.
        self._consts = [*closed.consts]
        self._jaxpr = closed.jaxpr.with_consts([None] * len(self._consts))
        self._structure = jax.tree.structure(shape)
        _, self._loss_shape, self._aux_shapes = shape
        casts = {
            i: f"the cast to {total.dtype}"
            for i, (x, total) in enumerate(zip(leaves, sums, strict=True))
            if jnp.result_type(x) != total.dtype
        }
        self._changed_before_scan = {
            i: f"{name} changes it before the scan over its layers"
            for i, name in dependence.changed_before_scan(closed, casts).items()
        }
        self._effects = closed.effects
        of_count = dependence.only(closed, [0])
        self._count_needs_leaves = any(dependence.slice_of(closed, of_count).inputs)
        self._exchanges = any(dependence.exchanges(closed)) or any(
            tokens_vary - trees.varying_axes(x) for x in leaves
        )

    def reason_to_run_always(self, leaves: list[Any]) -> str | None:
        """Why the backward pass must run even for a micro-batch without tokens."""
        if self._effects:
            return "loss_fn has side effects"
        if self._known_tokens is not None:
            return None
        if self._count_needs_leaves:
            return "num_tokens depends on the parameters"
        # A device without tokens would not take part in communication, for which the
        # others would wait forever.
        if self._exchanges or self._communicates_on_some_devices(leaves):
            return "devices of a shard_map communicate in the backward pass"
        return None

    def _communicates_on_some_devices(self, leaves: list[Any]) -> bool:
        """Whether devices of a `shard_map` may communicate in the backward pass."""
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.manual_axes:
            return False
        # The compiler may communicate along the other axes, and is free to let devices
        # along the manual ones, of which some have no tokens, wait for each other.
        if any(
            mesh.shape[name] > 1 for name in {*mesh.axis_names} - {*mesh.manual_axes}
        ):
            return True
        if not self._layout.may_communicate:
            return False
        gradient = jax.grad(self._evaluate, has_aux=True, allow_int=True)
        traced = jax.make_jaxpr(gradient)(leaves, self._consts)
        return any(dependence.exchanges(traced))

    def add(
        self, sums: list[jax.Array], is_first: jax.Array, leaves: list[Any]
    ) -> Added:
        """Adds the gradients to `sums`, and nothing for a micro-batch without tokens.

        Without tokens, gradients may be NaN, and the backward pass does not run. Nor
        does the forward pass, unless it is needed for `aux`.
        """
        # JAX caches these functions: they must not refer to values, which would leak.
        without = copy.copy(self)
        del without._consts
        add = _unless_mapped(without._add_within, without._add_after)
        sums, loss_sum, num_tokens, aux = add(sums, is_first, leaves, self._consts)
        if self._known_tokens is not None:  # which int32 may not hold
            num_tokens = self._known_tokens
        return sums, loss_sum, num_tokens, aux

    def _evaluate(self, leaves: list[Any], consts: list[Any]) -> Any:
        """`(loss_sum, (num_tokens, aux))`; no `num_tokens` if the number is known."""
        outputs = jax.core.eval_jaxpr(self._jaxpr, consts, *leaves)
        num_tokens, loss_sum, aux = jax.tree.unflatten(self._structure, outputs)
        return loss_sum, (num_tokens, aux)

    def _add_within(
        self,
        sums: list[jax.Array],
        is_first: jax.Array,
        leaves: list[Any],
        consts: list[Any],
    ) -> Added:
        is_float = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
        refs = {i: jax.new_ref(sums[i]) for i, floats in enumerate(is_float) if floats}
        maxima = {i: x for i, x in refs.items() if not self._kinds[i].is_gradient}

        def empty() -> None:
            for i, ref in refs.items():
                ref[...] = jnp.full_like(sums[i], self._kinds[i].nothing)

        def add(to: dict[int, Any]) -> Any:
            jax.lax.cond(is_first, empty, lambda: None)
            return self._differentiate(to, list(refs), sums, leaves, consts)

        def leave() -> Any:
            jax.lax.cond(is_first, empty, lambda: None)
            if not jax.tree.leaves(self._aux_shapes):
                zero = jnp.zeros((), self._loss_shape.dtype)
                marks = trees.varying_axes(self._loss_shape)
                return trees.as_varying(zero, marks), self._aux_shapes
            loss_sum, (_, aux) = self._evaluate(leaves, consts)
            return loss_sum, aux

        def only_maxima() -> Any:
            return jax.lax.cond(any_tokens, lambda: add(maxima), leave)

        # XLA drops the rest of this forward pass, which the count does not need. With
        # a count from inside the conditional, it would have to keep all that the
        # backward pass needs of the forward pass, and could fuse nothing of both.
        _, (num_tokens, _) = self._evaluate(leaves, consts)
        has_tokens, any_tokens = self._counts(num_tokens)
        if trees.is_concrete(has_tokens):
            loss_sum, aux = add(refs) if has_tokens else leave()
        else:
            others = maxima and any_tokens is not has_tokens
            loss_sum, aux = jax.lax.cond(
                has_tokens, lambda: add(refs), only_maxima if others else leave
            )
        sums = [jax.freeze(refs[i]) if i in refs else x for i, x in enumerate(sums)]
        return sums, loss_sum, num_tokens, aux

    def _differentiate(
        self,
        to: dict[int, Any],
        trained: list[int],
        sums: list[jax.Array],
        leaves: list[Any],
        consts: list[Any],
    ) -> tuple[jax.Array, Any]:
        """Adds the gradients whose sums are in `to`; returns `(loss_sum, aux)`."""
        twins = {i: jnp.asarray(leaves[i]) for i in trained} | {
            i: jnp.zeros_like(leaves[i], sums[i].dtype)
            for i in trained
            if i not in self._reasons and jnp.result_type(leaves[i]) != sums[i].dtype
        }

        def of_twins(twins: dict[int, Any]) -> Any:
            own = [twins.get(i, jnp.asarray(x)) for i, x in enumerate(leaves)]
            own = [
                x if x.dtype == jnp.result_type(leaf) else _stand_in(leaf, x)
                for x, leaf in zip(own, leaves, strict=True)
            ]
            return self._evaluate(own, consts)

        vjp: Any = jax.vjp  # its type does not mention `with_refs`
        loss_sum, backward, (_, aux) = vjp(of_twins, twins, has_aux=True)
        # JAX fails to add to one array from two inputs of a scan: it raises
        # NotImplementedError for an array that is both scanned over and a constant, and
        # a TypeError about shapes, which might have agreed, for one scanned over twice.
        used_twice = dependence.used_twice(backward.jaxpr, trained)
        twice = "one operation of loss_fn reads it twice"
        reasons = dict.fromkeys(used_twice, twice) | self._reasons
        shown = self._changed_before_scan | reasons
        report({self._names[i]: shown[i] for i in sorted(shown)})
        accumulators = {
            i: to[i] if i in to and i not in reasons else _RETURNED for i in trained
        }
        try:
            (gradients,) = backward.with_refs(accumulators)(jnp.ones_like(loss_sum))
        except _UNSUPPORTED as error:
            raise CannotAdd(f"jax cannot add in place: {_summary(error)}") from error
        for i, ref in to.items():
            if accumulators[i] is _RETURNED:
                ref[...] = self._kinds[i].add(ref[...], gradients[i])
        return loss_sum, aux

    def _add_after(
        self,
        sums: list[jax.Array],
        is_first: jax.Array,
        leaves: list[Any],
        consts: list[Any],
    ) -> Added:
        """The same with whole gradients, which JAX can map."""
        report(dict.fromkeys(self._names, "jax.vmap cannot map mutable arrays"))
        (loss_sum, (num_tokens, aux)), gradients = jax.value_and_grad(
            self._evaluate, has_aux=True, allow_int=True
        )(leaves, consts)
        has_tokens, any_tokens = self._counts(num_tokens)
        sums = [
            kind.added(
                kind.emptied(x, is_first),
                g,
                has_tokens if kind.is_gradient else any_tokens,
            )
            for x, g, kind in zip(sums, gradients, self._kinds, strict=True)
        ]
        return sums, loss_sum, num_tokens, aux

    def _counts(self, num_tokens: Any) -> tuple[Any, Any]:
        """Whether this device, and whether any device, has tokens."""
        if self._known_tokens is not None:
            has_tokens = bool(np.asarray(self._known_tokens) > 0)
            return has_tokens, has_tokens
        tokens = self._usable_tokens(num_tokens)
        of_all = self._layout.sum(tokens)
        has_tokens = tokens > 0
        return has_tokens, has_tokens if of_all is tokens else of_all > 0


def _summary(error: Exception) -> str:
    """The first sentence of an error."""
    return f"{type(error).__name__}: {error}".split(". ")[0].removesuffix(": ")


def _adds_alike(leaf: Any, total: jax.Array) -> bool:
    """Whether adding to `total` itself rounds as adding in `Kind.add` does."""
    dtype = jnp.result_type(leaf)
    is_wide = at_least_float32(total.dtype) == total.dtype
    are_alike = jnp.iscomplexobj(leaf) == jnp.iscomplexobj(total)
    return jnp.issubdtype(dtype, jnp.inexact) and is_wide and are_alike


@jax.custom_jvp
def _stand_in(leaf: Any, twin: Any) -> Any:
    """`leaf`, as a function of `twin`, whose gradient then has the dtype of the sum."""
    return leaf


@_stand_in.defjvp
def _(primals: Any, tangents: Any) -> Any:
    leaf, _ = primals
    _, tangent = tangents
    return leaf, tangent.astype(leaf.dtype)


def _unless_mapped(f: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """`f`, replaced under `vmap`, which JAX does not have for mutable arrays.

    Both functions return the same for the same arguments.
    """

    @jax.custom_batching.custom_vmap
    def mapped(*args: Any) -> Any:
        return f(*args)

    @mapped.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        if not any(jax.tree.leaves(in_batched)):
            outputs = otherwise(*args)
            return outputs, jax.tree.map(lambda _: False, outputs)
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        outputs = jax.vmap(otherwise, in_axes, axis_size=axis_size)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped
