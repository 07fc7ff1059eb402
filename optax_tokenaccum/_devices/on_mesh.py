"""What both ways to run a step over a mesh have in common."""

import abc
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from optax import Params

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.loss import Output
from optax_tokenaccum._core.trees import Batch, DType, Gradients, M, ParamShardings, T
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.rows import spread_rows
from optax_tokenaccum._devices.shardings import (
    UNKNOWN,
    Entry,
    Unknown,
    is_explicit,
    only,
    put,
    sharding_of,
)


class OnMesh:
    """Has the methods of `OneDevice`, except `on_rows`, which its subclasses have."""

    sums: ClassVar["type[SumsOnMesh]"]
    keeps_sums_apart: ClassVar[bool]  # whether each device sums its own gradients

    def __init__(self, devices: DataParallel):
        self.data_axes = devices.names
        self.num_devices = devices.size
        self.devices = devices

    def spread(self, batch: Batch, axis: int = 0) -> Batch:
        return spread_rows(
            self.devices, batch, axis, keeps_sums_apart=self.keeps_sums_apart
        )

    def place(self, params: T) -> T:
        mesh = self.devices.mesh

        def place(path: KeyPath, x: Any) -> Any:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                return put(x, self.devices.sharding())
            if trees.is_concrete(x) and sharding.mesh != mesh:
                raise ValueError(
                    "The parameters must be on the mesh given to the step, or on a "
                    f"single device: at {trees.name_of(path)} got {sharding.mesh}, the "
                    f"step has {mesh}. Make one mesh, and use it for both."
                )
            return x

        return jax.tree_util.tree_map_with_path(place, params)

    def init(self, init: Callable[[T], M], params: T) -> M:
        mesh = self.devices.mesh
        are_arrays = all(map(trees.is_array, jax.tree.leaves(params)))
        # An optimizer's init may make arrays from those that the mesh's types bind.
        binds = is_explicit(mesh) and are_arrays
        with jax.set_mesh(mesh) if binds else contextlib.nullcontext():
            return init(params)

    def layout(self, shardings: ParamShardings = None) -> Layout:
        return self.sums(self.devices, shardings)

    def auto(
        self, f: Callable[..., Output], shardings: ParamShardings, axis: int = 0
    ) -> Callable[..., Output]:
        devices = self.devices
        if not is_explicit(devices.mesh):
            return f
        explicit = devices.mesh.explicit_axes

        def in_types(spec: P) -> NamedSharding:
            return devices.sharding(*only(explicit, [*spec]))

        state = same = devices.sharding()
        if shardings is not None:
            state = jax.tree.map(lambda x: in_types(x.spec), shardings)
        aux = in_types(devices.rows_spec(axis) if self.keeps_sums_apart else P())
        auto_axes: Any = jax.sharding.auto_axes
        return auto_axes(f, out_sharding=Output(state, same, aux))


@dataclass(frozen=True)
class SumsOnMesh(Layout, abc.ABC):
    """Sums as the whole mesh sees them, of parameters whose shardings may be known."""

    devices: DataParallel
    shardings: ParamShardings = None

    @abc.abstractmethod
    def _spec(self, p: jax.Array) -> list[Entry]:
        """The partition spec of a parameter's sum."""

    def zeros(self, params: Params, dtypes: Params) -> Gradients:
        def zero(p: jax.Array, dtype: DType) -> jax.Array | jax.ShapeDtypeStruct:
            shape = (*self.leading_axes, *jnp.shape(p))
            spec = self._spec(p)
            if trees.is_concrete(p):
                sharding = self.devices.sharding(*spec)
                if isinstance(p, jax.ShapeDtypeStruct):
                    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                # Never made on one device first, where they may not fit.
                return jnp.zeros(shape, dtype, device=sharding)
            zeros = jnp.zeros(shape, dtype)
            return jax.sharding.reshard(zeros, P(*spec)) if sharding_of(p) else zeros

        return jax.tree.map(zero, params, dtypes)

    def _known_shardings(
        self, leaves: list[jax.Array]
    ) -> list[NamedSharding | Unknown]:
        if self.shardings is None:
            return [UNKNOWN] * len(leaves)
        return jax.tree.leaves(self.shardings)
