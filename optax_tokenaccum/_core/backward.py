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
from optax_tokenaccum._core.layout import Peers
from optax_tokenaccum._core.sums import add as add_to
from optax_tokenaccum._core.sums import add_if, at_least_float32, emptied

# In place of a mutable array: the gradient is returned, not added.
_RETURNED = False

# What JAX raises for operations whose transposition has no rule for mutable arrays, or
# a wrong one: an optimization barrier, or an Explicit mesh that is not set.
_UNSUPPORTED = AssertionError, NotImplementedError, TypeError, ValueError

# A loss of the parameters' leaves, and of what is differentiated but not summed.
LossOfLeaves = Callable[
    [list[jax.Array], list[jax.Array]], tuple[jax.Array, tuple[Any, Any]]
]

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


class Passed(NamedTuple):
    """What a backward pass leaves behind."""

    sums: list[jax.Array]
    loss_sum: jax.Array
    num_tokens: Any  # as the loss returned it
    aux: Any
    gradients: list[jax.Array]  # of what is differentiated, but not summed


def plan(
    loss: LossOfLeaves,
    named: list[tuple[str, jax.Array]],
    others: list[jax.Array],
    sums: list[jax.Array],
    has_whole_first_axes: Callable[[list[jax.Array]], list[bool]],
    usable_tokens: Callable[[Any], jax.Array],
    peers: Peers,
) -> "BackwardPass | Whole":
    """Decides whether gradients are added as they are made.

    A backward pass that adds must not run without tokens, because what was added cannot
    be taken back. Where it must run, all gradients are whole.

    Args:
      loss: `loss(leaves, others) -> (loss_sum, (num_tokens, aux))`.
      named: the parameters, with their paths.
      others: what is differentiated too; these gradients are returned.
      sums: of the parameters' gradients.
      has_whole_first_axes: of sums, whether the first axis is not spread over devices.
      usable_tokens: the number of tokens as a scalar, 0 if it must not count.
      peers: the other devices.
    """
    if not BackwardPass.is_supported:
        return Whole("this version of jax is older than 0.11")
    names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
    is_whole = has_whole_first_axes(sums)
    planned = BackwardPass(
        loss, names, leaves, others, sums, is_whole, usable_tokens, peers
    )
    reason = planned.reason_to_run_always(leaves, others)
    return planned if reason is None else Whole(reason)


