"""One sum, spread over the devices: `reduce_every="micro_batch"`."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.layout import ALONE, Layout, Peers
from optax_tokenaccum._core.loss import MicroBatch, Output
from optax_tokenaccum._core.trees import Gradients, M, ParamShardings, T
from optax_tokenaccum._devices.on_mesh import OnMesh, SumsOnMesh
from optax_tokenaccum._devices.shardings import (
    Entry,
    Unknown,
    entries_of,
    is_explicit,
    is_whole,
    put,
    sharding_of,
)


@dataclass(frozen=True)
class ShardedSums(SumsOnMesh):
    """One sum per parameter, spread over the devices if they divide one of its axes."""

    def _spec(self, p: jax.Array) -> list[Entry]:
        return self.devices.spread(p, sharding_of(p))

    def zeros(self, params: optax.Params, dtypes: optax.Params) -> Gradients:
        return self.write(super().zeros(params, dtypes))

    def write(self, sums: T) -> T:
        return self._constrained(sums, self.devices.spread)

    def has_whole_axes(self, sums: list[jax.Array], axes: list[int]) -> list[bool]:
        specs = map(self.devices.spread, sums, self._known_shardings(sums))
        shardings = [self.devices.sharding(*spec) for spec in specs]
        return [*map(is_whole, shardings, axes)]

    def scatters(self) -> bool:
        return True

    def gathers(self, params: optax.Params) -> bool:
        leaves = jax.tree.leaves(params)
        gathered = [
            self.devices.spread(p, sharding) != entries_of(sharding, p.ndim)
            for p, sharding in zip(leaves, self._known_shardings(leaves), strict=True)
        ]
        sizes = [p.size for p in leaves]
        return 2 * sum(map(operator.mul, sizes, gathered)) > sum(sizes)

    def place(self, params: T) -> T:
        """Updated parameters in their own shardings, gathered only when updated."""
        return self._constrained(params, lambda x, s: entries_of(s, x.ndim))

    def _constrained(
        self,
        tree: T,
        spec_of: Callable[[jax.Array, NamedSharding | Unknown], list[Entry]],
    ) -> T:
        leaves, structure = jax.tree.flatten(tree)
        if self.shardings is None or all(map(trees.is_concrete, leaves)):
            return tree
        mesh = self.devices.mesh
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


class SumOverAll(OnMesh):
    """The compiler adds up the gradients of all rows in every micro-batch."""

    sums = ShardedSums
    keeps_sums_apart = False

    def init(self, init: Callable[[T], M], params: T) -> M:
        """The optimizer's state is laid out like the sums."""

        def place(p: jax.Array) -> jax.Array:
            if not trees.is_concrete(p):
                return p
            spec = self.devices.spread(p, sharding_of(p))
            return put(p, self.devices.sharding(*spec))

        return super().init(init, jax.tree.map(place, params))

    def on_rows(
        self,
        f: Callable[Concatenate[T, ...], Output],
        on: Callable[[Layout, Peers], T],
        shardings: ParamShardings = None,
    ) -> Callable[..., Output]:
        of_all = functools.partial(f, on(self.layout(shardings), ALONE))

        def mapped(opt_state: Any, micro_batch: MicroBatch, *others: Any) -> Output:
            rows = micro_batch.rows.batch
            return of_all(opt_state, micro_batch._replace(rows=rows), *others)

        return mapped
