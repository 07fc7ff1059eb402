"""A sum on each device, reduced once, at the close: `reduce_every="window"`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core.layout import Layout, Peers
from optax_tokenaccum._core.loss import MicroBatch, Output
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import (
    Batch,
    DType,
    Gradients,
    OptState,
    Params,
    ParamShardings,
)
from optax_tokenaccum._devices.axes import OwnSums, PeersOnAxes
from optax_tokenaccum._devices.mesh import DataParallel, split_shardings, zeros_on
from optax_tokenaccum._devices.processes import Agreement
from optax_tokenaccum._devices.rows import spread_rows
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


class SumOnEach:
    """Every device adds up the gradients of its own rows."""

    def __init__(self, devices: DataParallel):
        self.data_axes = devices.names
        self.num_devices = devices.size
        self._devices = devices
        self._agreement = Agreement(devices.mesh)

    def agree(self, batch: Batch, *numbers: int | None) -> None:
        self._agreement.check(batch, *numbers)

    def spread(self, batch: Batch, axis: int = 0, *, check_rows: bool = True) -> Batch:
        return spread_rows(
            self._devices, batch, axis, check_rows=check_rows, keeps_sums_apart=True
        )

    def place(self, params: Params) -> Params:
        return self._devices.place(params)

    def init(self, init: Callable[[Params], OptState], params: Params) -> OptState:
        return self._devices.init(init, params)

    def layout(self, shardings: ParamShardings = None) -> Layout:
        return StackedSums(self._devices, shardings)

    def on_rows(
        self,
        f: Callable[..., Output],
        on: Callable[[Layout, Peers], Any],
        shardings: ParamShardings = None,
    ) -> Callable[..., Output]:
        devices = self._devices
        fields: list[Any] = [P()] * len(TokenAccumulationState._fields)
        everywhere: list[Any] = [P()] * 2
        state = TokenAccumulationState(*fields)._replace(acc_grads=P(devices.entry))

        def mapped(opt_state: Any, micro_batch: MicroBatch, *others: Any) -> Output:
            rows = micro_batch.rows
            copies = frozenset(i for i, whole in enumerate(rows.is_whole) if whole)
            peers = PeersOnAxes(devices.names, copies=copies)

            def of_device(*args: Any) -> Output:
                output = f(on(OwnSums(), peers), *args)
                aux = jax.tree.map(lambda x: jnp.expand_dims(x, rows.axis), output.aux)
                return output._replace(aux=aux)

            return devices.map(
                of_device,
                in_specs=(
                    state if opt_state is not None else P(),
                    MicroBatch(rows.specs(devices), *everywhere),
                    *[P()] * len(others),
                ),
                out_specs=Output(state, P(), devices.rows_spec(rows.axis)),
            )(opt_state, micro_batch._replace(rows=rows.batch), *others)

        return mapped

    def auto(
        self, f: Callable[..., Output], shardings: Any, axis: int = 0
    ) -> Callable[..., Output]:
        return self._devices.auto(f, shardings, self._devices.rows_spec(axis))


@dataclass(frozen=True)
class StackedSums(Layout):
    """One sum per device, stacked in an array over all devices: `[devices, ...]`."""

    devices: DataParallel
    shardings: ParamShardings = None

    @property
    def leading_axes(self) -> tuple[int, ...]:
        return (self.devices.size,)

    def split(self, params: Params) -> tuple[Layout, Layout]:
        return split_shardings(self, params)

    def zeros(self, params: Params, dtypes: Params) -> Gradients:
        names, size = self.devices.names, self.devices.size

        def zero(p: jax.Array, dtype: DType) -> jax.Array:
            other = without(names, entries_of(sharding_of(p), jnp.ndim(p)))
            shape = (size, *jnp.shape(p))
            sharding = self.devices.sharding(self.devices.entry, *other)
            return zeros_on(sharding, shape, dtype, p)

        return jax.tree.map(zero, params, dtypes)

    def total(self, stored: Gradients) -> Gradients:
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
        return jax.tree.unflatten(structure, sums)

    def largest(self, stored: list[jax.Array]) -> list[jax.Array]:
        return [jnp.max(x, 0) for x in stored]


def _innermost(names: tuple[str, ...], spec: list[Any]) -> list[Any]:
    """`spec` with `names` last in each entry, where a scatter puts them."""
    return [
        entry_of(tuple(sorted(names_in(entry), key=lambda name: name in names)))
        for entry in spec
    ]


def _reduce(x: jax.Array, names: tuple[str, ...], spec: P) -> jax.Array:
    """The sum over the devices; each device keeps its part according to `spec`."""
    scattered = [(axis, entry) for axis, entry in enumerate(spec) if entry]
    gone = {name for _, entry in scattered for name in names_in(entry)}
    rest = tuple(name for name in names if name not in gone)
    for axis, entry in scattered:
        x = jax.lax.psum_scatter(x, entry, scatter_dimension=axis, tiled=True)
    return jax.lax.psum(x, rest) if rest else x
