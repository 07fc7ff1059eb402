"""The shardings of arrays, and their partition specs, axis by axis."""

from typing import Any

import jax
from jax.sharding import NamedSharding


def sharding_of(x: Any) -> NamedSharding | None:
    """The sharding of an array over a mesh, or `None` if none is known."""
    if isinstance(x, jax.core.Tracer):
        x = jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    is_traced = isinstance(sharding.mesh, jax.sharding.AbstractMesh)
    return None if is_traced and not is_explicit(sharding.mesh) else sharding


def is_explicit(mesh: Any) -> bool:
    """Whether the types of arrays on the mesh contain their shardings."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def is_sharding(x: Any) -> bool:
    """Whether `x` is a leaf of a tree of shardings."""
    return x is None or isinstance(x, jax.sharding.Sharding)


def entries_of(sharding: Any, ndim: int) -> list[Any]:
    """The entries of a sharding's spec, one for each axis."""
    given = [] if sharding is None else list(sharding.spec)
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
