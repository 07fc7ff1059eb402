"""Rows spread over devices: each sums the gradients of its own, and they meet once."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import _checks
from optax_tokenaccum._add_and_close import Accumulation, TokenAccumulationState
from optax_tokenaccum._axes import Axes, as_names
from optax_tokenaccum._placement import (
    Placement,
    is_explicit,
    is_sharding,
    sharding_of,
)
from optax_tokenaccum._step_state import StepMetrics
from optax_tokenaccum._sums import Sums, SumsPerDevice

ReduceEvery = Literal["window", "micro_batch"]


@dataclass(frozen=True)
class DataParallel:
    """The part of a mesh over which rows are spread.

    Attributes:
      mesh: all devices, with axes for other kinds of parallelism perhaps.
      names: of the axes over which rows are spread.
      reduce_every: `"window"` if every device keeps a sum of its own.
    """

    mesh: Mesh
    names: tuple[str, ...]
    reduce_every: ReduceEvery

    @property
    def size(self) -> int:
        """The parts that the rows are cut into."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def entry(self) -> Any:
        """What a spec has for an axis that is spread over the devices."""
        return _entry(self.names)

    @property
    def keeps_sums_apart(self) -> bool:
        return self.reduce_every == "window"

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`f` of every device's part, other axes left to the compiler.

        Types carry no marks of what differs in `f`: a `loss_fn` with a loop that begins
        with zeros would have to cast them first.
        """
        return jax.shard_map(
            f,
            # Under auto_axes the mesh is another: that of the context.
            mesh=None if is_explicit(self.mesh) else self.mesh,
            axis_names={*self.names},
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def auto(self, f: Callable[..., Any], state: Any, axis: int = 0) -> Any:
        """`f` with the compiler choosing shardings, on an Explicit mesh too.

        Args:
          f: returns a state and metrics.
          state: the shardings of that state, where known.
          axis: along which each device's `aux` stands in the metrics.
        """
        if not is_explicit(self.mesh):
            return f
        state = jax.tree.map(lambda s: s or self.sharding(), state, is_leaf=is_sharding)
        aux = [*[None] * axis, self.entry] if self.keeps_sums_apart else []
        everywhere: Any = self.sharding()
        metrics = StepMetrics(*[everywhere] * 8)._replace(aux=self.sharding(*aux))
        return jax.sharding.auto_axes(f, out_sharding=(state, metrics))

    def place_params(self, params: Any) -> Any:
        """The parameters on the mesh, as they are where they are on it already.

        Raises:
          ValueError: some are on another mesh.
        """

        def place(path: str, x: Any) -> Any:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                return jax.device_put(x, self.sharding())
            if _checks.is_concrete(x) and sharding.mesh != self.mesh:
                raise ValueError(
                    "The parameters must be on the mesh given to the step, or on a "
                    f"single device: at {path} got {sharding.mesh}, the step has "
                    f"{self.mesh}. Make one mesh, and use it for both."
                )
            return x

        leaves = [place(path, x) for path, x in _checks.named_leaves(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def place_rows(self, batch: Any, axis: int = 0) -> Any:
        """The batch with its rows spread, as they are where they are spread already.

        Args:
          batch: a tree of arrays, or of their shapes; those with no such axis go to
            all devices.
          axis: that of the rows.
        """

        def place(x: Any) -> Any:
            if isinstance(getattr(x, "sharding", None), NamedSharding):
                return x
            sharding = self.sharding(*self.rows_of(x, axis))
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            return jax.device_put(x, sharding) if _checks.is_concrete(x) else x

        return jax.tree.map(place, batch)

    def rows_of(self, x: Any, axis: int = 0) -> P:
        """The spec that spreads the rows of `x`.

        Raises:
          ValueError: there are not equally many for each device.
        """
        shape = jnp.shape(x)
        if len(shape) <= axis:
            return P()
        if shape[axis] % self.size:
            raise ValueError(
                "The rows of a micro-batch must be a multiple of the "
                f"{self.size} devices of data_axes {self.names}: got {shape[axis]} in "
                f"an array of shape {shape}. Add rows without tokens (pad_micro_batch "
                f"with num_rows, or batch_multiple={self.size} in a plan)."
            )
        return P(*[None] * axis, self.entry)


def make_data_parallel(
    mesh: Any, data_axes: Any, reduce_every: Any
) -> DataParallel | None:
    """Checks what steps are told about devices.

    Raises:
      TypeError: no mesh, no names.
      ValueError: one without the other; axes that the mesh has not.
    """
    if reduce_every not in ("window", "micro_batch"):
        raise ValueError(
            "reduce_every must be 'window' or 'micro_batch', when the devices' sums "
            f"meet: got {reduce_every!r}."
        )
    if mesh is None and data_axes is None:
        if reduce_every != "window":
            raise ValueError(
                "reduce_every needs mesh and data_axes, to know the devices: got "
                f"{reduce_every!r} without. Give both, or leave it out."
            )
        return None
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
    return DataParallel(mesh, names, reduce_every)


@dataclass(frozen=True, kw_only=True)
class SumsOfDevices(Sums):
    """A sum of each device's own, seen from outside: `[devices, ...]`.

    Attributes:
      devices: over which they are spread.
      shardings: of the parameters, where known: a total is spread as they are.
    """

    devices: DataParallel
    shardings: Any = None

    def zeros(self, params: Any, dtypes: Any) -> Any:
        names, size = self.devices.names, self.devices.size

        def zero(p: Any, dtype: Any) -> jax.Array:
            other = _without(names, _spec(sharding_of(p), jnp.ndim(p)))
            shape = (size, *jnp.shape(p))
            sharding = self.devices.sharding(self.devices.entry, *other)
            return _zeros(shape, dtype, sharding, p)

        return jax.tree.map(zero, params, dtypes)

    def total(self, stored: Any) -> Any:
        names = self.devices.names
        leaves, structure = jax.tree.flatten(stored)
        if self.shardings is None:
            specs = [P()] * len(leaves)
        else:
            shardings = jax.tree.leaves(self.shardings, is_leaf=is_sharding)
            specs = [
                P(*_only(names, _spec(sharding, x.ndim - 1)))
                for sharding, x in zip(shardings, leaves, strict=True)
            ]

        def add_up(sums: list[jax.Array]) -> list[jax.Array]:
            return [
                _reduce(jax.lax.squeeze(x, (0,)), names, spec)
                for x, spec in zip(sums, specs, strict=True)
            ]

        over_devices = P(self.devices.entry)
        total = self.devices.map(add_up, in_specs=over_devices, out_specs=specs)(leaves)
        return jax.tree.unflatten(structure, total)


@dataclass(frozen=True, kw_only=True)
class ShardedSums(Sums):
    """One sum for each parameter, spread over the devices as well as it can be.

    Attributes:
      devices: over which they are spread.
      shardings: of the parameters, where known.
    """

    devices: DataParallel
    shardings: Any = None

    def zeros(self, params: Any, dtypes: Any) -> Any:
        def zero(p: Any, dtype: Any) -> jax.Array:
            spec = self._spread(sharding_of(p), jnp.shape(p))
            return _zeros(jnp.shape(p), dtype, self.devices.sharding(*spec), p)

        return self.stored(jax.tree.map(zero, params, dtypes))

    def stored(self, opened: Any) -> Any:
        leaves, structure = jax.tree.flatten(opened)
        if self.shardings is None or all(map(_checks.is_concrete, leaves)):
            return opened
        shardings = jax.tree.leaves(self.shardings, is_leaf=is_sharding)
        mesh = self.devices.mesh
        if is_explicit(mesh):
            mesh = jax.sharding.get_abstract_mesh()
        placed = [
            jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, P(*self._spread(sharding, x.shape)))
            )
            for x, sharding in zip(leaves, shardings, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def _spread(self, sharding: Any, shape: tuple[int, ...]) -> list[Any]:
        """The parameter's spec, with the data axes on the longest axis they divide."""
        spec = _spec(sharding, len(shape))
        sizes = self.devices.mesh.shape
        taken = {name for entry in spec for name in _names(entry)}
        free = tuple(name for name in self.devices.names if name not in taken)
        if not free:
            return spec
        parts = math.prod(sizes[name] for name in free)
        for axis in np.argsort([-n for n in shape], kind="stable"):
            if not spec[axis] and shape[axis] % parts == 0:
                spec[axis] = _entry(free)
                break
        return spec


