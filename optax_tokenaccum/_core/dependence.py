"""Reads traced functions: what a value is computed from, and which are used twice."""

import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

# Operations that call one function, with the same inputs and outputs.
_CALLS = {
    "checkpoint",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "pjit",
    "remat",
    "remat2",
}


class Slice(NamedTuple):
    """The part of a traced function that computes some of its outputs.

    Attributes:
      equations: its operations, each with those of its outputs that are needed.
      inputs: for each input of the function, whether it is needed.
      consts: the same for each constant.
      equal: results that are what an operation was given, by that value.
    """

    equations: list[tuple[JaxprEqn, list[bool]]]
    inputs: list[bool]
    consts: list[bool]
    equal: dict[Any, Any]

    def source(self, x: Any) -> Any:
        """What `x` was before operations passed it on."""
        while not isinstance(x, Literal) and x in self.equal:
            x = self.equal[x]
        return x


def slice_of(traced: Any, needed: list[bool]) -> Slice:
    """What the `needed` outputs of a traced function are computed from.

    Unlike JAX's `dce_jaxpr`, it drops side effects such as printing, looks into `while`
    loops on every version, and sees which values a loop or a branch only passes on.
    """
    jaxpr = _open(traced)
    equations, equal, wanted = [], {}, set()

    def want(variables: Any, given: list[bool]) -> None:
        chosen = itertools.compress(variables, given)
        wanted.update(x for x in chosen if not isinstance(x, Literal))

    want(jaxpr.outvars, needed)
    for equation in reversed(jaxpr.eqns):
        outputs = [x in wanted for x in equation.outvars]
        is_written = not wanted.isdisjoint(filter(_is_ref, equation.invars))
        for i, given in enumerate(_forwarded_by(equation) if any(outputs) else ()):
            out = equation.outvars[i]
            if outputs[i] and given and given[1] == as_given(_shape(out)):
                outputs[i], equal[out] = False, equation.invars[given[0]]
                want([equal[out]], [True])
        if any(outputs) or is_written:
            equations.append((equation, outputs))
            want(equation.invars, _reads(equation, outputs)[0])
    inputs, consts = (
        [x in wanted for x in variables]
        for variables in (jaxpr.invars, jaxpr.constvars)
    )
    return Slice(equations[::-1], inputs, consts, equal)


def only(traced: Any, outputs: Collection[int]) -> list[bool]:
    """For each output of a traced function, whether its index is in `outputs`."""
    return [i in outputs for i in range(len(_open(traced).outvars))]


def needed_by(traced: Any, needed: list[bool]) -> tuple[set[str], list[Any]]:
    """What the `needed` outputs are computed by and from, in called functions too.

    Returns:
      The names of operations, and the values of constants.
    """
    names: set[str] = set()
    values: list[Any] = []

    def visit(traced: Any, needed: list[bool]) -> None:
        found = slice_of(traced, needed)
        values.extend(itertools.compress(getattr(traced, "consts", ()), found.consts))
        for equation, outputs in found.equations:
            names.add(equation.primitive.name)
            for called in _reads(equation, outputs)[1]:
                visit(*called)

    visit(traced, needed)
    return names, values


def _reads(x: JaxprEqn, needed: list[bool]) -> tuple[list[bool], list[Any]]:
    """What an operation reads to compute the `needed` of its outputs.

    Returns:
      For each input whether it is read, `True` if that is not known; and `(function,
      needed outputs)` for each function that the operation calls.
    """
    name, functions = x.primitive.name, [*functions_in(x)]
    if not any(map(_is_ref, x.invars)):
        if name in _CALLS and len(functions) == 1:
            inputs = slice_of(functions[0], needed).inputs
            if len(inputs) == len(x.invars):
                return inputs, [(functions[0], needed)]
        elif name == "cond":
            inputs = [slice_of(f, needed).inputs for f in functions]
            of_any = [True, *map(any, zip(*inputs, strict=True))]
            return of_any, [(f, needed) for f in functions]
        elif name == "scan":
            [body] = functions
            inputs, needed = _of_loop(body, *_carry_of(x, _open(body)), needed)
            return inputs, [(body, needed)]
        elif name == "while":
            condition, body, first, start = _parts_of_while(x)
            of_condition = slice_of(condition, [True]).inputs
            needed = [*map(max, needed, of_condition[first:])]
            inputs, needed = _of_loop(body, start, len(needed) + start, needed)
            called = [(condition, [True]), (body, needed)]
            return [*of_condition[:first], *inputs], called
    return [True] * len(x.invars), [
        (f, [True] * len(_open(f).outvars)) for f in functions
    ]


