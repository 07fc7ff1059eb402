"""What a loss is given, and where it is on a mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from optax_tokenaccum._core import trees
from optax_tokenaccum._devices.mesh import (
    Devices,
    Entry,
    entry_of,
    is_placed,
    put,
    used,
)


def _static() -> Any:
    return dataclasses.field(metadata={"static": True}, kw_only=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class MicroBatch:
    """What a call gives to a loss besides the parameters and the model's state.

    Of a whole window, it holds the rows of all micro-batches, `[k, micro, ...]`.
    """

    batch: trees.Batch
    rng: trees.Leaf  # one key for all devices, if there is one
    loss_kwargs: Any  # `Keywords`, or a tree that tells of them
    # On a mesh, of each leaf of the batch, whether every device has all of it: inside
    # `jit`, arrays on a mesh with Auto axes no longer tell how they are placed.
    is_replicated: tuple[bool, ...] = _static()
    axis: int = _static()  # of the rows in the other leaves
    entry: Entry = _static()  # the data axes, over which rows are spread

    def specs(self) -> "MicroBatch":
        """How it is spread over the data axes; a prefix of its tree."""
        rows = P(*[None] * self.axis, self.entry)
        specs = [P() if everywhere else rows for everywhere in self.is_replicated]
        batch = jax.tree.structure(self.batch).unflatten(specs)
        return dataclasses.replace(self, batch=batch, rng=P(), loss_kwargs=P())

    def varies_by_device(self) -> "MicroBatch":
        """Of each leaf, whether devices get different values."""
        varies = [not everywhere for everywhere in self.is_replicated]
        return dataclasses.replace(
            jax.tree.map(lambda _: False, self),
            batch=jax.tree.structure(self.batch).unflatten(varies),
            rng=jax.tree.map(lambda _: True, self.rng),
        )

    def with_key_at(self, *position: ArrayLike) -> "MicroBatch":
        """With the key of the micro-batch at `position` in a run, or of a device."""
        if self.rng is None:
            return self
        return dataclasses.replace(self, rng=trees.fold_key(self.rng, *position))


def as_micro_batch(
    batch: trees.Batch,
    rng: jax.Array | None,
    keywords: Any,
    devices: Devices,
    axis: int = 0,
) -> MicroBatch:
    """What a call is given, on the devices of a step; `axis` is that of the rows.

    Rows are spread over the devices; arrays that are on a mesh are not moved.
    """
    trees.check_arrays(batch, "A batch")
    leaves, mesh = jax.tree.leaves(batch), devices.mesh
    if mesh is None:
        return MicroBatch(batch, rng, keywords, is_replicated=(), axis=axis, entry=None)
    everywhere = NamedSharding(mesh, P())
    arrays = [i for i, x in enumerate(leaves) if jnp.ndim(x) > axis]
    copies = [i for i in arrays if _is_replicated(leaves[i], devices.names)]
    rows = [i for i in arrays if i not in copies]
    if not rows:  # the caller placed all of the batch on every device
        rows, copies = copies, []
    if not everywhere.is_fully_addressable:
        _check_are_everywhere(leaves)
    if rows and devices.size > 1:
        _check_rows(batch, rows, copies, axis, devices)
    given = MicroBatch(
        batch,
        *devices.replicate((rng, keywords)),
        is_replicated=tuple(i not in rows for i in range(len(leaves))),
        axis=axis,
        entry=entry_of(devices.names),
    )

    def put_in_place(x: trees.Leaf, spec: P) -> trees.Leaf:
        is_given = is_placed(x) or not trees.is_concrete(x)
        return x if is_given else put(x, NamedSharding(mesh, spec))

    placed = jax.tree.map(put_in_place, batch, given.specs().batch)
    return dataclasses.replace(given, batch=placed)


def _is_replicated(x: trees.Leaf, names: tuple[str, ...]) -> bool:
    """Whether every device of the data axes is known to have all of `x`."""
    sharding = trees.sharding_of(x)
    if sharding is None:
        return False
    if not trees.is_concrete(x) and not {*names} <= {*sharding.mesh.explicit_axes}:
        return False  # its type does not tell
    return used(sharding).isdisjoint(names)


def _check_are_everywhere(leaves: list[trees.Leaf]) -> None:
    # Each process would take its own rows for those of all of them.
    for x in leaves:
        if hasattr(x, "__array__") and trees.is_concrete(x) and not is_placed(x):
            raise ValueError(
                "On devices of several processes, a batch must be of arrays over all "
                f"of them: got one of this process alone, {jnp.shape(x)}. Give its "
                "rows to jax.make_array_from_process_local_data."
            )


def _check_rows(
    batch: trees.Batch, rows: list[int], copies: list[int], axis: int, devices: Devices
) -> None:
    """Raises `ValueError` unless the rows can be spread over the devices.

    `rows` and `copies` are the indices of leaves with rows, and of leaves that are
    whole on every device.
    """
    found = [(path, jnp.shape(x)) for path, x in trees.named_leaves(batch)]
    divide = all(found[i][1][axis] % devices.size == 0 for i in rows)
    if divide and not devices.device_axis:
        return
    path, shape = found[rows[0]]
    for i in [*rows, *(copies if devices.device_axis else [])]:
        other, its_shape = found[i]
        if (its_shape[axis] == shape[axis]) == (i in copies):
            raise ValueError(
                "All arrays of a micro-batch must have the same number of rows, and "
                f"arrays that are whole on every device another one: got {shape} at "
                f"{path}, {its_shape} at {other}{', whole' if i in copies else ''}. "
                "Give loss_fn what has no rows as a keyword, step(state, batch, "
                "name=array)."
            )
    if not divide:
        raise ValueError(
            f"The rows of a micro-batch must be a multiple of {devices.size}, the "
            f"devices along {devices.names}: got shape {shape} at {path}. Add rows "
            "without tokens."
        )
