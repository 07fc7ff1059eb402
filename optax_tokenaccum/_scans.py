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
from collections.abc import Callable, Iterator, Sequence
from operator import eq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from optax_tokenaccum._trees import Leaf, Params

Atom = Var | Literal
Trace = Jaxpr | ClosedJaxpr
# A twin for each parameter; `None` for one that cannot be differentiated.
TwinArrays = list[jax.Array | None]


@jax.custom_jvp
def stand_in(value: jax.Array, twin: jax.Array, counts: jax.Array | None) -> jax.Array:
    """`value`, as a function of `twin`, whose gradient has the dtype of `twin`.

    Unless `counts`, the gradient is zero, even where it would be NaN.
    """
    return value


@stand_in.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    value, _, counts = primals
    _, tangent, _ = tangents
    if counts is not None:
        tangent = jax.lax.select(counts, tangent, jnp.zeros_like(tangent))
    return value, tangent.astype(value.dtype)


class Twin(NamedTuple):
    """That a variable is a parameter, or what casts and transpositions made of it."""

    leaf: int  # of the parameters
    axes: tuple[int, ...]  # of the twin, in the order of the variable's


Marks = list[Twin | None]


class Twins(NamedTuple):
    """The twins of parameters, or of one layer of each."""

    arrays: dict[int, jax.Array]  # by the leaf of the parameters
    layered: set[int]  # the leaves that scans take layer by layer
    counts: jax.Array | None

    def stand_in(self, value: jax.Array, twin: Twin | None) -> jax.Array:
        if twin is None:
            return value
        array = jnp.transpose(self.arrays[twin.leaf], twin.axes)
        if twin.leaf in self.layered:
            array = _rounded(array)
        else:
            # An operation for JAX, and none for XLA. Without one, `with_refs` would add
            # the gradient of a lookup to rows of the sum: to wrong ones where a
            # negative index was clamped, and over devices it would gather the sum.
            array = array * jnp.ones((), array.dtype)
        return stand_in(value, array, self.counts)


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


class Alone(NamedTuple):
    """One output of a traced function, by dead-code elimination."""

    jaxpr: Jaxpr
    consts: Sequence[Leaf]
    args: Sequence[Leaf]
    needed: list[bool]  # of the inputs

    def value(self) -> jax.Array:
        [value] = jax.core.eval_jaxpr(self.jaxpr, self.consts, *self.args)
        return value


class Traced:
    """The trace of `f(params, *args)`, to be evaluated with twins of the parameters."""

    def __init__(self, f: Callable[..., Any], params: Params, *args: Any):
        self.closed, shapes = jax.make_jaxpr(f, return_shape=True)(params, *args)
        self.structure = jax.tree.structure(shapes)
        self.inputs = jax.tree.leaves((params, *args))

    def alone(self, output: int) -> Alone:
        closed = self.closed
        return output_alone(closed.jaxpr, closed.consts, self.inputs, output)

    def axes_of_layers(self, params: Params) -> dict[int, int]:
        """The axes of parameters, by their leaves, along which scans take layers."""
        marks: Marks = [None] * len(self.inputs)
        for i, x in enumerate(jax.tree.leaves(params)):
            marks[i] = Twin(i, tuple(range(jnp.ndim(x))))
        return _scanned(self.closed, marks)[0]

    def of_twins(self, twins: TwinArrays, counts: jax.Array | None = None) -> Any:
        """What `f` returned, as a function of twins; `None` is one that has none."""
        arrays = {i: x for i, x in enumerate(twins) if x is not None}
        marks: Marks = [None] * len(self.inputs)
        for i, x in arrays.items():
            marks[i] = Twin(i, tuple(range(x.ndim)))
        axes, _ = _scanned(self.closed, marks)
        layered = {leaf for leaf, axis in axes.items() if axis == 0}
        given = Twins(arrays, layered, counts)
        consts = self.closed.consts
        outputs, marks = _evaluate(self.closed, consts, self.inputs, marks, given)
        return self.structure.unflatten(map(given.stand_in, outputs, marks))


