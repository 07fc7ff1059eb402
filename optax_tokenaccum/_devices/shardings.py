"""The shardings of arrays, and their partition specs, axis by axis."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# An axis of a partition spec: the mesh axes over which it is spread.
Entry = str | tuple[str, ...] | None


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
    is_traced = isinstance(sharding.mesh, AbstractMesh)
    return UNKNOWN if is_traced and not is_explicit(sharding.mesh) else sharding


def platform_of(x: object) -> str | None:
    """Where a program runs that is given `x`, an array or its shape; `None` if traced.

    A shape may lie on devices that are not there.
    """
    if isinstance(x, jax.core.Tracer):
        return None
    sharding = getattr(x, "sharding", None)
    if sharding is None:  # JAX decides
        device = jax.config.jax_default_device
        return getattr(device, "platform", device) or jax.default_backend()
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return None
    return next(iter(sharding.device_set)).platform


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the types of arrays on the mesh contain their shardings."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def entries_of(sharding: NamedSharding | Unknown, ndim: int) -> list[Entry]:
    """The entries of a sharding's spec, one for each axis."""
    given = list(sharding.spec)
    return given + [None] * (ndim - len(given))


def is_whole(sharding: NamedSharding | Unknown, axis: int) -> bool:
    """Whether an axis is not known to be spread over devices."""
    if isinstance(sharding, Unknown) or axis >= len(sharding.spec):
        return True
    return all(sharding.mesh.shape[n] == 1 for n in names_in(sharding.spec[axis]))


def names_in(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def only(names: tuple[str, ...], spec: Iterable[Entry]) -> list[Entry]:
    """A partition spec without other names than `names`."""
    return [entry_of(tuple(n for n in names_in(x) if n in names)) for x in spec]


def without(names: tuple[str, ...], spec: Iterable[Entry]) -> list[Entry]:
    return [entry_of(tuple(n for n in names_in(x) if n not in names)) for x in spec]


def entry_of(names: tuple[str, ...]) -> Entry:
    """The spec entry for `names`; older jax distinguishes `("x",)` from `"x"`."""
    return (names[0] if len(names) == 1 else names) if names else None


def put(x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """An array that is moved, or a shape that says where its array would be."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
