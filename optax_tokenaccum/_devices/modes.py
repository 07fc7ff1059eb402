"""The two ways to run a step over a mesh, and `make_mode`, which chooses.

Each device keeps a sum of its own until the window closes, or one sum is spread over
all devices. Both override the methods of `OneDevice`.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Batch, Params
from optax_tokenaccum._devices.axes import LocalSums, as_names
from optax_tokenaccum._devices.layouts import ShardedSums, StackedSums
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.one_device import OneDevice, RowsFn
from optax_tokenaccum._devices.processes import Agreement
from optax_tokenaccum._devices.rows import spread_rows
from optax_tokenaccum._devices.shardings import is_explicit, only, sharding_of

ReduceEvery = Literal["window", "micro_batch"]


class SumOverAll(OneDevice):
    """One sum, spread over the devices: `reduce_every="micro_batch"`."""

    keeps_sums_apart = False

    def __init__(self, devices: DataParallel):
        self.data_axes = devices.names
        self.num_devices = devices.size
        self._devices = devices
        self._agreement = Agreement(devices.mesh)

    def agree(self, batch: Batch, *numbers: Any) -> None:
        self._agreement.check(batch, *numbers)

    def spread(self, batch: Batch, axis: int = 0, *, check_rows: bool = True) -> Any:
        return spread_rows(
            self._devices,
            batch,
            axis,
            check_rows=check_rows,
            keeps_sums_apart=self.keeps_sums_apart,
        )

    def init(self, params: Params, init: Callable[[Any], Any]) -> tuple[Any, Any]:
        devices = self._devices
        params = devices.place_params(params)
        is_traced = not all(map(trees.is_concrete, jax.tree.leaves(params)))
        model = params if is_traced else self._like_sums(params)
        # An optimizer's init may make arrays from those that the mesh's types bind.
        binds = is_explicit(devices.mesh) and not is_traced
        with jax.set_mesh(devices.mesh) if binds else contextlib.nullcontext():
            return params, init(model)

    def _like_sums(self, params: Params) -> Any:
        """The parameters placed as their sums are, for an optimizer's `init`."""

        def place(p: Any) -> jax.Array:
            spec = self._devices.spread(p, sharding_of(p))
            return jax.device_put(p, self._devices.sharding(*spec))

        return jax.tree.map(place, params)

    def layout(self, shardings: Any = None) -> Layout:
        return ShardedSums(devices=self._devices, shardings=shardings)

    def map_rows(
        self, f: RowsFn, shardings: Any, opt_state: Any, rows: Any, *shared: Any
    ) -> tuple[Any, Any, Any]:
        return f(self.layout(shardings), opt_state, rows.batch, *shared)

    def auto(self, f: RowsFn, shardings: Any, axis: int = 0) -> RowsFn:
        return self._auto(f, shardings, P())

    def _auto(self, f: RowsFn, shardings: Any, own: P) -> Any:
        devices = self._devices
        if not is_explicit(devices.mesh):
            return f
        explicit = devices.mesh.explicit_axes

        def in_types(sharding: Any) -> Any:
            return devices.sharding(*only(explicit, [*sharding.spec]))

        state = everywhere = devices.sharding()
        if shardings is not None:
            state = jax.tree.map(in_types, shardings)
        out = state, everywhere, devices.sharding(*only(explicit, [*own]))
        return jax.sharding.auto_axes(f, out_sharding=out)


class SumOnEach(SumOverAll):
    """A sum on each device, reduced once, at the close: `reduce_every="window"`."""

    keeps_sums_apart = True

    def __init__(self, devices: DataParallel):
        super().__init__(devices)
        self.leading_axes = (devices.size,)

    def _like_sums(self, params: Params) -> Any:
        return params

    def layout(self, shardings: Any = None) -> Layout:
        return StackedSums(devices=self._devices, shardings=shardings)

    def map_rows(
        self, f: RowsFn, shardings: Any, opt_state: Any, rows: Any, *shared: Any
    ) -> tuple[Any, Any, Any]:
        devices = self._devices
        copies = frozenset(i for i, is_whole in enumerate(rows.is_whole) if is_whole)
        layout = LocalSums(devices.names, copies=copies)
        everywhere: Any = P()
        fields = [everywhere] * len(TokenAccumulationState._fields)
        state = TokenAccumulationState(*fields)._replace(acc_grads=P(devices.entry))
        return devices.map(
            functools.partial(f, layout),
            in_specs=(
                state if opt_state is not None else P(),
                rows.specs(devices),
                *[P()] * len(shared),
            ),
            out_specs=(state, P(), self._own(rows.axis)),
        )(opt_state, rows.batch, *shared)

    def auto(self, f: RowsFn, shardings: Any, axis: int = 0) -> RowsFn:
        return self._auto(f, shardings, self._own(axis))

    def _own(self, axis: int) -> P:
        """The spec of what each device has of its own."""
        return P(*[None] * axis, self._devices.entry)


def make_mode(mesh: Any, data_axes: Any, reduce_every: Any) -> OneDevice:
    """Checks the arguments of steps about devices."""
    if reduce_every not in ("window", "micro_batch"):
        raise ValueError(
            "reduce_every must be 'window' or 'micro_batch', when the devices' sums "
            f"are reduced: got {reduce_every!r}."
        )
    if mesh is None and data_axes is None:
        if reduce_every != "window":
            raise ValueError(
                "reduce_every needs mesh and data_axes, to know the devices: got "
                f"{reduce_every!r} without. Give both, or leave it out."
            )
        return OneDevice()
    if mesh is None or data_axes is None:
        raise ValueError(
            "mesh and data_axes go together, the devices and the axes over which rows "
            f"are spread: got mesh={mesh!r} and data_axes={data_axes!r}."
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh: got {mesh!r}.")
    names = as_names(data_axes, "data_axes")
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"data_axes must be axes of the mesh: got {unknown}, the mesh has "
            f"{list(mesh.axis_names)}."
        )
    devices = DataParallel(mesh, names)
    if reduce_every == "window":
        return SumOnEach(devices)
    return SumOverAll(devices)