def without_rules(
    jaxpr: Jaxpr, consts: Sequence[Leaf], inputs: Sequence[Leaf]
) -> ClosedJaxpr:
    """A traced function without the calls that have derivatives of their own.

    Dead-code elimination knows what no output needs in any other call. The inputs of
    the result are the constants and the inputs.
    """

    def evaluate(
        jaxpr: Jaxpr, consts: Sequence[Leaf], args: Sequence[Leaf]
    ) -> list[Leaf]:
        values = dict(zip(jaxpr.invars, args, strict=True))
        values |= zip(jaxpr.constvars, consts, strict=True)

        def read(x: Atom) -> Leaf:
            return x.val if isinstance(x, Literal) else values[x]

        for eqn in jaxpr.eqns:
            called = functions_in(eqn)
            if _has_rules(eqn) and len(opened(called[0]).invars) == len(eqn.invars):
                own = getattr(called[0], "consts", ())
                args = [*map(read, eqn.invars)]
                outputs = evaluate(opened(called[0]), own, args)
            else:
                outputs = _bind(jaxpr, eqn, [*map(read, eqn.invars)])
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [*map(read, jaxpr.outvars)]

    return jax.make_jaxpr(functools.partial(evaluate, jaxpr))(consts, inputs)


def _has_rules(eqn: JaxprEqn) -> bool:
    """Whether an operation is a call that has derivatives of its own, or holds one."""
    if eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
        return bool(functions_in(eqn))
    called = functions_in(eqn) if eqn.primitive.name == "jit" else []
    return any(map(_has_rules, (x for f in called for x in opened(f).eqns)))


def output_alone(
    jaxpr: Jaxpr, consts: Sequence[Leaf], inputs: Sequence[Leaf], output: int
) -> Alone:
    alone, needed = _alone(jaxpr, output)
    given = inputs
    if any(needed) and any(map(_has_rules, jaxpr.eqns)):
        given = [*consts, *inputs]
        closed = without_rules(jaxpr, consts, inputs)
        alone, needed = _alone(closed.jaxpr, output)
        consts = closed.consts
    args = [x for x, is_needed in zip(given, needed, strict=True) if is_needed]
    return Alone(alone, consts, args, needed[len(given) - len(inputs) :])


def _alone(jaxpr: Jaxpr, output: int) -> tuple[Jaxpr, list[bool]]:
    # A print is an effect, which dead-code elimination would keep.
    eqns = [eqn for eqn in jaxpr.eqns if eqn.outvars]
    effects = {x for eqn in eqns for x in eqn.effects}
    jaxpr = jaxpr.replace(eqns=eqns, effects=effects)
    return dce_jaxpr(jaxpr, [i == output for i in range(len(jaxpr.outvars))])


def _evaluate(
    traced: Trace,
    consts: Sequence[Leaf],
    args: Sequence[Leaf],
    given: Sequence[Twin | None],
    twins: Twins,
) -> tuple[list[Leaf], Marks]:
    """The outputs of a traced function; which of them are parameters with twins."""
    jaxpr = opened(traced)
    values: dict[Atom, Leaf] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    marks: dict[Atom, Twin | None] = dict(zip(jaxpr.invars, given, strict=True))
    differentiable: dict[Atom, jax.Array] = {}

    def read(x: Atom) -> Leaf:
        return x.val if isinstance(x, Literal) else values[x]

    def mark(x: Atom) -> Twin | None:
        return None if isinstance(x, Literal) else marks.get(x)

    def array(x: Atom) -> Leaf:
        if mark(x) is None:
            return read(x)
        if x not in differentiable:
            differentiable[x] = twins.stand_in(values[x], marks[x])
        return differentiable[x]

    for eqn in jaxpr.eqns:
        name, of = eqn.primitive.name, [*map(mark, eqn.invars)]
        out: Sequence[Twin | None] = [None] * len(eqn.outvars)
        is_plain = not any(of) or not (name == "scan" or _passes_on(eqn))
        # Outside of the operation's context, which may have another mesh.
        inputs = [*map(array, eqn.invars)] if is_plain else []
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            if is_plain:
                outputs = _bind(jaxpr, eqn, inputs)
            elif name == "scan":
                outputs = _scan(eqn, read, array, of, twins)
            elif name == "remat2":
                outputs, out = _remat(eqn, [*map(read, eqn.invars)], of, twins)
            elif name in ("jit", "closed_call"):
                [called] = functions_in(eqn)
                inner, own = getattr(called, "consts", ()), [*map(read, eqn.invars)]
                outputs, out = _evaluate(called, inner, own, of, twins)
            else:
                [x] = map(read, eqn.invars)
                outputs, out = [_change(eqn, x)], [_moved(eqn, of[0])]
        values.update(zip(eqn.outvars, outputs, strict=True))
        marks.update(zip(eqn.outvars, out, strict=True))
    return [*map(read, jaxpr.outvars)], [*map(mark, jaxpr.outvars)]


def _bind(jaxpr: Jaxpr, eqn: JaxprEqn, given: list[Leaf]) -> list[Leaf]:
    """The outputs of an operation of `jaxpr` that knows no twins."""
    variables = {
        x: value
        for x, value in zip(eqn.invars, given, strict=True)
        if not isinstance(x, Literal)
    }
    alone = jaxpr.replace(
        constvars=[],
        invars=[*variables],
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
    )
    return [*jax.core.eval_jaxpr(alone, (), *variables.values())]