def over_rows(
    devices: DataParallel | None,
    accumulation: Accumulation,
    placement: Placement | None,
    f: Callable[..., tuple[TokenAccumulationState | Any, Any, Any]],
    opt_state: TokenAccumulationState | None,
    batch: Any,
    *shared: Any,
    axis: int = 0,
) -> Any:
    """`f(accumulation, opt_state, batch, *shared)` of every device's rows.

    Args:
      devices: over which the rows are spread, if any.
      accumulation: handed to `f` as it is seen from a device.
      placement: of the state.
      f: returns a state, what is alike on all devices, and what each has, `beside` the
        others along `axis`.
      opt_state: with or without sums.
      batch: leaves with the rows along `axis`.
      *shared: whole on each device.
      axis: that of the rows.
    """
    if devices is None or not devices.keeps_sums_apart:
        accumulation = over_all(devices, accumulation, placement)
        return f(accumulation, opt_state, batch, *shared)
    on_each = replace(accumulation, sums=SumsPerDevice(Axes(devices.names)))
    everywhere: Any = P()
    state = TokenAccumulationState(*[everywhere] * 8)
    state = state._replace(acc_grads=P(devices.entry))
    rows = jax.tree.map(lambda x: devices.rows_of(x, axis), batch)
    return devices.map(
        functools.partial(f, on_each),
        in_specs=(state if opt_state is not None else P(), rows, *[P()] * len(shared)),
        out_specs=(state, P(), P(*[None] * axis, devices.entry)),
    )(opt_state, batch, *shared)


