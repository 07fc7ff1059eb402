"""Reads traced functions: what depends on which inputs, and which are used twice."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

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


def depends(
    traced: ClosedJaxpr,
    on: list[bool],
    on_consts: list[bool] | None = None,
    twin: ClosedJaxpr | None = None,
) -> list[bool]:
    """Whether each output may depend on some inputs, or differ from its twin's.

    The answer errs on the side of `True`: for example, the outputs of a branch are
    assumed to depend on all of its inputs.

    Args:
      traced: the trace of a function.
      on: for each input, whether dependence on it counts.
      on_consts: the same for each constant; by default none counts.
      twin: the trace of the same function for inputs of other shapes. A value that
        depends only on shapes is a constant in one trace, but differs between the two.
    """
    twin = traced if twin is None else twin
    jaxpr, other = getattr(traced, "jaxpr", traced), getattr(twin, "jaxpr", twin)
    consts, other_consts = getattr(traced, "consts", ()), getattr(twin, "consts", ())
    everything = [True] * len(jaxpr.outvars)
    pairs = [(jaxpr.eqns, other.eqns), (consts, other_consts), (jaxpr.invars, on)]
    if any(len(these) != len(those) for these, those in pairs):
        return everything
    # Variables without such a dependence, and the variables they equal in the twin.
    free: dict[Any, Any] = {}

    def is_free(x: Any, y: Any) -> bool:
        if isinstance(x, Literal):
            return isinstance(y, Literal) and _are_equal(x.val, y.val)
        return free.get(x) is y

    def learn(variables: list[Any], others: list[Any], given: list[bool]) -> None:
        for x, y, is_given in zip(variables, others, given, strict=True):
            if not is_given and _shape(x) == _shape(y):
                free[x] = y

    learn(jaxpr.invars, other.invars, on)
    if consts:
        differ = [
            not _are_equal(*pair) for pair in zip(consts, other_consts, strict=True)
        ]
        given = on_consts or [False] * len(consts)
        learn(jaxpr.constvars, other.constvars, [*map(max, differ, given)])
    for x, y in zip(jaxpr.eqns, other.eqns, strict=True):
        if x.primitive is not y.primitive or len(x.invars) != len(y.invars):
            return everything
        given = [not is_free(*pair) for pair in zip(x.invars, y.invars, strict=True)]
        learn(x.outvars, y.outvars, _outputs(x, y, given))
        for written in filter(_is_ref, x.invars if any(given) else ()):
            free.pop(written, None)
    outputs = zip(jaxpr.outvars, other.outvars, strict=True)
    return [not is_free(*pair) for pair in outputs]


def _outputs(x: JaxprEqn, y: JaxprEqn, given: list[bool]) -> list[bool]:
    """Whether each output of an operation may depend on its inputs in `given`."""
    name, params, others = x.primitive.name, x.params, y.params
    inner = [*zip(functions_in(x), functions_in(y), strict=False)]
    if len(inner) == 1 and not any(map(_is_ref, x.invars)):
        [(f, g)] = inner
        found = None
        if name in _CALLS:
            found = depends(f, given, twin=g)
        elif name == "scan" and params["length"] == others["length"]:
            found = _of_scan(x, f, g, given)
        if found is not None and len(found) == len(x.outvars):
            return found
    depend = (
        any(given)
        or name == "axis_index"
        or "callback" in name
        or (x is not y and str(params) != str(others))
        or any(any(depends(f, _no_input_of(f), twin=g)) for f, g in inner)
    )
    return [depend] * len(x.outvars)


def _of_scan(x: JaxprEqn, f: Any, g: Any, given: list[bool]) -> list[bool]:
    """The same for a scan: the carry depends on everything that any iteration adds."""
    first, last = _carry_of(x, getattr(f, "jaxpr", f))
    while True:
        found = depends(f, given, twin=g)
        carried = map(max, given[first:last], found)
        grown = [*given[:first], *carried, *given[last:]]
        if grown == given:
            return found
        given = grown


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
    jaxpr = getattr(traced, "jaxpr", traced)
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
    if x.primitive.name == "transpose":
        return [(0, x.params["permutation"])]
    inner = [*functions_in(x)]
    if len(inner) != 1:
        return []
    if x.primitive.name in _CALLS:
        return forwarded(inner[0])
    return _forwarded_by_scan(x, inner[0]) if x.primitive.name == "scan" else []


def _forwarded_by_scan(x: JaxprEqn, f: Any) -> list[Any]:
    body = getattr(f, "jaxpr", f)
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


def _no_input_of(f: Any) -> list[bool]:
    return [False] * len(getattr(f, "jaxpr", f).invars)


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

    def is_function(x: Any) -> bool:
        return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")

    leaves = jax.tree.leaves([*equation.params.values()], is_leaf=is_function)
    return filter(is_function, leaves)


def used_twice(traced: Any, names: list[Any]) -> set[Any]:
    """The names of inputs that some operation takes twice.

    Args:
      traced: the trace of a function.
      names: of its last inputs, the only ones to look at. An input of an inner function
        whose own inputs cannot be told counts as taken twice.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
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
            size = len(getattr(inner, "jaxpr", inner).invars)
            is_known = size in (len(taken), len(taken) - 1)
            found |= used_twice(inner, taken[-size:]) if is_known else {*named}
    return found - {None}


def communicates(traced: Any) -> bool:
    """Whether devices of a map over named axes send each other values."""

    def names_axes(equation: JaxprEqn) -> bool:
        axes = [equation.params.get(name, ()) for name in ("axis_name", "axes")]
        named = any(isinstance(axis, str) for axis in jax.tree.leaves(axes))
        return named and equation.primitive.name not in ("axis_index", "pvary")

    equations = getattr(traced, "jaxpr", traced).eqns
    return any(
        names_axes(x) or any(map(communicates, functions_in(x))) for x in equations
    )
