"""Finds which arrays of a batch have rows, and spreads the rows over devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.shardings import Unknown, names_in, put, sharding_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SpreadRows:
    """A batch on the devices of a step.

    `is_whole` is part of the tree's structure, because inside `jit` arrays on a mesh
    with Auto axes no longer tell how they are placed. It tells for each leaf whether
    every device has all of it. `axis` is the axis of the rows in the other leaves.
    """

    batch: Batch
    is_whole: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    def specs(self, devices: DataParallel) -> Any:
        """The partition specs of the batch."""
        rows = P(*[None] * self.axis, devices.entry)
        specs = [P() if is_whole else rows for is_whole in self.is_whole]
        return jax.tree.unflatten(jax.tree.structure(self.batch), specs)


def spread_rows(
    devices: DataParallel, batch: Batch, axis: int, *, keeps_sums_apart: bool
) -> SpreadRows:
    """Spreads the rows of a batch; arrays that are already on a mesh are not moved.

    Args:
      devices: the devices over which the rows are spread.
      batch: a tree of arrays, or of their shapes. All arrays with a row axis must have
        the same number of rows, except arrays that are placed whole on every device.
      axis: the axis of the rows. Arrays without this axis go to all devices.
      keeps_sums_apart: whether each device sums the gradients of its own rows.
    """
    _check_process(devices, batch)
    is_whole = _which_are_whole(devices, batch, axis, keeps_sums_apart)
    spread = SpreadRows(batch, is_whole, axis)

    def place(x: Any, spec: P) -> Any:
        if _is_on_a_mesh(x) or not trees.is_concrete(x):
            return x
        return put(x, devices.sharding(*spec))

    placed = jax.tree.map(place, batch, spread.specs(devices))
    return dataclasses.replace(spread, batch=placed)


def _check_process(devices: DataParallel, batch: Batch) -> None:
    """Raises if an array is of this process alone, and some devices are not."""
    if devices.sharding().is_fully_addressable:
        return
    for x in jax.tree.leaves(batch):
        is_local = hasattr(x, "__array__") and trees.is_concrete(x)
        if is_local and not _is_on_a_mesh(x):
            if jax.process_count() == 1:
                raise ValueError(
                    "A batch for devices that are not there must be made of shapes: "
                    f"got an array of shape {jnp.shape(x)}. Give lower a "
                    "jax.ShapeDtypeStruct in its place."
                )
            raise ValueError(
                "A batch for the devices of several processes must be made of "
                "arrays over all of them: got one of this process alone, of shape "
                f"{jnp.shape(x)}. Let each process give its rows to "
                "jax.make_array_from_process_local_data."
            )


def _which_are_whole(
    devices: DataParallel, batch: Batch, axis: int, keeps_sums_apart: bool
) -> tuple[bool, ...]:
    leaves = jax.tree.leaves(batch)
    arrays = [i for i, x in enumerate(leaves) if jnp.ndim(x) > axis]
    copies = [i for i in arrays if _is_on_every_device(devices, leaves[i])]
    rows = [i for i in arrays if i not in copies]
    if not rows:  # the caller placed the whole batch on every device
        rows, copies = copies, []
    divide = all(jnp.shape(leaves[i])[axis] % devices.size == 0 for i in rows)
    if rows and not (divide and (devices.size == 1 or not keeps_sums_apart)):
        _check_rows(devices, batch, rows, copies if keeps_sums_apart else [], axis)
    return tuple(i not in rows for i in range(len(leaves)))


def _check_rows(
    devices: DataParallel, batch: Batch, rows: list[int], copies: list[int], axis: int
) -> None:
    """Raises unless the leaves at `rows` have one number of rows to spread.

    The devices must divide that number, and no leaf at `copies` may have it.
    """
    over = f"the {devices.size} devices of data_axes {devices.names}"
    found = [(path, jnp.shape(x)) for path, x in trees.named_leaves(batch)]
    path, shape = found[rows[0]]
    number = shape[axis]
    for i in rows[1:]:
        other, its_shape = found[i]
        if its_shape[axis] != number:
            raise ValueError(
                "All arrays of a micro-batch must have the same number of rows, which "
                f"are spread over {over}: got shape {shape} at {path} and {its_shape} "
                f"at {other}. Give loss_fn what has no rows as a keyword, step(state, "
                "batch, name=array), or place it on every device with "
                "NamedSharding(mesh, PartitionSpec())."
            )
    if number % devices.size:
        raise ValueError(
            f"The rows of a micro-batch must be a multiple of {over}: got {number} "
            f"in an array of shape {shape} at {path}. Add rows without tokens, for "
            f"example by planning with batch_multiple={devices.size}."
        )
    for i in copies:
        other, its_shape = found[i]
        if its_shape[axis] == number:
            raise ValueError(
                "An array that is whole on every device must not have as many rows as "
                f"those that are spread over {over}: got shape {its_shape} at {other}, "
                f"whole, and {shape} at {path}. If these are rows, spread them too; "
                "if not, give them to loss_fn as a keyword, step(state, batch, "
                "name=array)."
            )


def _is_on_a_mesh(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def _is_on_every_device(devices: DataParallel, x: Any) -> bool:
    """Whether `x` is known to be whole on every device of the data axes."""
    sharding = sharding_of(x)
    if isinstance(sharding, Unknown):
        return False
    is_traced = not trees.is_concrete(x)
    if is_traced and not {*devices.names} <= {*sharding.mesh.explicit_axes}:
        return False  # its type does not tell
    spread_over = {name for entry in sharding.spec for name in names_in(entry)}
    return spread_over <= {*devices.mesh.axis_names} - {*devices.names}