def _passes_on(eqn: JaxprEqn) -> bool:
    """Whether a twin can stand for what an operation makes of a parameter.

    A cast to fewer bits is one: its gradient is cast to more bits, and loses none.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        old, new = (_aval(x).dtype for x in (*eqn.invars, *eqn.outvars))
        are_floats = all(jnp.issubdtype(x, jnp.floating) for x in (old, new))
        if params["sharding"] or not are_floats:
            return False
        return old == new or jnp.finfo(new).bits < jnp.finfo(old).bits
    if name == "jit":
        given = [*params["in_shardings"], *params["out_shardings"]]
        return not any(isinstance(x, jax.sharding.Sharding) for x in given)
    return name in ("transpose", "name", "closed_call", "remat2")


def _change(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    if eqn.primitive.name == "transpose":
        return jax.lax.transpose(x, eqn.params["permutation"])
    if eqn.primitive.name == "name":
        return checkpoint_name(x, eqn.params["name"])
    return x.astype(eqn.params["new_dtype"])


def _moved(eqn: JaxprEqn, twin: Twin | None) -> Twin | None:
    if twin is None:
        return None
    order = eqn.params.get("permutation", range(len(twin.axes)))
    return twin._replace(axes=tuple(twin.axes[i] for i in order))


def _remat(
    eqn: JaxprEqn, args: list[Leaf], of: Marks, twins: Twins
) -> tuple[list[Leaf], Marks]:
    [called] = functions_in(eqn)
    prevent_cse = eqn.params["prevent_cse"]
    if not isinstance(prevent_cse, bool):  # one for each input
        prevent_cse = any(prevent_cse)
    passed: Marks = []

    def call(args: list[Leaf], arrays: dict[int, jax.Array]) -> list[Leaf]:
        own = twins._replace(arrays=arrays)
        outputs, passed[:] = _evaluate(called, (), args, of, own)
        return outputs

    run = jax.checkpoint(call, prevent_cse=prevent_cse, policy=eqn.params["policy"])
    used = {x.leaf for x in of if x is not None}
    return run(args, {i: twins.arrays[i] for i in sorted(used)}), passed


def _scan(
    eqn: JaxprEqn,
    read: Callable[[Atom], Leaf],
    array: Callable[[Atom], Leaf],
    of: Marks,
    twins: Twins,
) -> list[Leaf]:
    [body] = functions_in(eqn)
    first, last = carry_of(eqn)
    fixed, carry = (
        [*map(array, eqn.invars[:first])],
        [*map(array, eqn.invars[first:last])],
    )
    marks = [x if x and x.axes[0] == 0 else None for x in _layers(eqn, of)]
    own = zip(eqn.invars[last:], marks, strict=True)
    slices = [array(x) if twin is None else read(x) for x, twin in own]
    layers = {x.leaf: twins.arrays[x.leaf] for x in marks if x is not None}
    of_layers = [
        x and x._replace(axes=tuple(axis - 1 for axis in x.axes[1:])) for x in marks
    ]

    def iterate(carry: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
        elements, arrays = given
        own = twins._replace(arrays=arrays)
        args = [*fixed, *carry, *elements]
        given = [*[None] * last, *of_layers]
        outputs, out = _evaluate(body, getattr(body, "consts", ()), args, given, own)
        outputs = [*map(own.stand_in, outputs, out)]
        return outputs[: len(carry)], outputs[len(carry) :]

    names = {"length", "reverse", "unroll", "_split_transpose"} & eqn.params.keys()
    options = {name: eqn.params[name] for name in names}
    carry, stacks = jax.lax.scan(iterate, carry, (slices, layers), **options)
    return [*carry, *stacks]


def _layers(eqn: JaxprEqn, of: Marks) -> Marks:
    """Which arrays a scan takes layer by layer; none if it is unrolled."""
    _, last = carry_of(eqn)
    is_unrolled = eqn.params["unroll"] >= eqn.params["length"] > 1
    return [None if is_unrolled else x for x in of[last:]]


def _scanned(traced: Trace, given: Marks) -> tuple[dict[int, int], Marks]:
    """Along which axes scans take layers of each leaf; the marks of the outputs."""
    jaxpr = opened(traced)
    axes: dict[int, int] = {}
    marks: dict[Atom, Twin | None] = dict(zip(jaxpr.invars, given, strict=True))

    def mark(x: Atom) -> Twin | None:
        return None if isinstance(x, Literal) else marks.get(x)

    for eqn in jaxpr.eqns:
        of, found = [*map(mark, eqn.invars)], {}
        if not any(of):
            continue
        if eqn.primitive.name == "scan":
            found = {x.leaf: x.axes[0] for x in _layers(eqn, of) if x is not None}
        elif _passes_on(eqn):
            called = functions_in(eqn)
            found, out = (
                _scanned(called[0], of) if called else ({}, [_moved(eqn, of[0])])
            )
            marks.update(zip(eqn.outvars, out, strict=True))
        for leaf, axis in found.items():
            axes[leaf] = min(axis, axes.get(leaf, axis))
    return axes, [*map(mark, jaxpr.outvars)]


def carry_of(eqn: JaxprEqn) -> tuple[int, int]:
    """The first input of a scan that is in the carry, and the first after it."""
    # Sliced inputs and stacked outputs have one axis less in the body. The parameters
    # of the equation say which these are too, but differ between versions of jax.
    [body] = map(opened, functions_in(eqn))
    last = sum(map(eq, map(_rank, eqn.invars), map(_rank, body.invars)))
    return last - sum(map(eq, map(_rank, eqn.outvars), map(_rank, body.outvars))), last


class Use(NamedTuple):
    """That a variable is a twin, or a parameter in whose place it stood."""

    leaf: int
    has_stood: bool


def uses_of(traced: Trace, inputs: Sequence[Use | None]) -> dict[int, set[str]]:
    """What reads the parameters, in a trace of a loss of twins.

    It is the name of an operation, or `LAYERS` for a scan that takes a twin itself,
    layer by layer.
    """
    jaxpr, found = opened(traced), defaultdict[int, set[str]](set)
    uses = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        taken = [None if isinstance(x, Literal) else uses.get(x) for x in eqn.invars]
        name, called = eqn.primitive.name, functions_in(eqn)
        if not any(taken):
            continue
        if name != "scan" and not _has_rules(eqn) and len(called) == 1:
            if len(opened(called[0]).invars) == len(taken):
                for leaf, names in uses_of(called[0], taken).items():
                    found[leaf] |= names
                continue
        for i, use in enumerate(taken):
            if use is None:
                continue
            if name == "scan":
                found[use.leaf].add(_name_of_scan(eqn, i, use.has_stood))
            elif use.has_stood:
                found[use.leaf].add(name)
            else:  # what a twin goes through, up to its `stand_in`
                uses[eqn.outvars[0]] = Use(use.leaf, name == "custom_jvp_call")
    return found


LAYERS = "layers"


def _name_of_scan(eqn: JaxprEqn, position: int, has_stood: bool) -> str:
    if position < carry_of(eqn)[1]:
        return "a loop that is given all of it"
    if not has_stood:
        return LAYERS
    is_loop = eqn.params["unroll"] < max(eqn.params["length"], 2)
    return "transpose" if is_loop else "unrolled scan"


def exchanges(traced: Trace) -> Iterator[tuple[str, set[str]]]:
    """Yields the operations by which devices send each other values, and their axes."""
    for eqn in opened(traced).eqns:
        axes = [eqn.params.get(name, ()) for name in ("axis_name", "axes")]
        names = {axis for axis in jax.tree.leaves(axes) if isinstance(axis, str)}
        if names and eqn.primitive.name not in ("axis_index", "pcast", "pvary"):
            yield eqn.primitive.name, names
        # Those of an inner shard_map, whose name differs between versions of jax.
        of_inner = ("manual_axes", "newly_manual_axes")
        own = {axis for name in of_inner for axis in eqn.params.get(name, ())}
        for inner in functions_in(eqn):
            for name, names in exchanges(inner):
                if names - own:
                    yield name, names - own


def equations(traced: Trace) -> Iterator[JaxprEqn]:
    """Yields the operations of a traced function, those of inner functions too."""
    for eqn in opened(traced).eqns:
        yield eqn
        for inner in functions_in(eqn):
            yield from equations(inner)


def functions_in(eqn: JaxprEqn) -> list[Leaf]:
    """The traced functions that an operation calls, repeats or chooses from."""
    values = [x if isinstance(x, tuple | list) else [x] for x in eqn.params.values()]
    return [x for xs in values for x in xs if hasattr(opened(x), "eqns")]


def opened(traced: Trace) -> Any:
    """The trace of a function, without its constants."""
    return getattr(traced, "jaxpr", traced)


def _rank(x: Atom) -> int:
    return len(getattr(_aval(x), "shape", ()))


def _aval(x: Atom) -> Any:
    return x.aval