def over_all(
    devices: DataParallel | None,
    accumulation: Accumulation,
    placement: Placement | None = None,
) -> Accumulation:
    """The accumulation as it is seen from outside of `over_rows`."""
    if devices is None:
        return accumulation
    params = None if placement is None else placement.shardings.params
    kind = SumsOfDevices if devices.keeps_sums_apart else ShardedSums
    return replace(accumulation, sums=kind(devices=devices, shardings=params))


def check_layout(acc_grads: Any, params: Any, devices: DataParallel | None) -> None:
    """Raises `ValueError` where the sums are of another number of devices."""
    lead = (devices.size,) if devices is not None and devices.keeps_sums_apart else ()
    sums = _checks.named_leaves(acc_grads)
    for (path, acc), p in zip(sums, jax.tree.leaves(params), strict=False):
        got, own = jnp.shape(acc), jnp.shape(p)
        if got != (*lead, *own) and own in (got, got[1:]):
            raise ValueError(
                "The sums of the open window must be laid out for this step's devices: "
                f"at {path} of acc_grads expected shape {(*lead, *own)}, got {got}. "
                "Take over the state of a run on others with regroup_sums(state, "
                "step.init(params))."
            )


def _spec(sharding: Any, ndim: int) -> list[Any]:
    """An entry for every axis."""
    given = [] if sharding is None else list(sharding.spec)
    return given + [None] * (ndim - len(given))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _only(names: tuple[str, ...], spec: list[Any]) -> list[Any]:
    kept = [tuple(n for n in _names(entry) if n in names) for entry in spec]
    return [_entry(entry) for entry in kept]


def _without(names: tuple[str, ...], spec: list[Any]) -> list[Any]:
    kept = [tuple(n for n in _names(entry) if n not in names) for entry in spec]
    return [_entry(entry) for entry in kept]


def _entry(names: tuple[str, ...]) -> Any:
    """Of a spec; older jax does not take one name in a tuple for itself."""
    return (names[0] if len(names) == 1 else names) if names else None


def _zeros(shape: Any, dtype: Any, sharding: NamedSharding, like: Any) -> jax.Array:
    """Never on one device first, where they may not fit."""
    if _checks.is_concrete(like):
        return jnp.zeros(shape, dtype, device=sharding)
    return jnp.zeros(shape, dtype)


def _reduce(x: jax.Array, names: tuple[str, ...], spec: P) -> jax.Array:
    """The sum over the devices, each with the part of it that `spec` says."""
    scattered = [(axis, entry) for axis, entry in enumerate(spec) if entry]
    gone = {name for _, entry in scattered for name in _names(entry)}
    rest = tuple(name for name in names if name not in gone)
    for axis, entry in scattered:
        x = jax.lax.psum_scatter(x, entry, scatter_dimension=axis, tiled=True)
    return jax.lax.psum(x, rest) if rest else x