class BackwardPass:
    """The loss of one micro-batch, ready to be differentiated; see `plan`."""

    # Below jax 0.11, two gradients of a scan can be swapped when they are added to
    # mutable arrays, without an error (fixed in jax commit 5991d42590).
    is_supported = jax.__version_info__ >= (0, 11)

    def __init__(
        self,
        loss: LossOfLeaves,
        names: list[str],
        leaves: list[jax.Array],
        others: list[jax.Array],
        sums: list[jax.Array],
        is_whole: list[bool],
        usable_tokens: Callable[[Any], jax.Array],
        peers: Peers,
    ):
        self._names, self._usable_tokens, self._peers = names, usable_tokens, peers
        self._reasons: dict[int, str] = {}
        for i, (x, total) in enumerate(zip(leaves, sums, strict=True)):
            if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                continue
            if not _adds_alike(x, total):
                self._reasons[i] = (
                    f"a {jnp.result_type(x)} gradient rounds differently when it is "
                    f"added to a {total.dtype} sum in place"
                )
            elif not is_whole[i]:
                # A scan over an axis that is spread would gather the whole sum.
                self._reasons[i] = "its first axis is spread over devices"
        self._known_tokens: Any = None
        tokens_vary: frozenset[str] = frozenset()

        def traced(leaves: list[jax.Array], others: list[jax.Array]) -> Any:
            nonlocal tokens_vary
            loss_sum, (num_tokens, aux) = loss(leaves, others)
            if trees.is_concrete(num_tokens):
                self._known_tokens, num_tokens = num_tokens, None
            else:
                tokens_vary = trees.varying_axes(num_tokens)
            return num_tokens, loss_sum, aux

        # What the loss closes over becomes an argument: custom_vmap maps only these.
        closed, shape = jax.make_jaxpr(traced, return_shape=True)(leaves, others)
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
            if i < len(leaves)
        }
        self._effects = closed.effects
        of_count = dependence.only(closed, [0])
        self._count_needs_leaves = any(dependence.slice_of(closed, of_count).inputs)
        self._exchanges = any(dependence.exchanges(closed)) or any(
            tokens_vary - trees.varying_axes(x) for x in leaves
        )

    def reason_to_run_always(
        self, leaves: list[jax.Array], others: list[jax.Array]
    ) -> str | None:
        """Why the backward pass must run even for a micro-batch without tokens."""
        if self._effects:
            return "loss_fn has side effects"
        if self._known_tokens is not None:
            return None
        if self._count_needs_leaves:
            return "num_tokens depends on the parameters"
        # A device without tokens would not take part in communication, for which the
        # others would wait forever.
        if self._exchanges or self._communicates_on_some_devices(leaves, others):
            return "devices of a shard_map communicate in the backward pass"
        return None

    def _communicates_on_some_devices(
        self, leaves: list[jax.Array], others: list[jax.Array]
    ) -> bool:
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
        if not self._peers.may_communicate:
            return False
        gradient = jax.grad(self._evaluate, has_aux=True, allow_int=True)
        traced = jax.make_jaxpr(gradient)([*leaves, *others], self._consts)
        return any(dependence.exchanges(traced))

    def add(
        self,
        sums: list[jax.Array],
        is_first: jax.Array,
        leaves: list[jax.Array],
        others: list[jax.Array],
    ) -> Passed:
        """Adds the gradients to `sums`, and nothing for a micro-batch without tokens.

        Without tokens, gradients may be NaN, and the backward pass does not run. Nor
        does the forward pass, unless it is needed for `aux`.
        """
        # JAX caches these functions: they must not refer to values, which would leak.
        without = copy.copy(self)
        del without._consts
        add = _unless_mapped(without._add_within, without._add_after)
        passed = add(sums, is_first, leaves, others, self._consts)
        if self._known_tokens is not None:  # which int32 may not hold
            passed = passed._replace(num_tokens=self._known_tokens)
        return passed

    def _evaluate(self, inputs: list[jax.Array], consts: list[Any]) -> Any:
        """`(loss_sum, (num_tokens, aux))`; no `num_tokens` if the number is known.

        The inputs are the parameters, and what is differentiated besides them.
        """
        outputs = jax.core.eval_jaxpr(self._jaxpr, consts, *inputs)
        num_tokens, loss_sum, aux = jax.tree.unflatten(self._structure, outputs)
        return loss_sum, (num_tokens, aux)

    def _add_within(
        self,
        sums: list[jax.Array],
        is_first: jax.Array,
        leaves: list[jax.Array],
        others: list[jax.Array],
        consts: list[Any],
    ) -> Passed:
        is_float = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
        refs = {i: jax.new_ref(sums[i]) for i, floats in enumerate(is_float) if floats}

        def empty() -> None:
            for i, ref in refs.items():
                ref[...] = jnp.zeros_like(sums[i])

        def add(to: dict[int, Any]) -> Any:
            jax.lax.cond(is_first, empty, lambda: None)
            return self._differentiate(to, list(refs), sums, leaves, others, consts)

        def leave() -> Any:
            jax.lax.cond(is_first, empty, lambda: None)
            nothing = [*map(_zero_like, others)]
            if not jax.tree.leaves(self._aux_shapes):
                return _zero_like(self._loss_shape), self._aux_shapes, nothing
            loss_sum, (_, aux) = self._evaluate([*leaves, *others], consts)
            return loss_sum, aux, nothing

        def add_where_others_have_tokens() -> Any:
            return jax.lax.cond(any_tokens, lambda: add({}), leave)

        # XLA drops the rest of this forward pass, which the count does not need. With
        # a count from inside the conditional, it would have to keep all that the
        # backward pass needs of the forward pass, and could fuse nothing of both.
        _, (num_tokens, _) = self._evaluate([*leaves, *others], consts)
        has_tokens, any_tokens = self._counts(num_tokens)
        if trees.is_concrete(has_tokens):
            loss_sum, aux, gradients = add(refs) if has_tokens else leave()
        else:
            is_of_others = others and any_tokens is not has_tokens
            loss_sum, aux, gradients = jax.lax.cond(
                has_tokens,
                lambda: add(refs),
                add_where_others_have_tokens if is_of_others else leave,
            )
        sums = [jax.freeze(refs[i]) if i in refs else x for i, x in enumerate(sums)]
        return Passed(sums, loss_sum, num_tokens, aux, gradients)

    def _differentiate(
        self,
        to: dict[int, Any],
        trained: list[int],
        sums: list[jax.Array],
        leaves: list[jax.Array],
        others: list[jax.Array],
        consts: list[Any],
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """Adds the gradients whose sums are in `to`.

        Returns the loss, `aux` and the gradients of `others`.
        """
        twins = {i: jnp.asarray(leaves[i]) for i in trained} | {
            i: jnp.zeros_like(leaves[i], sums[i].dtype)
            for i in trained
            if i not in self._reasons and jnp.result_type(leaves[i]) != sums[i].dtype
        }

        def of_twins(twins: dict[int, jax.Array], others: list[jax.Array]) -> Any:
            own = [twins.get(i, jnp.asarray(x)) for i, x in enumerate(leaves)]
            own = [
                x if x.dtype == jnp.result_type(leaf) else _stand_in(leaf, x)
                for x, leaf in zip(own, leaves, strict=True)
            ]
            return self._evaluate([*own, *others], consts)

        vjp: Any = jax.vjp  # its type does not mention `with_refs`
        loss_sum, backward, (_, aux) = vjp(of_twins, twins, others, has_aux=True)
        # JAX fails to add to one array from two inputs of a scan: it raises
        # NotImplementedError for an array that is both scanned over and a constant, and
        # a TypeError about shapes, which might have agreed, for one scanned over twice.
        used_twice = dependence.used_twice(
            backward.jaxpr, [*trained, *[None for _ in others]]
        )
        twice = "one operation of loss_fn reads it twice"
        reasons = dict.fromkeys(used_twice, twice) | self._reasons
        shown = self._changed_before_scan | reasons
        report({self._names[i]: shown[i] for i in sorted(shown)})
        accumulators = {
            i: to[i] if i in to and i not in reasons else _RETURNED for i in trained
        }
        returned = [_RETURNED for _ in others]
        try:
            add = backward.with_refs(accumulators, returned)
            gradients, of_others = add(jnp.ones_like(loss_sum))
        except _UNSUPPORTED as error:
            raise CannotAdd(f"jax cannot add in place: {_summary(error)}") from error
        for i, ref in to.items():
            if accumulators[i] is _RETURNED:
                ref[...] = add_to(ref[...], gradients[i])
        return loss_sum, aux, of_others

    def _add_after(
        self,
        sums: list[jax.Array],
        is_first: jax.Array,
        leaves: list[jax.Array],
        others: list[jax.Array],
        consts: list[Any],
    ) -> Passed:
        """The same with whole gradients, which JAX can map."""
        report(dict.fromkeys(self._names, "jax.vmap cannot map mutable arrays"))
        (loss_sum, (num_tokens, aux)), gradients = jax.value_and_grad(
            self._evaluate, has_aux=True, allow_int=True
        )([*leaves, *others], consts)
        has_tokens, _ = self._counts(num_tokens)
        own, of_others = gradients[: len(leaves)], gradients[len(leaves) :]
        sums = [
            add_if(has_tokens, emptied(x, is_first), g)
            for x, g in zip(sums, own, strict=True)
        ]
        return Passed(sums, loss_sum, num_tokens, aux, of_others)

    def _counts(self, num_tokens: Any) -> tuple[Any, Any]:
        """Whether this device, and whether any device, has tokens."""
        if self._known_tokens is not None:
            has_tokens = bool(np.asarray(self._known_tokens) > 0)
            return has_tokens, has_tokens
        tokens = self._usable_tokens(num_tokens)
        of_all = self._peers.sum(tokens)
        has_tokens = tokens > 0
        return has_tokens, has_tokens if of_all is tokens else of_all > 0


def _zero_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    return trees.as_varying(jnp.zeros(x.shape, x.dtype), trees.varying_axes(x))


def _summary(error: Exception) -> str:
    """The first sentence of an error."""
    return f"{type(error).__name__}: {error}".split(". ")[0].removesuffix(": ")


def _adds_alike(leaf: Any, total: jax.Array) -> bool:
    """Whether adding to `total` itself rounds as `sums.add` does."""
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
