"""The loss of twins: gradients in the dtype of their sums, layer by layer.

A twin is an input of zeros that receives the cotangent of a parameter. It has the shape
of the parameter and the dtype of its sum, at least float32; its value is never read.
The loss is evaluated with `stand_in(parameter, twin)` in place of each parameter. Where
a scan takes a parameter layer by layer, also after a cast, a transposition or inside of
`jax.checkpoint`, the scan takes the twin too, so that the gradient of each layer is
made in the scan, in the dtype of the sum.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from optax_tokenaccum._jaxprs import (
    Alone,
    Atom,
    Trace,
    as_jaxpr,
    carry_of,
    changed,
    evaluated,
    is_call,
    is_remat,
    is_scan,
    moved,
    operation,
    output_alone,
    passes_on,
    remat_options,
    scan_options,
    subjaxprs,
)
from optax_tokenaccum._trees import DType, Leaf, Params, Tree, is_concrete, zeros_after

# A twin for each parameter; `None` for one that cannot be differentiated.
TwinArrays = list[jax.Array | None]


def counted(x: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """What `x`, a gradient or a loss, adds to a sum; `num_tokens` is its count.

    Without tokens that is what is finite: 0/0 adds nothing, and a loss that is real
    while its count is 0 is added. A count of -1 is not usable, and adds nothing.
    """
    if is_concrete(num_tokens) and num_tokens > 0:
        return x
    keeps = (num_tokens > 0) | ((num_tokens == 0) & jnp.isfinite(x))
    return jnp.where(keeps, x, zeros_after(jnp.zeros((), x.dtype), num_tokens))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stand_in(
    dtype: DType, value: jax.Array, twin: jax.Array, num_tokens: jax.Array | None
) -> jax.Array:
    """`value`, as a function of `twin`, whose gradient is `counted`, of this dtype."""
    return value


def _stand_in_forward(
    dtype: DType, value: jax.Array, twin: jax.Array, num_tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    return value, num_tokens


def _stand_in_backward(
    dtype: DType, num_tokens: jax.Array | None, cotangent: jax.Array
) -> tuple[None, jax.Array, None]:
    cotangent = cotangent.astype(dtype)
    if num_tokens is not None:
        cotangent = counted(cotangent, num_tokens)
    return None, cotangent, None


stand_in.defvjp(_stand_in_forward, _stand_in_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameter:
    """A parameter that has a twin, or what casts and transpositions made of it."""

    value: Leaf
    leaf: int = field(metadata={"static": True})  # of the parameters
    axes: tuple[int, ...] = field(metadata={"static": True})  # of the twin, in order


class Twins(NamedTuple):
    """The twins of parameters, or of one layer of each."""

    arrays: dict[int, jax.Array]  # by the leaf of the parameters
    layered: set[int]  # the leaves that scans take layer by layer
    num_tokens: jax.Array | None

    def stand_in(self, x: Leaf | Parameter) -> Leaf:
        if not isinstance(x, Parameter):
            return x
        array = jnp.transpose(self.arrays[x.leaf], x.axes)
        if x.leaf in self.layered:
            # So is its cotangent. XLA might choose another layout for the sums in a
            # loop that adds to them, and copy them (FSDP on an H200: 782 -> 958 MB).
            row_by_row = Layout(tuple(range(array.ndim)))
            array = with_layout_constraint(_rounded(array), row_by_row)
        else:
            # Multiply by 1: JAX sees an operation, XLA removes it. Without it,
            # `with_refs` would add the gradient of a lookup to rows of the sum: to
            # wrong rows if a negative index was clamped. Over devices, it would also
            # gather the sum.
            array = array * jnp.ones((), array.dtype)
        return stand_in(array.dtype, x.value, array, self.num_tokens)


def _rounded(x: jax.Array) -> jax.Array:
    """`x`, rounded to its own dtype, which changes nothing.

    XLA's while-loop-all-reduce-code-motion would keep two more buffers of the
    gradient's size (data parallel on an H200: 3586 -> 7248 MB). And JAX cannot add to
    one array both from a scan over it and from another use, unless there is an
    operation in between. In other parameters, it would keep XLA from adding the
    gradient of a lookup into that of a tied embedding (on a CPU 1.24 -> 1.52 of
    gradients alone).
    """
    if jnp.iscomplexobj(x):
        return x * jnp.ones((), x.dtype)
    dtype = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)


# What reads a parameter: an operation, by its name, or a scan that takes layers along
# an axis, by this axis.
Reads = dict[int, set[int | str]]  # by the leaf of the parameters
# Where `of_twins` tells what reads the parameters.
_collected: ContextVar[Reads | None] = ContextVar("collected", default=None)


def traced_with_reads(
    loss: Callable[[TwinArrays], Any], twins: TwinArrays
) -> tuple[ClosedJaxpr, Tree, Reads]:
    """The trace of a loss that calls `of_twins`, its shapes, and what reads twins."""
    reads: Reads = defaultdict(set)
    token = _collected.set(reads)
    try:
        closed, shapes = jax.make_jaxpr(loss, return_shape=True)(twins)
    finally:
        _collected.reset(token)
    return closed, shapes, reads


class Traced:
    """The trace of `f(params, *args)`, to be evaluated with twins of the parameters."""

    def __init__(self, f: Callable[..., Any], params: Params, *args: Any):
        self.closed, shapes = jax.make_jaxpr(f, return_shape=True)(params, *args)
        self.structure = jax.tree.structure(shapes)
        self.inputs = jax.tree.leaves((params, *args))

    def alone(self, output: int) -> Alone:
        closed = self.closed
        return output_alone(closed.jaxpr, closed.consts, self.inputs, output)

    def _with_twins(self, twins: Sequence[Leaf | None]) -> list[Leaf | Parameter]:
        inputs = [*self.inputs]
        for i, twin in enumerate(twins):
            if twin is not None:
                inputs[i] = Parameter(inputs[i], i, tuple(range(jnp.ndim(twin))))
        return inputs

    def axes_of_layers(self, params: Params) -> dict[int, int]:
        """The axes of parameters, by their leaves, along which scans take layers."""
        reads, _ = _reads_of(self.closed, self._with_twins(jax.tree.leaves(params)))
        axes = {i: [x for x in by if isinstance(x, int)] for i, by in reads.items()}
        return {i: min(found) for i, found in axes.items() if found}

    def of_twins(self, twins: TwinArrays, num_tokens: jax.Array | None = None) -> Any:
        """What `f` returned, as a function of twins; `None` is one that has none."""
        inputs = self._with_twins(twins)
        reads, _ = _reads_of(self.closed, inputs)
        if (collected := _collected.get()) is not None:
            collected.update(reads)
        arrays = {i: x for i, x in enumerate(twins) if x is not None}
        layered = {leaf for leaf, found in reads.items() if 0 in found}
        given = Twins(arrays, layered, num_tokens)
        outputs = _evaluate(self.closed, self.closed.consts, inputs, given)
        return self.structure.unflatten(map(given.stand_in, outputs))


def as_array(constant: Leaf) -> Leaf:
    """A constant of a trace as an array of JAX, which traced numbers can index."""
    if isinstance(constant, jax.Array) or not hasattr(constant, "__array__"):
        return constant
    with jax.ensure_compile_time_eval():
        return jax.device_put(constant)


def _evaluate(
    traced: Trace,
    consts: Sequence[Leaf],
    inputs: Sequence[Leaf | Parameter],
    twins: Twins,
) -> list[Leaf | Parameter]:
    """The outputs of a traced function."""
    jaxpr = as_jaxpr(traced)
    constants = zip(jaxpr.constvars, map(as_array, consts), strict=True)
    values: dict[Atom, Leaf] = dict(constants)
    values |= zip(jaxpr.invars, inputs, strict=True)
    differentiable: dict[Atom, Leaf] = {}

    def read(x: Atom) -> Leaf | Parameter:
        return x.val if isinstance(x, Literal) else values[x]

    def array(x: Atom) -> Leaf:
        if not isinstance(read(x), Parameter):
            return read(x)
        if x not in differentiable:
            differentiable[x] = twins.stand_in(values[x])
        return differentiable[x]

    for eqn in jaxpr.eqns:
        given = [*map(read, eqn.invars)]
        knows_twins = any(isinstance(x, Parameter) for x in given)
        knows_twins = knows_twins and (is_scan(eqn) or passes_on(eqn))
        if not knows_twins:  # outside of the operation's context: it may have a mesh
            given = [*map(array, eqn.invars)]
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            if not knows_twins:
                outputs = evaluated(jaxpr, eqn, given)
            elif is_scan(eqn):
                outputs = _scan(eqn, given, array, twins)
            elif is_remat(eqn):
                outputs = _remat(eqn, given, twins)
            elif is_call(eqn):
                [called] = subjaxprs(eqn)
                own = getattr(called, "consts", ())
                outputs = _evaluate(called, own, given, twins)
            else:
                [x] = given
                outputs = [replace(_moved(eqn, x), value=changed(eqn, x.value))]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, jaxpr.outvars)]


def _moved(eqn: JaxprEqn, x: Parameter) -> Parameter:
    return replace(x, axes=moved(eqn, x.axes))


def _remat(
    eqn: JaxprEqn, given: list[Leaf | Parameter], twins: Twins
) -> list[Leaf | Parameter]:
    [called] = subjaxprs(eqn)

    def call(given: list[Leaf], arrays: dict[int, jax.Array]) -> list[Leaf]:
        return _evaluate(called, (), given, twins._replace(arrays=arrays))

    run = jax.checkpoint(call, **remat_options(eqn))
    used = {x.leaf for x in given if isinstance(x, Parameter)}
    return run(given, {i: twins.arrays[i] for i in sorted(used)})


def _scan(
    eqn: JaxprEqn,
    given: list[Leaf | Parameter],
    array: Callable[[Atom], Leaf],
    twins: Twins,
) -> list[Leaf]:
    [body] = subjaxprs(eqn)
    first, last = carry_of(eqn)
    fixed = [*map(array, eqn.invars[:first])]
    carry = [*map(array, eqn.invars[first:last])]
    slices = [
        x if isinstance(x, Parameter) and _read_by(eqn, i, x) == 0 else array(variable)
        for i, (x, variable) in enumerate(zip(given, eqn.invars, strict=True))
        if i >= last
    ]
    leaves = [x.leaf for x in slices if isinstance(x, Parameter)]
    layers = {leaf: twins.arrays[leaf] for leaf in leaves}

    def of_layer(x: Leaf | Parameter) -> Leaf | Parameter:
        if not isinstance(x, Parameter):
            return x
        return replace(x, axes=tuple(axis - 1 for axis in x.axes[1:]))

    def iterate(carry: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
        elements, arrays = given
        own = twins._replace(arrays=arrays)
        inputs = [*fixed, *carry, *map(of_layer, elements)]
        outputs = _evaluate(body, getattr(body, "consts", ()), inputs, own)
        outputs = [*map(own.stand_in, outputs)]
        return outputs[: len(carry)], outputs[len(carry) :]

    options = scan_options(eqn)
    carry, stacks = jax.lax.scan(iterate, carry, (slices, layers), **options)
    return [*carry, *stacks]


def _reads_of(
    traced: Trace, inputs: Sequence[Leaf | Parameter | None]
) -> tuple[Reads, list[Parameter | None]]:
    """What reads each parameter, and the outputs that are parameters."""
    jaxpr, found = as_jaxpr(traced), defaultdict[int, set[int | str]](set)
    pairs = zip(jaxpr.invars, inputs, strict=True)
    known = {x: value if isinstance(value, Parameter) else None for x, value in pairs}

    def read(x: Atom) -> Parameter | None:
        return None if isinstance(x, Literal) else known.get(x)

    for eqn in jaxpr.eqns:
        given = [*map(read, eqn.invars)]
        parameters = {i: x for i, x in enumerate(given) if x is not None}
        if not parameters or not passes_on(eqn):
            for i, x in parameters.items():
                found[x.leaf].add(_read_by(eqn, i, x))
            continue
        if called := subjaxprs(eqn):
            inner, outputs = _reads_of(called[0], given)
            for leaf, reads in inner.items():
                found[leaf] |= reads
        else:
            outputs = [_moved(eqn, x) for x in parameters.values()]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return found, [*map(read, jaxpr.outvars)]


def _read_by(eqn: JaxprEqn, position: int, x: Parameter) -> int | str:
    if not is_scan(eqn):
        return operation(eqn)
    if position < carry_of(eqn)[1]:
        return "a loop that is given all of it"
    options = scan_options(eqn)
    if options["length"] == 0:  # `with_refs` would take a slice of no layers
        return "scan over no layers"
    if options["unroll"] >= options["length"] > 1:
        return "unrolled scan"
    return x.axes[0]
