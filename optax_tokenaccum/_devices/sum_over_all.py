"""One sum, spread over the devices: `reduce_every="micro_batch"`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.layout import ALONE, Layout, Peers
from optax_tokenaccum._core.loss import MicroBatch, Output
from optax_tokenaccum._core.trees import (
    Batch,
    DType,
    Gradients,
    OptState,
    Params,
    ParamShardings,
)
from optax_tokenaccum._devices.mesh import DataParallel, split_shardings, zeros_on
from optax_tokenaccum._devices.processes import Agreement
from optax_tokenaccum._devices.rows import spread_rows
from optax_tokenaccum._devices.shardings import (
    UNKNOWN,
    entries_of,
    is_explicit,
    sharding_of,
)


class SumOverAll:
    """The compiler adds up the gradients of all rows in every micro-batch."""

    def __init__(self, devices: DataParallel):
        self.data_axes = devices.names
        self.num_devices = devices.size
        self._devices = devices
        self._agreement = Agreement(devices.mesh)

    def agree(self, batch: Batch, *numbers: int | None) -> None:
        self._agreement.check(batch, *numbers)

    def spread(self, batch: Batch, axis: int = 0, *, check_rows: bool = True) -> Batch:
        return spread_rows(
            self._devices, batch, axis, check_rows=check_rows, keeps_sums_apart=False
        )

    def place(self, params: Params) -> Params:
        return self._devices.place(params)

    def init(self, init: Callable[[Params], OptState], params: Params) -> OptState:
        """The optimizer's state is laid out like the sums."""

        def place(p: jax.Array) -> jax.Array:
            if not trees.is_concrete(p):
                return p
            spec = self._devices.spread(p, sharding_of(p))
            return jax.device_put(p, self._devices.sharding(*spec))

        return self._devices.init(init, jax.tree.map(place, params))

    def layout(self, shardings: ParamShardings = None) -> Layout:
        return ShardedSums(self._devices, shardings)

    def on_rows(
        self,
        f: Callable[..., Output],
        on: Callable[[Layout, Peers], Any],
        shardings: ParamShardings = None,
    ) -> Callable[..., Output]:
        of_all = functools.partial(f, on(self.layout(shardings), ALONE))

        def mapped(opt_state: Any, micro_batch: MicroBatch, *others: Any) -> Output:
            rows = micro_batch.rows.batch
            return of_all(opt_state, micro_batch._replace(rows=rows), *others)

        return mapped

    def auto(
        self, f: Callable[..., Output], shardings: Any, axis: int = 0
    ) -> Callable[..., Output]:
        return self._devices.auto(f, shardings, P())


@dataclass(frozen=True)
class ShardedSums(Layout):
    """One sum per parameter, spread over the devices if they divide one of its axes."""

    devices: DataParallel
    shardings: ParamShardings = None

    def split(self, params: Params) -> tuple[Layout, Layout]:
        return split_shardings(self, params)

    def zeros(self, params: Params, dtypes: Params) -> Gradients:
        def zero(p: jax.Array, dtype: DType) -> jax.Array:
            spec = self.devices.spread(p, sharding_of(p))
            return zeros_on(self.devices.sharding(*spec), jnp.shape(p), dtype, p)

        return self.write(jax.tree.map(zero, params, dtypes))

    def write(self, sums: Gradients) -> Gradients:
        return self._constrained(sums, self.devices.spread)

    def has_whole_first_axes(self, sums: Sequence[jax.Array]) -> list[bool]:
        shardings = [UNKNOWN] * len(sums)
        if self.shardings is not None:
            shardings = jax.tree.leaves(self.shardings)
        specs = map(self.devices.spread, sums, shardings)
        return [not (spec and spec[0]) for spec in specs]

    def place(self, params: Params) -> Params:
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