def _of_loop(
    body: Any, first: int, last: int, needed: list[bool]
) -> tuple[list[bool], list[bool]]:
    """The inputs of a loop's body, and its outputs, that `needed` outputs need.

    Its inputs from `first` to `last` are the carry, which it returns first: what an
    iteration reads of it is needed of the iteration before.
    """
    while True:
        inputs = slice_of(body, needed).inputs
        grown = [*map(max, needed, inputs[first:last]), *needed[last - first :]]
        if grown == needed:
            # A loop of no iterations returns the carry that it was given.
            return [*inputs[:first], *needed[: last - first], *inputs[last:]], needed
        needed = grown


def _parts_of_while(x: JaxprEqn) -> tuple[Any, Any, int, int]:
    """The condition and the body of a loop, and where each one's carry starts."""
    parts = "cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"
    condition, body, of_condition, of_body = (x.params[name] for name in parts)
    return condition, body, of_condition, of_body


def are_alike(f: Any, g: Any, i: int) -> bool:
    """Whether two traced functions compute output `i` in the same way.

    That is, by the same operations, on values of the same shapes, from the same inputs
    and constants.
    """
    return _are_alike(f, only(f, [i]), g, only(g, [i]))


def _are_alike(f: Any, f_needed: list[bool], g: Any, g_needed: list[bool]) -> bool:
    one, other = slice_of(f, f_needed), slice_of(g, g_needed)
    twins: dict[Any, Any] = {}

    def learn(xs: Any, ys: Any) -> bool:
        xs, ys = [*xs], [*ys]
        twins.update(zip(xs, ys, strict=False))
        return [x.aval for x in xs] == [y.aval for y in ys]

    def agree(xs: Any, ys: Any) -> bool:
        xs, ys = [*map(one.source, xs)], [*map(other.source, ys)]
        return len(xs) == len(ys) and all(map(is_twin, xs, ys))

    def is_twin(x: Any, y: Any) -> bool:
        if isinstance(x, Literal) or isinstance(y, Literal):
            are_both = isinstance(x, Literal) and isinstance(y, Literal)
            return are_both and x.aval == y.aval and _are_equal(x.val, y.val)
        return twins.get(x) is y

    def do_alike(a: JaxprEqn, a_needed: Any, b: JaxprEqn, b_needed: Any) -> bool:
        (a_reads, a_calls), (b_reads, b_calls) = (
            _reads(a, a_needed),
            _reads(b, b_needed),
        )
        return (
            a.primitive is b.primitive
            and agree(pick(a.invars, a_reads), pick(b.invars, b_reads))
            and _have_same_parameters(a, b)
            and len(a_calls) == len(b_calls)
            and all(map(lambda x, y: _are_alike(*x, *y), a_calls, b_calls))
            and learn(pick(a.outvars, a_needed), pick(b.outvars, b_needed))
        )

    pick, x, y = itertools.compress, _open(f), _open(g)
    consts = [
        [*pick(getattr(traced, "consts", ()), found.consts)]
        for traced, found in ((f, one), (g, other))
    ]
    return (
        len(one.equations) == len(other.equations)
        and learn(pick(x.invars, one.inputs), pick(y.invars, other.inputs))
        and learn(pick(x.constvars, one.consts), pick(y.constvars, other.consts))
        and all(map(_are_equal, *consts))
        and all(map(lambda a, b: do_alike(*a, *b), one.equations, other.equations))
        and agree(pick(x.outvars, f_needed), pick(y.outvars, g_needed))
    )


