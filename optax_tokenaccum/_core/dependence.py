"""Reads traced functions: what a value is computed from, and which are used twice."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Traced = Jaxpr | ClosedJaxpr

# Operations that call one function, with the same inputs and outputs.
_CALLS = {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"}


@dataclass(eq=False)
class Node:
    """What an operation computes. Compared by identity.

    Attributes:
      name: of the operation, or "input", or "constant". In a loop, "carry" is what an
        iteration is given by the one before, and "last" what the last one returns;
        "element" is its part of an array, and "stack" is made of what all return.
      aval: its shape and dtype.
      params: what determines it besides `args`.
      args: what it is computed from.
      updates: for a result of a loop, what each "carry" is in the next iteration. A
        "carry" does not refer to it: a cycle would keep arrays until it is collected.
    """

    name: str
    aval: Any
    params: Mapping[str, Any]
    args: "list[Value]"
    updates: "Mapping[Node, Value]" = field(default_factory=dict)


class Value(NamedTuple):
    """What a node computes, with its axes in this order."""

    node: Node
    axes: tuple[int, ...]


def _value(name: str, x: Any, params: Mapping[str, Any], args: list[Value]) -> Value:
    """A new node for a variable or a literal."""
    return Value(Node(name, x.aval, params, args), tuple(range(_rank(x))))


class Slice(NamedTuple):
    """The part of a traced function that computes some of its outputs.

    Attributes:
      inputs: for each input of the function, whether it is needed.
      operations: the names of its operations, in called functions too.
      constants: the values of its constants.
    """

    inputs: list[bool]
    operations: set[str]
    constants: list[Any]


class Graph:
    """What each output of a traced function is computed from.

    Unlike JAX's `dce_jaxpr`, it drops side effects such as printing, looks into `while`
    loops on every version, and sees which values a loop or a branch only passes on.
    """

    def __init__(self, traced: Traced):
        self.inputs = _inputs(traced)
        self.outputs = _interpret(traced, self.inputs, _compute)

    def slice_of(self, outputs: Collection[int]) -> Slice:
        """What the outputs with these indices are computed from."""
        found: set[Node] = set()
        updates: dict[Node, Value] = {}
        left = [self.outputs[i].node for i in outputs]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [x.node for x in _args(node, updates)]
        return Slice(
            [x.node in found for x in self.inputs],
            {x.name for x in found},
            [x.params["value"] for x in found if x.name == "constant"],
        )


def are_alike(f: Graph, g: Graph, i: int) -> bool:
    """Whether two traced functions compute output `i` in the same way.

    That is, by the same operations, on values of the same shapes, from the same inputs
    and constants.
    """
    pairs = {(f.outputs[i], g.outputs[i])}
    left = [*pairs]
    updates: dict[Node, Value] = {}
    while left:
        (x, x_axes), (y, y_axes) = left.pop()
        if x_axes != y_axes or not _compute_alike(x, y):
            return False
        args = {*zip(_args(x, updates), _args(y, updates), strict=True)} - pairs
        pairs |= args
        left += args
    return True


def _args(x: Node, updates: dict[Node, Value]) -> list[Value]:
    """What a node is computed from, with the `updates` of loops that it may be in."""
    updates |= x.updates
    return [*x.args, updates[x]] if x in updates else x.args


def _compute_alike(x: Node, y: Node) -> bool:
    """Whether two nodes compute the same from the same arguments."""
    if (x.name, x.aval, len(x.args)) != (y.name, y.aval, len(y.args)):
        return False
    if x.name == "constant":
        try:
            one, other = x.params["value"], y.params["value"]
            return one is other or np.array_equal(one, other)
        except Exception:  # unknown: keys, traced values, arrays on other hosts
            return False
    return _described(x.params) == _described(y.params)


def _described(params: Mapping[str, Any]) -> str:
    """Parameters without functions, and without addresses in memory."""
    items = sorted(params.items())
    plain = [(k, v) for k, v in items if not (callable(v) or _is_function(v))]
    return re.sub("0x[0-9a-f]+", "", str(plain))


def _inputs(traced: Traced) -> list[Value]:
    inputs = enumerate(opened(traced).invars)
    return [_value("input", x, {"index": i}, []) for i, x in inputs]


def _interpret(
    traced: Traced,
    given: list[Value],
    apply: Callable[[JaxprEqn, list[Value]], list[Value]],
    looks_into: Callable[[JaxprEqn], bool] = lambda _: True,
) -> list[Value]:
    """Interprets a traced function, and those that it calls in place of their calls.

    `looks_into(call)` tells in place of which. `given` are its inputs.
    `apply(operation, inputs)` returns the values of what the operation sets, and so
    does this: outputs, then mutable arrays that were inputs.
    """

    def constant(x: Any, value: Any) -> Value:
        return _value("constant", x, {"value": value}, [])

    jaxpr = opened(traced)
    consts = getattr(traced, "consts", jaxpr.constvars)
    known = dict(zip(jaxpr.invars, given, strict=True))
    known |= zip(jaxpr.constvars, map(constant, jaxpr.constvars, consts), strict=True)

    def look_up(x: Any) -> Value:
        return constant(x, x.val) if isinstance(x, Literal) else known[x]

    for x in jaxpr.eqns:
        inputs = [*map(look_up, x.invars)]
        is_call = x.primitive.name in _CALLS and looks_into(x)
        called = functions_in(x) if is_call else []
        if [len(opened(f).invars) for f in called] == [len(inputs)]:
            found = _interpret(called[0], inputs, apply, looks_into)
        else:
            found = apply(x, inputs)
        known.update(zip(_set_by(x), found, strict=True))
    return [*map(look_up, _set_by(jaxpr))]


def _set_by(x: JaxprEqn | Jaxpr) -> list[Literal | Var]:
    """The outputs of `x`, and the mutable arrays that it may write to."""
    return [*x.outvars, *(y for y in x.invars if hasattr(y.aval, "inner_aval"))]


def _compute(x: JaxprEqn, given: list[Value]) -> list[Value]:
    """What an operation computes, or is given and passes on."""
    name, functions, results = x.primitive.name, functions_in(x), _set_by(x)
    if name == "transpose":
        [(node, axes)] = given
        return [Value(node, tuple(axes[i] for i in x.params["permutation"]))]
    if name == "optimization_barrier":
        return given
    if name == "cond":
        predicate, *inputs = given
        branches = [_interpret(f, inputs, _compute) for f in functions]
        return [
            found[0] if len({*found}) == 1 else _value(name, y, {}, [predicate, *found])
            for y, *found in zip(results, *branches, strict=True)
        ]
    if name in ("scan", "while") and len(results) == len(x.outvars):
        return _compute_loop(x, given)
    # Not known: an output may need all inputs, and all that inner functions compute.
    inner = [_interpret(f, _inputs(f), _compute) for f in functions]
    args = [*given, *itertools.chain(*inner)]
    params = [x.params | {"output": i} for i in range(len(results))]
    return [_value(name, *of_one, args) for of_one in zip(results, params, strict=True)]


def _compute_loop(x: JaxprEqn, given: list[Value]) -> list[Value]:
    """The same for a loop: its last carry, and the stacks of what it returns."""
    if x.primitive.name == "while":
        condition, body = x.params["cond_jaxpr"], x.params["body_jaxpr"]
        own, params = x.params["cond_nconsts"], {}
        first, last = own + x.params["body_nconsts"], len(given)
    else:
        condition, [body], own = None, functions_in(x), 0
        first, last = carry_of(x)
        params = {name: x.params[name] for name in ("length", "reverse")}

    def part(name: str, var: Any, *args: Value) -> Value:
        return _value(name, var, params, [*args])

    carry = [part("carry", x.invars[i], given[i]) for i in range(first, last)]
    arrays = zip(opened(body).invars[last:], given[last:], strict=False)
    elements = [part("element", *array) for array in arrays]
    new = _interpret(body, [*given[own:first], *carry, *elements], _compute)
    test = _interpret(condition, [*given[:own], *carry], _compute) if condition else []
    updates = {y.node: after for y, after in zip(carry, new, strict=False)}
    results = []
    for i, (var, (node, axes)) in enumerate(zip(x.outvars, new, strict=True)):
        is_last = i < len(carry)
        if is_last and new[i] == carry[i]:  # passed on
            result = given[first + i]
        elif not is_last and any(node is y.node for y in elements):
            [(node, (first_axis, *others))] = node.args
            result = Value(node, (first_axis, *(others[axis] for axis in axes)))
        else:
            name, args = ("last", [carry[i], *test]) if is_last else ("stack", [new[i]])
            result = part(name, var, *args)
            result.node.updates = updates
        results.append(result)
    return results


def carry_of(x: JaxprEqn) -> tuple[int, int]:
    """The first input of a scan that is in the carry, and the first after it."""
    # Sliced inputs and stacked outputs have one axis less in the body. The equation's
    # parameters say which these are too, but differ between versions of jax.
    [body] = map(opened, functions_in(x))
    last = sum(map(eq, map(_rank, x.invars), map(_rank, body.invars)))
    return last - sum(map(eq, map(_rank, x.outvars), map(_rank, body.outvars))), last


def forwarded(traced: Traced) -> list[tuple[int, tuple[int, ...]] | None]:
    """For each output, the index of the input that it is known to be, and its axes.

    The axes may be in another order than those of the input.
    """
    graph = Graph(traced)
    index = {x.node: i for i, x in enumerate(graph.inputs)}
    return [(index[x], axes) if x in index else None for x, axes in graph.outputs]


def _rank(x: Any) -> int:
    return len(getattr(x.aval, "shape", ()))


def functions_in(x: JaxprEqn) -> list[Traced]:
    """The traced functions that an operation calls, repeats or chooses from."""
    values = [v if isinstance(v, tuple | list) else [v] for v in x.params.values()]
    return [*filter(_is_function, itertools.chain(*values))]


def _is_function(x: Any) -> bool:
    return hasattr(opened(x), "eqns")


def opened(traced: Any) -> Any:
    """The trace of a function, without its constants."""
    return getattr(traced, "jaxpr", traced)


Names = Sequence[int | None]  # of the last inputs of a function


def used_twice(traced: Traced, names: Names) -> set[int]:
    """The names of inputs that some operation takes twice.

    An input of an inner function whose own inputs cannot be told counts as taken twice.
    """
    uses = [taken for _, taken in _uses(traced, names)]
    return {x for taken in uses for x in taken if x is not None and taken.count(x) > 1}


def looked_up(traced: Traced, names: Names) -> set[int | None]:
    """The names of inputs in which an operation looks up rows."""
    return {taken[0] for name, taken in _uses(traced, names) if name == "gather"}


def are_looped_over(traced: Traced, names: Names) -> bool:
    """Whether a loop reads an input with a name."""
    return any(name in ("scan", "while") for name, _ in _uses(traced, names))


def _uses(traced: Traced, names: Names) -> Iterator[tuple[str, list[int | None]]]:
    """Yields what operations take, in called functions too."""
    jaxpr = opened(traced)
    inputs = jaxpr.invars[len(jaxpr.invars) - len(names) :]
    name_of = dict(zip(inputs, names, strict=True))
    for x in jaxpr.eqns:
        taken = [None if isinstance(y, Literal) else name_of.get(y) for y in x.invars]
        named = [name for name in taken if name is not None]
        if named:
            yield x.primitive.name, taken
        for inner in functions_in(x) if named else ():
            # A conditional has a predicate, which its branches do not take.
            skip = len(taken) - len(opened(inner).invars)
            if skip in (0, 1):
                yield from _uses(inner, taken[skip:])
            else:
                yield x.primitive.name, [*named, *named]


class Scan(NamedTuple):
    """How a scan over slices takes an input of a traced function.

    Attributes:
      axis: of the input, along which the slices lie.
      is_unrolled: whether it runs as one operation after the other.
      is_moved: whether operations that `passes_on` knows change the input before.
      changed_by: the last other operation that changes all of it before, if any.
      within: the outermost call around the scan that `passes_on` does not know, if any.
    """

    axis: int
    is_unrolled: bool
    is_moved: bool
    changed_by: str | None
    within: str | None


def scans_over(traced: Traced) -> dict[int, list[Scan]]:
    """The scans over slices of each input, by the input's index.

    If casts or transpositions that `passes_on` knows come before, and nothing else,
    the gradient can be made slice by slice.
    """
    found: dict[int, list[Scan]] = {}

    # A node that is an input, or all of an input changed, has the input's index.
    def apply(x: JaxprEqn, given: list[Value]) -> list[Value]:
        name, params = x.primitive.name, {}
        whole = [(i, y) for i, y in enumerate(given) if "index" in y.node.params]
        called = functions_in(x) if name in _CALLS else []
        if name == "scan":
            _, last = carry_of(x)
            is_unrolled = x.params["unroll"] >= x.params["length"] > 1
            for i, (node, axes) in whole:
                if i >= last:
                    index, *how = node.params.values()
                    found.setdefault(index, []).append(Scan(axes[0], is_unrolled, *how))
        elif whole and passes_on(x):
            [(_, (node, axes))] = whole
            axes = tuple(axes[i] for i in x.params.get("permutation", range(len(axes))))
            return [Value(_with(node, is_moved=True), axes)]
        elif whole and [len(opened(f).invars) for f in called] == [len(given)]:
            for i, (node, axes) in whole:
                within = node.params["within"] or name
                given[i] = Value(_with(node, within=within), axes)
            return _interpret(called[0], given, apply, passes_on)
        else:
            sizes = [getattr(y.aval, "size", None) for y in x.outvars]
            for i, y in whole:
                if sizes == [getattr(x.invars[i].aval, "size", None)]:
                    params = _with(y.node, changed_by=name).params
        return [_value(name, y, params, []) for y in _set_by(x)]

    how = {"is_moved": False, "changed_by": None, "within": None}
    inputs = enumerate(opened(traced).invars)
    given = [_value("input", x, {"index": i} | how, []) for i, x in inputs]
    _interpret(traced, given, apply, passes_on)
    return found


def _with(node: Node, **params: Any) -> Node:
    return replace(node, params={**node.params, **params})


def passes_on(x: JaxprEqn) -> bool:
    """Whether the gradient of an operation's input can be made before its output's.

    It is a transposition, a name, a cast to fewer bits, whose gradient is cast to more
    bits and so loses none, or a call without shardings of its own.
    """
    name, params = x.primitive.name, x.params
    if name == "convert_element_type":
        [operand] = x.invars
        dtypes = getattr(operand.aval, "dtype"), params["new_dtype"]  # noqa: B009
        if params["sharding"] or not all(
            jnp.issubdtype(d, jnp.floating) for d in dtypes
        ):
            return False
        old, new = (jnp.finfo(dtype).bits for dtype in dtypes)
        return new < old or dtypes[0] == dtypes[1]
    if name == "jit":
        given = [*params["in_shardings"], *params["out_shardings"]]
        return not any(isinstance(y, jax.sharding.Sharding) for y in given)
    return name in ("transpose", "name", "closed_call", "remat2")


def exchanges(traced: Traced) -> Iterator[tuple[str, set[str]]]:
    """Yields the operations by which devices send each other values, with their axes.

    The axes are those of a map over named axes around the traced function.
    """
    for equation in opened(traced).eqns:
        axes = [equation.params.get(name, ()) for name in ("axis_name", "axes")]
        names = {axis for axis in jax.tree.leaves(axes) if isinstance(axis, str)}
        if names and equation.primitive.name not in ("axis_index", "pcast", "pvary"):
            yield equation.primitive.name, names
        # Those of an inner shard_map, whose name differs between versions of jax.
        of_inner = ("manual_axes", "newly_manual_axes")
        own = {axis for name in of_inner for axis in equation.params.get(name, ())}
        for inner in functions_in(equation):
            for name, names in exchanges(inner):
                if names - own:
                    yield name, names - own
