"""Layouts of a window's sums over several devices, as arrays over all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.sums import kinds_of
from optax_tokenaccum._core.trees import Params
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.shardings import (
    UNKNOWN,
    entries_of,
    entry_of,
    is_explicit,
    names_in,
    only,
    sharding_of,
    without,
)


@dataclass(frozen=True, kw_only=True)
class _OnDevices(Layout):
    devices: DataParallel
    shardings: Any = None  # of the parameters, if known


class StackedSums(_OnDevices):
    """One sum per device, stacked in an array over all devices: `[devices, ...]`."""

    def zeros(self, params: Params, dtypes: Any) -> Any:
        names, size = self.devices.names, self.devices.size

        def zero(p: Any, dtype: Any) -> jax.Array:
            other = without(names, entries_of(sharding_of(p), jnp.ndim(p)))
            shape = (size, *jnp.shape(p))
            sharding = self.devices.sharding(self.devices.entry, *other)
            return _zeros(shape, dtype, sharding, p)

        return jax.tree.map(zero, params, dtypes)

    def total(self, stored: Any) -> Any:
        names, mesh = self.devices.names, self.devices.mesh
        leaves, structure = jax.tree.flatten(stored)
        shardings = [UNKNOWN] * len(leaves)
        if self.shardings is not None:
            shardings = jax.tree.leaves(self.shardings)
        specs = [
            entries_of(sharding, x.ndim - 1)
            for sharding, x in zip(shardings, leaves, strict=True)
        ]
        scattered = [P(*only(names, spec)) for spec in specs]

        def add_up(sums: list[jax.Array]) -> list[jax.Array]:
            return [
                _reduce(jax.lax.squeeze(x, (0,)), names, spec)
                for x, spec in zip(sums, scattered, strict=True)
            ]

        # If shardings are known, map over all axes: XLA would gather an array that is
        # spread over an axis left to the compiler before scattering it over another.
        axes = names if self.shardings is None else mesh.axis_names
        sums = jax.shard_map(
            add_up,
            mesh=None if is_explicit(mesh) else mesh,
            axis_names={*axes},
            in_specs=([P(self.devices.entry, *without(names, s)) for s in specs],),
            out_specs=[P(*_innermost(names, spec)) for spec in specs],
            check_vma=False,
        )(leaves)
        total = jax.tree.unflatten(structure, sums)
        return jax.tree.map(
            lambda x, each, kind: x if kind.is_gradient else kind.reduce(each, 0),
            total,
            stored,
            kinds_of(stored),
        )


class ShardedSums(_OnDevices):
    """One sum per parameter, spread over the devices if they divide one of its axes."""

    def zeros(self, params: Params, dtypes: Any) -> Any:
        def zero(p: Any, dtype: Any) -> jax.Array:
            spec = self.devices.spread(p, sharding_of(p))
            return _zeros(jnp.shape(p), dtype, self.devices.sharding(*spec), p)

        return self.stored(jax.tree.map(zero, params, dtypes))

    def stored(self, opened: Any) -> Any:
        return self._constrained(opened, self.devices.spread)

    def has_whole_first_axes(self, opened: list[jax.Array]) -> list[bool]:
        shardings = [UNKNOWN] * len(opened)
        if self.shardings is not None:
            shardings = jax.tree.leaves(self.shardings)
        specs = map(self.devices.spread, opened, shardings)
        return [not (spec and spec[0]) for spec in specs]

    def settled(self, params: Params) -> Any:
        """Updated parameters in their own shardings, gathered only when updated."""
        return self._constrained(params, lambda x, s: entries_of(s, x.ndim))

    def _constrained(self, tree: Any, spec_of: Callable[[Any, Any], list[Any]]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        if self.shardings is None or all(map(trees.is_concrete, leaves)):
            return tree
        mesh: Any = self.devices.mesh
        if is_explicit(mesh):  # under auto_axes, which replaces the mesh
            mesh = jax.sharding.get_abstract_mesh()
        shardings = jax.tree.leaves(self.shardings)
        placed = [
            jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, P(*spec_of(x, sharding)))
            )
            for x, sharding in zip(leaves, shardings, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)


def _innermost(names: tuple[str, ...], spec: list[Any]) -> list[Any]:
    """`spec` with `names` last in each entry, where a scatter puts them."""
    return [
        entry_of(tuple(sorted(names_in(entry), key=lambda name: name in names)))
        for entry in spec
    ]


def _zeros(shape: Any, dtype: Any, sharding: NamedSharding, like: Any) -> jax.Array:
    """Zeros that are never made on one device first, where they may not fit."""
    if trees.is_concrete(like):
        return jnp.zeros(shape, dtype, device=sharding)
    return jnp.zeros(shape, dtype)


def _reduce(x: jax.Array, names: tuple[str, ...], spec: P) -> jax.Array:
    """The sum over the devices; each device keeps its part according to `spec`."""
    scattered = [(axis, entry) for axis, entry in enumerate(spec) if entry]
    gone = {name for _, entry in scattered for name in names_in(entry)}
    rest = tuple(name for name in names if name not in gone)
    for axis, entry in scattered:
        x = jax.lax.psum_scatter(x, entry, scatter_dimension=axis, tiled=True)
    return jax.lax.psum(x, rest) if rest else x
