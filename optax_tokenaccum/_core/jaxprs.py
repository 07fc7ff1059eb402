"""Reads traced functions."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal


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
