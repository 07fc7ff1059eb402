"""The shardings of arrays, and their partition specs, axis by axis."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Unknown:
    """In place of a sharding: the compiler may choose one, and types do not tell.

    A leaf of a tree, where `None` is the place of a missing leaf.
    """

    spec = P()

    def __bool__(self) -> bool:
        return False


UNKNOWN = Unknown()


def sharding_of(x: Any) -> NamedSharding | Unknown:
    """The sharding of an array over a mesh, if it is known."""
    if isinstance(x, jax.core.Tracer):
        x = jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return UNKNOWN
    is_traced = isinstance(sharding.mesh, jax.sharding.AbstractMesh)
    return UNKNOWN if is_traced and not is_explicit(sharding.mesh) else sharding


def is_explicit(mesh: Any) -> bool:
    """Whether the types of arrays on the mesh contain their shardings."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def entries_of(sharding: Any, ndim: int) -> list[Any]:
    """The entries of a sharding's spec, one for each axis."""
    given = list(sharding.spec)
    return given + [None] * (ndim - len(given))


def names_in(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def only(names: tuple[str, ...], spec: list[Any]) -> list[Any]:
    kept = [tuple(n for n in names_in(entry) if n in names) for entry in spec]
    return [entry_of(entry) for entry in kept]


def without(names: tuple[str, ...], spec: list[Any]) -> list[Any]:
    kept = [tuple(n for n in names_in(entry) if n not in names) for entry in spec]
    return [entry_of(entry) for entry in kept]


def entry_of(names: tuple[str, ...]) -> Any:
    """The spec entry for `names`; older jax distinguishes `("x",)` from `"x"`."""
    return (names[0] if len(names) == 1 else names) if names else None
