"""Partition specs, axis by axis."""

from typing import Any


def entries_of(sharding: Any, ndim: int) -> list[Any]:
    """An entry for every axis."""
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
    """Of a spec; older jax does not take one name in a tuple for itself."""
    return (names[0] if len(names) == 1 else names) if names else None