def _have_same_parameters(x: JaxprEqn, y: JaxprEqn) -> bool:
    """Whether parameters that are not functions are equal, where they matter."""
    name, parameters = x.primitive.name, x.params.keys() | y.params.keys()
    if name in _CALLS | {"cond", "while"}:  # the rest depends on what is not needed
        parameters = set()
    if name == "scan":
        parameters = {"length", "reverse"}
    for parameter in parameters:
        values = [equation.params.get(parameter) for equation in (x, y)]
        if not any(callable(value) or _is_function(value) for value in values):
            one, other = (re.sub("0x[0-9a-f]+", "", str(value)) for value in values)
            if one != other:
                return False
    return True


def _carry_of(x: JaxprEqn, body: Any) -> tuple[int, int]:
    """The first input of a scan that is in the carry, and the first after it."""
    # Sliced inputs and stacked outputs have one axis less in the body. The equation's
    # parameters say which these are too, but differ between versions of jax.
    last = sum(map(_have_same_rank, x.invars, body.invars))
    return last - sum(map(_have_same_rank, x.outvars, body.outvars)), last


# An input by its index, and the order in which its axes are.
Forwarded = tuple[int, tuple[int, ...]]


def forwarded(traced: Any) -> list[Forwarded | None]:
    """For each output, the input that it is known to be, with its axes in some order.

    It is the same value if the axes are in the order of `as_given`.
    """
    jaxpr = _open(traced)
    known = {x: (i, as_given(_shape(x))) for i, x in enumerate(jaxpr.invars)}

    def look_up(x: Any) -> Forwarded | None:
        return None if isinstance(x, Literal) else known.get(x)

    for x in jaxpr.eqns:
        for out, found in zip(x.outvars, _forwarded_by(x), strict=False):
            given = look_up(x.invars[found[0]]) if found else None
            if given:
                i, axes = given
                known[out] = i, tuple(axes[axis] for axis in found[1])
    return [look_up(x) for x in jaxpr.outvars]


