"""A sum on each device, reduced once, at the close: `reduce_every="window"`."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core.layout import Layout, Peers
from optax_tokenaccum._core.loss import MicroBatch, Output
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Gradients, M, ParamShardings, T
from optax_tokenaccum._devices.axes import OwnSums, PeersOnAxes
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.on_mesh import OnMesh, SumsOnMesh
from optax_tokenaccum._devices.shardings import (
    Entry,
    entries_of,
    entry_of,
    names_in,
    only,
    sharding_of,
    without,
)


@dataclass(frozen=True)
class StackedSums(SumsOnMesh):
    """One sum per device, stacked in an array over all devices: `[devices, ...]`."""

    @property
    def leading_axes(self) -> tuple[int, ...]:
        return (self.devices.size,)

    def _spec(self, p: jax.Array) -> list[Entry]:
        other = without(self.devices.names, entries_of(sharding_of(p), jnp.ndim(p)))
        return [self.devices.entry, *other]

    def total(self, stored: Gradients) -> Gradients:
        devices, names = self.devices, self.devices.names
        leaves, structure = jax.tree.flatten(stored)
        specs = [
            entries_of(sharding, x.ndim - 1)
            for sharding, x in zip(self._known_shardings(leaves), leaves, strict=True)
        ]
        scattered = [P(*only(names, spec)) for spec in specs]

        def add_up(sums: list[jax.Array]) -> list[jax.Array]:
            return [
                _reduce(jax.lax.squeeze(x, (0,)), names, spec)
                for x, spec in zip(sums, scattered, strict=True)
            ]

        # If shardings are known, map over all axes: XLA would gather an array that is
        # spread over an axis left to the compiler before scattering it over another.
        sums = devices.map(
            add_up,
            in_specs=([P(devices.entry, *without(names, s)) for s in specs],),
            out_specs=[P(*_innermost(names, spec)) for spec in specs],
            axes=names if self.shardings is None else devices.mesh.axis_names,
        )(leaves)
        return jax.tree.unflatten(structure, sums)


class SumOnEach(OnMesh):
    """Every device adds up the gradients of its own rows."""

    sums = StackedSums
    keeps_sums_apart = True

    def __init__(self, devices: DataParallel, *, is_chosen: bool):
        super().__init__(devices)
        self._warns = not is_chosen

    def init(self, init: Callable[[T], M], params: T) -> M:
        gathered = sum(4 * x.size for x in jax.tree.leaves(params) if self._spreads(x))
        if gathered and self._warns:
            self._warns = False
            warnings.warn(
                f"Parameters are spread over data_axes {self.data_axes}, and every "
                f"device keeps whole float32 sums of their gradients: {gathered:,} "
                'bytes. reduce_every="micro_batch" spreads the sums too (FSDP); '
                'reduce_every="window" keeps them whole without this warning.',
                stacklevel=_level_of_caller(),
            )
        return super().init(init, params)

    def _spreads(self, x: jax.Array) -> bool:
        """Whether a parameter is spread over the data axes."""
        sharding = sharding_of(x)
        used = {name for entry in sharding.spec for name in names_in(entry)}
        return not used.isdisjoint(self.data_axes)

    def on_rows(
        self,
        f: Callable[Concatenate[T, ...], Output],
        on: Callable[[Layout, Peers], T],
        shardings: ParamShardings = None,
    ) -> Callable[..., Output]:
        devices = self.devices
        everywhere: Any = P()
        fields = dict.fromkeys(TokenAccumulationState._fields, everywhere)
        state = TokenAccumulationState(**fields)._replace(acc_grads=P(devices.entry))

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
                    MicroBatch(rows.specs(devices), everywhere, everywhere),
                    *[P()] * len(others),
                ),
                out_specs=Output(state, P(), devices.rows_spec(rows.axis)),
            )(opt_state, micro_batch._replace(rows=rows.batch), *others)

        return mapped


def _level_of_caller() -> int:
    """The `stacklevel` of the call into this package, for the caller of this function.

    `skip_file_prefixes` does the same from Python 3.12 on.
    """
    package, _, _ = __name__.partition(".")
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def _innermost(names: tuple[str, ...], spec: list[Entry]) -> list[Entry]:
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
