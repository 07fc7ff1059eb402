"""How a step runs on its devices, from the arguments of its constructor."""

from collections.abc import Sequence
from typing import Literal

from jax.sharding import Mesh

from optax_tokenaccum._devices.axes import as_names
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.one_device import OneDevice
from optax_tokenaccum._devices.sum_on_each import SumOnEach
from optax_tokenaccum._devices.sum_over_all import SumOverAll

Mode = OneDevice | SumOnEach | SumOverAll
ReduceEvery = Literal["window", "micro_batch"]


def make_mode(
    mesh: Mesh | None,
    data_axes: str | Sequence[str] | None,
    reduce_every: ReduceEvery | None,
) -> Mode:
    """Checks the arguments of steps about devices."""
    if reduce_every not in (None, "window", "micro_batch"):
        raise ValueError(
            "reduce_every must be 'window' or 'micro_batch', when the devices' sums "
            f"are reduced: got {reduce_every!r}."
        )
    if mesh is None and data_axes is None:
        if reduce_every == "micro_batch":
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
    if reduce_every == "micro_batch":
        return SumOverAll(devices)
    return SumOnEach(devices, is_chosen=reduce_every is not None)