def as_given(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of an array in their order."""
    return tuple(range(len(shape)))


def _forwarded_by(x: JaxprEqn) -> list[Any]:
    name, inner = x.primitive.name, [*functions_in(x)]
    if name == "transpose":
        return [(0, x.params["permutation"])]
    if name == "optimization_barrier":
        return [(i, as_given(_shape(out))) for i, out in enumerate(x.outvars)]
    if name == "cond":  # its predicate comes first
        by_branches = zip(*map(forwarded, inner), strict=True)
        same = [found[0] if len({*found}) == 1 else None for found in by_branches]
        return [found and (found[0] + 1, found[1]) for found in same]
    if name == "while":
        _, body, first, start = _parts_of_while(x)
        found = enumerate(forwarded(body))
        return [
            (first + start + i, out[1]) if out and out[0] == start + i else None
            for i, out in found
        ]
    if len(inner) != 1:
        return []
    if name in _CALLS:
        return forwarded(inner[0])
    return _forwarded_by_scan(x, inner[0]) if name == "scan" else []


def _forwarded_by_scan(x: JaxprEqn, f: Any) -> list[Any]:
    body = _open(f)
    first, last = _carry_of(x, body)
    found: list[Any] = forwarded(f)
    for i, out in enumerate(found):
        if out is None:
            continue
        j, axes = out
        if i < last - first:  # in the carry, which the next iteration is given
            is_same = j == first + i and axes == as_given(_shape(x.outvars[i]))
            found[i] = out if is_same else None
        else:  # a stack of slices
            found[i] = (j, (0, *(axis + 1 for axis in axes))) if j >= last else None
    return found


def _shape(x: Any) -> tuple[int, ...]:
    return getattr(x.aval, "shape", ())


def _have_same_rank(x: Any, y: Any) -> bool:
    return len(_shape(x)) == len(_shape(y))


def _is_ref(x: Any) -> bool:
    return hasattr(x.aval, "inner_aval")


def _are_equal(x: Any, y: Any) -> bool:
    if x is y:
        return True
    try:
        return bool(np.array_equal(x, y))
    except Exception:  # unknown: keys, traced values, arrays on other hosts
        return False


def functions_in(equation: JaxprEqn) -> Iterator[Any]:
    """The traced functions that an operation calls, repeats or chooses from."""

    leaves = jax.tree.leaves([*equation.params.values()], is_leaf=_is_function)
    return filter(_is_function, leaves)


def _is_function(x: Any) -> bool:
    return hasattr(_open(x), "eqns")


def _open(traced: Any) -> Any:
    return getattr(traced, "jaxpr", traced)


def used_twice(traced: Any, names: list[Any]) -> set[Any]:
    """The names of inputs that some operation takes twice.

    Args:
      traced: the trace of a function.
      names: of its last inputs, the only ones to look at. An input of an inner function
        whose own inputs cannot be told counts as taken twice.
    """
    jaxpr = _open(traced)
    inputs = jaxpr.invars[len(jaxpr.invars) - len(names) :]
    name_of = dict(zip(inputs, names, strict=True))
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        taken = [
            None if isinstance(x, Literal) else name_of.get(x) for x in equation.invars
        ]
        named = [name for name in taken if name is not None]
        found |= {name for name in named if named.count(name) > 1}
        for inner in functions_in(equation) if named else ():
            # A conditional has a predicate, which its branches do not take.
            size = len(_open(inner).invars)
            is_known = size in (len(taken), len(taken) - 1)
            found |= used_twice(inner, taken[-size:]) if is_known else {*named}
    return found - {None}


def changed_before_scan(traced: Any, changed: dict[int, str]) -> dict[int, str]:
    """The inputs that an operation changes as a whole before a scan over their slices.

    By their indices, the name of the operation. `changed` are those that were changed
    before they were given. The gradient of such an input is made of the stacked
    gradients of all slices.
    """
    found: dict[int, str] = {}

    def visit(jaxpr: Any, known: dict[Any, tuple[int, str]]) -> None:
        for x in jaxpr.eqns:
            name, inner = x.primitive.name, [*functions_in(x)]
            taken = [
                None if isinstance(given, Literal) else known.get(given)
                for given in x.invars
            ]
            if name == "scan":
                _, last = _carry_of(x, _open(inner[0]))
                found.update(given for given in taken[last:] if given and given[1])
            elif name in _CALLS and len(inner) == 1:
                body = _open(inner[0])
                own = zip(body.invars, taken, strict=False)
                of_body = {var: given for var, given in own if given}
                visit(body, of_body)
                for out, own_out in zip(x.outvars, body.outvars, strict=False):
                    if not isinstance(own_out, Literal) and own_out in of_body:
                        known[out] = of_body[own_out]
            else:
                sizes = [getattr(out.aval, "size", None) for out in x.outvars]
                for var, given in zip(x.invars, taken, strict=True):
                    if given and sizes == [var.aval.size]:
                        known[x.outvars[0]] = given[0], name

    jaxpr = _open(traced)
    visit(jaxpr, {x: (i, changed.get(i, "")) for i, x in enumerate(jaxpr.invars)})
    return found


def exchanges(traced: Any) -> Iterator[tuple[str, set[str]]]:
    """Yields the operations by which devices send each other values, with their axes.

    The axes are those of a map over named axes around the traced function.
    """
    for equation in _open(traced).eqns:
        axes = [equation.params.get(name, ()) for name in ("axis_name", "axes")]
        names = {axis for axis in jax.tree.leaves(axes) if isinstance(axis, str)}
        if names and equation.primitive.name not in ("axis_index", "pcast", "pvary"):
            yield equation.primitive.name, names
        for inner in functions_in(equation):
            yield from exchanges(inner)
