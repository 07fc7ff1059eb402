"""Gradients of a loss that are made layer by layer, in the dtype of their sums.

A parameter that is cast or transposed before the scan over its layers, or whose sum has
another dtype, has a gradient that JAX makes as a whole first. If the traced loss is
evaluated again with a stand-in for it, the gradient of each layer goes to the sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from optax_tokenaccum._core import dependence
from optax_tokenaccum._core.dependence import Traced


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StandIn:
    """A parameter, or what casts and transpositions made of it or of one layer.

    Attributes:
      value: what the loss computes with.
      twin: what is differentiated in its place, whose gradient has its own dtype; the
        same values, if it has the dtype of `value`.
      axes: the axes of `twin`, in the order of those of `value`.
      adds: whether the gradient counts, or else is zero; `None` if it always does. One
        for each layer where layers are scanned over.
      is_layer: whether it is a part of the parameter.
    """

    value: jax.Array
    twin: jax.Array
    axes: tuple[int, ...] = field(metadata={"static": True})
    adds: jax.Array | None = None
    is_layer: bool = field(default=False, metadata={"static": True})

    def array(self) -> jax.Array:
        """The value, as a function of the twin."""
        twin = jnp.transpose(self.twin, self.axes)
        is_whole = self.adds is None and not self.is_layer
        if twin.dtype == self.value.dtype and is_whole:
            return twin  # JAX may add its gradient in place without a stand-in
        return stand_in(self.value, twin, self.adds)

    def can_be_scanned(self) -> bool:
        return bool(self.axes) and self.axes[0] == 0

    def scanned(self) -> "StandIn":
        """What a scan over the first axis is given."""
        if self.adds is None:
            return self
        return replace(self, adds=jnp.broadcast_to(self.adds, len(self.value)))

    def element(self) -> "StandIn":
        """What a scan over both gives to its body, which has one axis less."""
        axes = tuple(axis - 1 for axis in self.axes[1:])
        return replace(self, axes=axes, is_layer=True)


Operand = jax.Array | StandIn


@jax.custom_jvp
def stand_in(value: jax.Array, twin: jax.Array, adds: jax.Array | None) -> jax.Array:
    """`value`, as a function of `twin`, whose gradient then has the dtype of `twin`.

    Unless `adds`, the gradient is zero, even where it would be NaN.
    """
    return value


@stand_in.defjvp
def _(
    primals: tuple[jax.Array, jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, jax.Array, jax.Array | None],
) -> tuple[jax.Array, jax.Array]:
    value, _, adds = primals
    _, tangent, _ = tangents
    tangent = _rounded(tangent)
    if adds is not None:
        tangent = jax.lax.select(adds, tangent, jnp.zeros_like(tangent))
    return value, tangent.astype(value.dtype)


def _rounded(x: jax.Array) -> jax.Array:
    """`x`, rounded to its own dtype, which changes nothing.

    But over devices that only the compiler knows, XLA does not recognize a sum over
    devices that is added up in a loop. It would keep two more buffers of the size of
    the gradient, to reduce once after the loop (the pass
    `while-loop-all-reduce-code-motion`).
    """
    if jnp.iscomplexobj(x):
        return x
    dtype = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)


def evaluate(
    traced: Traced, consts: Sequence[jax.Array], args: Sequence[Operand]
) -> list[jax.Array]:
    """The outputs of a traced function, some of whose inputs have stand-ins."""
    if not any(isinstance(x, StandIn) for x in args):
        return jax.core.eval_jaxpr(dependence.opened(traced), consts, *args)
    outputs = _evaluate(traced, consts, args)
    return [x.array() if isinstance(x, StandIn) else x for x in outputs]


def _evaluate(
    traced: Traced, consts: Sequence[jax.Array], args: Sequence[Operand]
) -> list[Operand]:
    jaxpr = dependence.opened(traced)
    known: dict[Any, Operand] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= zip(jaxpr.invars, args, strict=True)
    arrays: dict[Var | Literal, jax.Array] = {}

    def look_up(x: Var | Literal) -> Operand:
        return x.val if isinstance(x, Literal) else known[x]

    def has_stand_in(x: Var | Literal) -> bool:
        return isinstance(look_up(x), StandIn)

    def array(x: Var | Literal) -> jax.Array:
        operand = look_up(x)
        if not isinstance(operand, StandIn):
            return operand
        if x not in arrays:
            arrays[x] = operand.array()
        return arrays[x]

    for x in jaxpr.eqns:
        name, has_any = x.primitive.name, any(map(has_stand_in, x.invars))
        is_known = has_any and (name == "scan" or dependence.passes_on(x))
        if is_known:
            with x.ctx.manager, jax.named_scope(str(x.source_info.name_stack)):
                outputs = _RULES[name](x, look_up, array)
        else:
            outputs = _one(x, array)
        known.update(zip(x.outvars, outputs, strict=True))
    return [*map(look_up, jaxpr.outvars)]


Read = Callable[[Var | Literal], Operand]
ReadArray = Callable[[Var | Literal], jax.Array]


def _one(x: JaxprEqn, array: ReadArray) -> list[Operand]:
    """The outputs of an operation that knows no stand-ins."""
    inputs = [y for y in x.invars if not isinstance(y, Literal)]
    # Older jax, where this is not needed, has no DebugInfo.
    debug_info = core.DebugInfo("loss_fn", "one operation", None, None)
    alone = Jaxpr([], inputs, x.outvars, [x], x.effects, debug_info)
    return [*jax.core.eval_jaxpr(alone, (), *map(array, inputs))]


def _transpose(x: JaxprEqn, look_up: Read, _: ReadArray) -> list[Operand]:
    operand, order = look_up(x.invars[0]), x.params["permutation"]
    assert isinstance(operand, StandIn)
    value = jax.lax.transpose(operand.value, order)
    axes = tuple(operand.axes[i] for i in order)
    return [replace(operand, value=value, axes=axes)]


def _cast(x: JaxprEqn, look_up: Read, _: ReadArray) -> list[Operand]:
    operand = look_up(x.invars[0])
    assert isinstance(operand, StandIn)
    return [replace(operand, value=operand.value.astype(x.params["new_dtype"]))]


def _name(x: JaxprEqn, look_up: Read, _: ReadArray) -> list[Operand]:
    operand = look_up(x.invars[0])
    assert isinstance(operand, StandIn)
    value = checkpoint_name(operand.value, x.params["name"])
    return [replace(operand, value=value)]


def _call(x: JaxprEqn, look_up: Read, _: ReadArray) -> list[Operand]:
    [called] = dependence.functions_in(x)
    args = [*map(look_up, x.invars)]
    if x.primitive.name == "remat2":
        return _remat(called, args, x.params["prevent_cse"], x.params["policy"])
    return _evaluate(called, getattr(called, "consts", ()), args)


def _remat(
    called: Traced,
    args: list[Operand],
    prevent_cse: bool | tuple[bool, ...],
    policy: Callable[..., bool] | None,
) -> list[Operand]:
    """The outputs of a call whose twins, differentiated, are those of its inputs."""
    passed: dict[int, tuple[int, StandIn]] = {}
    if not isinstance(prevent_cse, bool):  # one for each input
        prevent_cse = any(prevent_cse)

    def call(args: list[Operand]) -> list[Operand]:
        index = {id(x.twin): i for i, x in enumerate(args) if isinstance(x, StandIn)}
        outputs = _evaluate(called, (), args)
        for i, x in enumerate(outputs):
            if isinstance(x, StandIn):
                passed[i], outputs[i] = (index[id(x.twin)], x), x.value
        return outputs

    outputs = jax.checkpoint(call, prevent_cse=prevent_cse, policy=policy)(args)
    for i, (source, inner) in passed.items():
        value, given = outputs[i], args[source]
        assert isinstance(given, StandIn) and isinstance(value, jax.Array)
        outputs[i] = replace(inner, value=value, twin=given.twin, adds=given.adds)
    return outputs


def _scan(x: JaxprEqn, look_up: Read, array: ReadArray) -> list[Operand]:
    [body] = dependence.functions_in(x)
    first, last = dependence.carry_of(x)
    before = [*map(array, x.invars[:last])]
    fixed, carry = before[:first], before[first:]
    consts = getattr(body, "consts", ())

    def scanned(y: Var | Literal) -> Operand:
        operand = look_up(y)
        can_be = isinstance(operand, StandIn) and operand.can_be_scanned()
        return operand.scanned() if can_be else array(y)

    def iterate(
        carry: list[jax.Array], elements: list[Operand]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        own = [y.element() if isinstance(y, StandIn) else y for y in elements]
        outputs = evaluate(body, consts, [*fixed, *carry, *own])
        return outputs[: len(carry)], outputs[len(carry) :]

    names = {"length", "reverse", "unroll", "_split_transpose"} & x.params.keys()
    options = {name: x.params[name] for name in names}
    arrays = [*map(scanned, x.invars[last:])]
    carry, stacks = jax.lax.scan(iterate, carry, arrays, **options)
    return [*carry, *stacks]


_RULES = {
    "transpose": _transpose,
    "convert_element_type": _cast,
    "name": _name,
    "scan": _scan,
    **dict.fromkeys(("jit", "closed_call", "remat2"), _call),
}
