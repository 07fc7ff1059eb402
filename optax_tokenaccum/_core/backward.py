"""A backward pass that adds each gradient to its sum as soon as it is computed.

`jax.vjp(...).with_refs` adds gradients to mutable arrays within the backward pass. The
gradient of layers that are stacked for a scan is then added layer by layer. Otherwise
it exists as a whole next to the sums, which costs a second buffer of its size.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.typing import ArrayLike

from optax_tokenaccum._core import dependence, platforms, stand_ins, trees
from optax_tokenaccum._core.contribution import usable_tokens
from optax_tokenaccum._core.layout import Peers
from optax_tokenaccum._core.memory_order import is_row_major
from optax_tokenaccum._core.once import at_most_once
from optax_tokenaccum._core.reports import report, report_layers, report_unrolled
from optax_tokenaccum._core.stand_ins import Operand, StandIn
from optax_tokenaccum._core.sums import add as add_to
from optax_tokenaccum._core.sums import (
    add_if,
    add_or_zero,
    at_least_float32,
    emptied,
)
from optax_tokenaccum._core.trees import DType

# In place of a mutable array: the gradient is returned, not added.
_RETURNED = False

# What JAX raises for operations whose transposition has no rule for mutable arrays, or
# a wrong one: an optimization barrier, or an Explicit mesh that is not set.
_UNSUPPORTED = AssertionError, NotImplementedError, TypeError, ValueError

A = TypeVar("A")
# A loss, how many tokens it is of, and what else was computed.
Returned = tuple[jax.Array, tuple[ArrayLike | None, A]]
# A loss, `aux`, and the gradients that are returned, by their inputs' indices.
Differentiated = tuple[jax.Array, Any, dict[int, jax.Array]]


class CannotAdd(Exception):
    """Every gradient is added only after it is computed, for this reason.

    Or, by the paths of parameters, for the reasons why these gradients are whole.
    """

    def report(self, params: optax.Params) -> None:
        [reason] = self.args
        if isinstance(reason, str):
            reason = {name: reason for name, _ in trees.named_leaves(params)}
        report(reason)


class Given(NamedTuple):
    """The values of a backward pass. JAX caches its functions, which hold none."""

    sums: list[jax.Array]
    inputs: list[jax.Array]  # the parameters
    consts: list[jax.Array]  # what the loss closes over
    is_first: jax.Array | None  # whether to empty the sums; `None` if they are empty


class Passed(NamedTuple):
    """What a backward pass leaves behind."""

    sums: list[jax.Array]
    loss_sum: jax.Array
    num_tokens: ArrayLike | None  # as the loss returned it
    aux: Any


class BackwardPass:
    """The loss of one micro-batch, ready to be differentiated once.

    What was added cannot be taken back: without tokens, a backward pass that adds must
    not run, or must add zeros. Where it can do neither, all gradients are whole.

    Args:
      loss: `loss(params) -> (loss_sum, (num_tokens, aux))`.
      params: the parameters.
      sums: those that the gradients of the parameters will be added to, leaf by leaf;
        only their shapes and dtypes matter.
      is_unsharded: of each sum, whether the first axis is not spread over devices.
      axes: where the first axis of each sum lies in the parameter that a user gave.
      scatters: whether every device adds its part of the gradient of all rows.
      count_dtype: the dtype of the number of tokens.
      peers: the other devices.

    Raises:
      CannotAdd: the backward pass must run even without tokens, or every gradient that
        could be added layer by layer is whole.
    """

    # Below jax 0.11, two gradients of a scan can be swapped when they are added to
    # mutable arrays, without an error (fixed in jax commit 5991d42590).
    is_supported = jax.__version_info__ >= (0, 11)

    def __init__(
        self,
        loss: Callable[[optax.Params], Returned[Any]],
        params: optax.Params,
        sums: list[jax.Array],
        is_unsharded: list[bool],
        axes: list[int],
        scatters: bool,
        count_dtype: DType,
        peers: Peers,
    ):
        if not self.is_supported:
            raise CannotAdd("this version of jax is older than 0.11")
        self._scatters, self._count_dtype, self._peers = scatters, count_dtype, peers
        self._names = [name for name, _ in trees.named_leaves(params)]
        inputs, structure = jax.tree.flatten(params)
        self._known_tokens: ArrayLike | None = None

        def traced(inputs: list[jax.Array]) -> Returned[Any]:
            loss_sum, (num_tokens, aux) = loss(structure.unflatten(inputs))
            if trees.is_concrete(num_tokens):
                self._known_tokens, num_tokens = num_tokens, None
            return loss_sum, (num_tokens, aux)

        # What the loss closes over becomes an argument: custom_vmap maps only these.
        closed, self._shapes = jax.make_jaxpr(traced, return_shape=True)(inputs)
        self._has_aux = bool(jax.tree.leaves(self._shapes[1][1]))
        # On the supported versions of JAX, the jaxpr would keep them too.
        self._given = Given(sums, inputs, [*closed.consts], None)
        self._jaxpr = closed.jaxpr.with_consts([None] * len(closed.consts))
        self._check_can_be_left_out(closed)

        self._floats = [i for i, x in enumerate(inputs) if _is_float(x)]
        # Why gradients are whole; which of them are added after they are computed; and
        # which parameters have stand-ins, for gradients that are made layer by layer.
        self._reasons: dict[int, str] = {}
        self._whole: set[int] = set()
        self._stand_ins: set[int] = set()
        scans = dependence.scans_over(closed)
        tables = dependence.looked_up(closed, range(len(inputs)))
        for i, (x, total) in enumerate(zip(inputs, sums, strict=False)):
            if i in self._floats:
                own = scans.get(i, [])
                self._decide(i, x, total, is_unsharded[i], own, i in tables)
        self._layered = self._stand_ins & {*scans}
        self._has_loops = bool(self._layered) or dependence.are_looped_over(
            closed, range(len(inputs))
        )
        if not self._has_loops:
            report_unrolled()
        layers = [(i, trees.auto_axes(inputs[i])) for i in self._layered]
        report_layers({self._names[i]: (axes[i], auto) for i, auto in layers if auto})
        if self._reasons and not self._layered:
            # Nothing is gained, and a conditional may cost copies.
            raise CannotAdd(self._named(self._reasons))

    def _decide(
        self,
        i: int,
        x: jax.Array,
        total: jax.Array,
        is_unsharded: bool,
        scans: list[dependence.Scan],
        is_table: bool,
    ) -> None:
        """How the gradient of a parameter is added to its sum."""
        dtype = jnp.result_type(x)
        if not _adds_alike(x, total):
            self._reasons[i] = (
                f"a {dtype} gradient rounds differently when it is added to a "
                f"{total.dtype} sum in place"
            )
            self._whole.add(i)
        elif scans and not is_unsharded:
            # A scan over an axis that is spread would gather the whole sum.
            self._reasons[i] = "its first axis is spread over devices"
            self._whole.add(i)
        elif scans and jnp.size(x) > 0:
            is_cast = dtype != total.dtype
            why = [_reason(scan, is_cast or scan.is_moved) for scan in scans]
            for reason in filter(None, why):
                self._reasons[i] = reason
            (self._whole if all(why) else self._stand_ins).add(i)
        elif scans or is_table and trees.auto_axes(x):
            # Over devices, XLA would gather a table whose lookups are added to a spread
            # sum: in a small model, 1.7 times the bytes.
            self._whole.add(i)
        elif dtype != total.dtype:
            self._stand_ins.add(i)

    def _named(self, reasons: dict[int, str]) -> dict[str, str]:
        return {self._names[i]: reasons[i] for i in sorted(reasons)}

    def _check_can_be_left_out(self, closed: ClosedJaxpr) -> None:
        """Raises `CannotAdd` if a micro-batch without tokens must be differentiated."""
        if closed.effects:
            raise CannotAdd("loss_fn has side effects")
        if self._known_tokens is not None:
            return
        if any(dependence.Graph(closed).slice_of([1]).inputs):
            raise CannotAdd("num_tokens depends on the parameters")
        # In a shard_map, a device without tokens would not take part in communication,
        # for which the others would wait forever.
        _, (num_tokens, _) = self._shapes
        axes, params = trees.varying_axes(num_tokens), len(self._names)
        if (
            any(axes - trees.varying_axes(x) for x in self._given.inputs[:params])
            or any(dependence.exchanges(closed))
            or self._communicates_on_some_devices()
        ):
            raise CannotAdd("devices of a shard_map communicate in the backward pass")

    def _communicates_on_some_devices(self) -> bool:
        """Whether devices of a `shard_map` may communicate in the backward pass."""
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.manual_axes:
            return False
        # The compiler may communicate along the other axes, and is free to let devices
        # along the manual ones, of which some have no tokens, wait for each other.
        others = {*mesh.axis_names} - {*mesh.manual_axes}
        if any(mesh.shape[name] > 1 for name in others):
            return True
        if not self._peers.may_communicate:
            return False
        gradient = jax.grad(self._evaluate, has_aux=True, allow_int=True)
        _, inputs, consts, _ = self._given
        return any(dependence.exchanges(jax.make_jaxpr(gradient)(inputs, consts)))

    def add(self, sums: list[jax.Array], is_first: jax.Array | None) -> Passed:
        """Adds the gradients to `sums`, and nothing for a micro-batch without tokens.

        Without tokens, gradients may be NaN: they are not added, and in most programs
        the backward pass does not run, nor the forward pass, unless `aux` needs it.

        Args:
          sums: so far.
          is_first: whether they are emptied; `None` if they are known to be empty.
        """
        given = self._given._replace(sums=sums, is_first=is_first)
        del self._given  # so that its values do not leak into JAX's caches
        passed = _unless_mapped(self._add_in_least_memory, self._add_mapped)(given)
        if self._known_tokens is not None:  # which int32 may not hold
            passed = passed._replace(num_tokens=self._known_tokens)
        return passed

    def _evaluate(
        self, inputs: Sequence[Operand], consts: list[jax.Array]
    ) -> Returned[Any]:
        """The loss; its `num_tokens` is `None` if the number is known."""
        outputs = stand_ins.evaluate(self._jaxpr, consts, inputs)
        return jax.tree.unflatten(jax.tree.structure(self._shapes), outputs)

    def _count(self, given: Given) -> ArrayLike | None:
        """The number of tokens, without the rest of the forward pass.

        `None` if it is known.
        """
        if self._known_tokens is not None:
            return None
        outputs = range(len(self._jaxpr.outvars))
        jaxpr, needed = dce_jaxpr(self._jaxpr, [i == 1 for i in outputs])
        inputs = itertools.compress(given.inputs, needed)
        [num_tokens] = jax.core.eval_jaxpr(jaxpr, given.consts, *inputs)
        return num_tokens

    def _add_in_least_memory(self, given: Given) -> Passed:
        """Adds in the way that needs the least memory, as far as is known.

        In a conditional, the forward pass of a window would also run alone, for `aux`.
        Over devices, XLA may then gather weights in other ways, which need more.

        A lone TPU may copy the sums of layers, more than a whole gradient.

        If no loop reads a parameter, its gradient is one array anyway. Then a TPU needs
        more where sums are emptied ahead, and in a window where gradients are narrower
        than sums; GPUs over which the compiler may spread parameters do where there is
        a conditional. In a window over devices, the compiler adds up the gradients of
        all once, not in every micro-batch, if no conditional keeps it from that and
        sums are not scattered. On a CPU, adding bfloat16 afterwards takes several times
        as long.
        """
        in_window = given.is_first is None
        if self._has_loops:
            if not in_window and _would_copy_on_a_tpu(given, self._layered):
                return platforms.by_platform(
                    given, tpu=self._add_after, default=self._add_within
                )
            has_choice = self._has_aux and self._layered and self._known_tokens is None
            selects = in_window and has_choice
            return (self._add_selected if selects else self._add_within)(given)
        may_spread = any(map(trees.auto_axes, given.inputs))
        after = may_spread and not (in_window and self._scatters)
        if in_window and not after and not self._stand_ins:  # here for casts alone
            return self._add_within(given)
        return platforms.by_platform(
            given,
            cpu=self._add_within,
            tpu=self._add_after,
            default=self._add_after if after else self._add_within,
        )

    def _add_within(self, given: Given) -> Passed:
        """Does not run the backward pass without tokens."""
        sums = _emptied(given)
        returned = [*self._whole]
        refs = {i: jax.new_ref(sums[i]) for i in self._floats if i not in returned}

        def add(to: dict[int, jax.Ref]) -> Differentiated:
            return self._differentiate(to, returned, given)

        def leave() -> Differentiated:
            loss_sum, (_, aux) = self._shapes
            if self._has_aux:
                loss_sum, (_, aux) = self._evaluate(given.inputs, given.consts)
            else:
                loss_sum = _zero_like(loss_sum)
            return loss_sum, aux, {i: jnp.zeros_like(given.inputs[i]) for i in returned}

        # With a count from inside the conditional, XLA would have to keep all that the
        # backward pass needs of the forward pass, and could fuse nothing of both.
        num_tokens = self._count(given)
        has_tokens = self._has_tokens(num_tokens)
        if trees.is_concrete(has_tokens):
            differentiated = add(refs) if has_tokens else leave()
        else:
            differentiated = jax.lax.cond(has_tokens, lambda: add(refs), leave)
        # Outside of the conditional, which would lay out the sum like the gradient.
        return _passed(sums, refs, num_tokens, has_tokens, differentiated)

    def _add_selected(self, given: Given) -> Passed:
        """Always runs the backward pass. Without tokens it adds zeros to each layer."""
        num_tokens = self._count(given)
        has_tokens = self._has_tokens(num_tokens)
        sums = _emptied(given)
        refs = {i: jax.new_ref(sums[i]) for i in self._layered}
        returned = [i for i in self._floats if i not in refs]
        adds = jnp.asarray(has_tokens)
        differentiated = self._differentiate(refs, returned, given, adds)
        return _passed(sums, refs, num_tokens, has_tokens, differentiated)

    def _differentiate(
        self,
        to: dict[int, jax.Ref],
        returned: list[int],
        given: Given,
        adds: jax.Array | None = None,
    ) -> Differentiated:
        """Adds the gradients whose sums are in `to`, and computes the `returned`.

        Unless `adds`, zeros are added; all of `to` must have stand-ins then.
        """
        sums, inputs, consts, _ = given
        twins = {i: jnp.asarray(inputs[i]) for i in self._floats}
        own_stand_ins = self._stand_ins.difference(returned)
        casts = [i for i in own_stand_ins if twins[i].dtype != sums[i].dtype]
        twins |= {i: jnp.zeros_like(sums[i]) for i in casts}

        def of_twins(twins: dict[int, jax.Array]) -> Returned[Any]:
            own: list[Operand] = [*map(jnp.asarray, inputs)]
            for i, x in twins.items():
                own[i] = x
                if i in own_stand_ins:
                    own[i] = StandIn(inputs[i], x, tuple(range(x.ndim)), adds)
            return self._evaluate(own, consts)

        vjp: Any = jax.vjp  # its type does not mention `with_refs`
        loss_sum, backward, (_, aux) = vjp(of_twins, twins, has_aux=True)
        # JAX fails to add to one array from two inputs of a scan: it raises
        # NotImplementedError for an array that is both scanned over and a constant, and
        # a TypeError about shapes, which might have agreed, for one scanned over twice.
        summed = [i if i < len(sums) else None for i in twins]
        used_twice = dependence.used_twice(backward.jaxpr, summed)
        twice = "one operation of loss_fn reads it twice"
        reasons = dict.fromkeys(used_twice - self._whole, twice) | self._reasons
        report(self._named(reasons))
        refs = {i: ref for i, ref in to.items() if i not in used_twice}
        try:
            add = backward.with_refs({i: refs.get(i, _RETURNED) for i in twins})
            [gradients] = add(jnp.ones_like(loss_sum))
        except _UNSUPPORTED as error:
            raise CannotAdd(f"jax cannot add in place: {_summary(error)}") from error
        for i, ref in to.items():
            if i not in refs:
                ref[...] = add_to(ref[...], gradients[i])
        # A `custom_vjp` may return another dtype than that of its input.
        dtypes = {i: jnp.result_type(inputs[i]) for i in returned}
        return loss_sum, aux, {i: gradients[i].astype(dtypes[i]) for i in returned}

    def _add_after(self, given: Given) -> Passed:
        """The same with whole gradients, in a backward pass that always runs."""
        (loss_sum, (num_tokens, aux)), gradients = jax.value_and_grad(
            self._evaluate, has_aux=True, allow_int=True
        )(given.inputs, given.consts)
        has_tokens = self._has_tokens(num_tokens)
        is_first = False if given.is_first is None else given.is_first
        sums = [
            add_or_zero(has_tokens, emptied(x, is_first), g)
            for x, g in zip(given.sums, gradients, strict=True)
        ]
        return Passed(sums, loss_sum, num_tokens, aux)

    def _add_mapped(self, given: Given) -> Passed:
        """The same under `jax.vmap`."""
        report(dict.fromkeys(self._names, "jax.vmap cannot map mutable arrays"))
        return self._add_after(given)

    def _has_tokens(self, num_tokens: ArrayLike | None) -> trees.TracedBool:
        """Whether this device has tokens."""
        if self._known_tokens is not None:
            return bool(np.asarray(self._known_tokens) > 0)
        return usable_tokens(num_tokens, self._count_dtype) > 0


def _emptied(given: Given) -> list[jax.Array]:
    """The sums before the backward pass."""
    if given.is_first is None:
        return [*given.sums]

    def empty(sums: list[jax.Array]) -> list[jax.Array]:
        return [*map(jnp.zeros_like, sums)]

    return at_most_once(given.is_first, empty, given.sums)


def _passed(
    sums: list[jax.Array],
    refs: dict[int, jax.Ref],
    num_tokens: ArrayLike | None,
    has_tokens: trees.TracedBool,
    differentiated: Differentiated,
) -> Passed:
    """What is left when the gradients that were returned are added too."""
    loss_sum, aux, gradients = differentiated
    sums = [
        add_if(has_tokens, x, gradients[i]) if i in gradients else x
        for i, x in enumerate(sums)
    ]
    for i, ref in refs.items():
        sums[i] = jax.freeze(ref)
    return Passed(sums, loss_sum, num_tokens, aux)


def _zero_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    return trees.as_varying(jnp.zeros(x.shape, x.dtype), trees.varying_axes(x))


def _reason(scan: dependence.Scan, needs_stand_in: bool) -> str | None:
    """Why a scan makes a gradient whole, if it does."""
    if name := scan.changed_by or "transpose" * (scan.axis > 0):
        return f"{name} changes it before the scan over its layers"
    if scan.is_unrolled:
        return "the scan over its layers is unrolled"
    if scan.within and needs_stand_in:
        return f"the scan over its layers is in a {scan.within}"
    return None


def _summary(error: Exception) -> str:
    """The first sentence of an error."""
    return f"{type(error).__name__}: {error}".split(". ")[0].removesuffix(": ")


def _is_float(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _would_copy_on_a_tpu(given: Given, layered: Iterable[int]) -> bool:
    """Whether a lone TPU would copy more than a whole gradient.

    To add to layers in a loop, it copies each sum whose axes it keeps in another order,
    and copies it back.
    """
    if any(map(trees.auto_axes, given.inputs)):
        return False
    sums = [given.sums[i] for i in layered]
    copied = sum(2 * x.nbytes for x in sums if not is_row_major(x.shape))
    return copied > sum(x.nbytes for x in given.inputs[: len(given.sums)])


def _adds_alike(leaf: ArrayLike, total: jax.Array) -> bool:
    """Whether adding to `total` itself rounds as `sums.add` does."""
    is_wide = at_least_float32(total.dtype) == total.dtype
    return is_wide and jnp.iscomplexobj(leaf) == jnp.iscomplexobj(total)


def _unless_mapped(
    f: Callable[[Given], Passed], otherwise: Callable[[Given], Passed]
) -> Callable[[Given], Passed]:
    """`f`, replaced under `vmap`, which JAX does not have for mutable arrays.

    Both functions return the same for the same arguments.
    """
    mapped = jax.custom_batching.custom_vmap(f)

    @mapped.def_vmap
    def _(
        axis_size: int, in_batched: list[Given], given: Given
    ) -> tuple[Passed, Passed]:
        if not any(jax.tree.leaves(in_batched)):
            outputs = otherwise(given)
            return outputs, jax.tree.map(lambda _: False, outputs)
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched[0])
        outputs = jax.vmap(otherwise, (in_axes,), axis_size=axis_size)(given)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped
