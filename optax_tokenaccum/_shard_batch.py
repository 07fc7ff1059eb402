"""What a loss is given, and where it is on a mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from optax_tokenaccum._devices import Devices, Entry, entry_of, is_placed, put, used
from optax_tokenaccum._keywords import Keywords, as_keywords
from optax_tokenaccum._trees import (
    Batch,
    Leaf,
    ModelState,
    Tree,
    check_arrays,
    fold_key,
    is_concrete,
    is_key,
    named_leaves,
    sharding_of,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Rows:
    """A batch on the devices of a step.

    On a mesh, `is_whole` tells for each leaf whether every device has all of it: inside
    `jit`, arrays on a mesh with Auto axes no longer tell how they are placed. `axis` is
    the axis of the rows in the other leaves, spread over the data axes of `entry`.
    """

    batch: Batch
    is_whole: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    entry: Entry = dataclasses.field(metadata={"static": True})

    def specs(self) -> Batch:
        rows = P(*[None] * self.axis, self.entry)
        specs = [P() if is_whole else rows for is_whole in self.is_whole]
        return jax.tree.unflatten(jax.tree.structure(self.batch), specs)


class Inputs(NamedTuple):
    """What a loss is given besides the parameters, or a tree that tells of each."""

    model_state: ModelState
    batch: Batch
    rng: Tree
    loss_kwargs: Any  # `Keywords`, or a tree that tells of them


class MicroBatch(NamedTuple):
    """What a call gives to a loss.

    Of a whole window, it holds the rows of all micro-batches, `[k, micro, ...]`.
    """

    rows: Rows
    rng: jax.Array | None  # one key for all devices, if there is one
    loss_kwargs: Keywords

    def inputs(self, model_state: ModelState) -> Inputs:
        return Inputs(model_state, self.rows.batch, self.rng, self.loss_kwargs)

    def specs(self) -> Inputs:
        """How the inputs are spread over the data axes, as prefixes of their trees."""
        everywhere = Inputs(*[P()] * len(Inputs._fields))
        return everywhere._replace(batch=self.rows.specs())

    def differ(self, model_state: ModelState) -> Inputs:
        """Of each leaf of the inputs, whether devices get different values."""
        is_whole = jax.tree.structure(self.rows.batch).unflatten(self.rows.is_whole)
        same = jax.tree.map(lambda _: False, self.inputs(model_state))
        return same._replace(
            model_state=jax.tree.map(is_key, model_state),
            batch=jax.tree.map(lambda whole: not whole, is_whole),
            rng=jax.tree.map(lambda _: True, self.rng),
        )

    def at(self, *position: ArrayLike) -> "MicroBatch":
        """With the key of the micro-batch at `position` in a run or a window."""
        if self.rng is None:
            return self
        return self._replace(rng=fold_key(self.rng, *position))


def as_micro_batch(
    batch: Batch,
    rng: jax.Array | None,
    loss_kwargs: dict[str, Tree],
    devices: Devices,
    axis: int = 0,
) -> MicroBatch:
    """What a call is given, on the devices of a step; `axis` is that of the rows."""
    check_arrays(batch, "A batch")
    rest = devices.replicate((rng, as_keywords(loss_kwargs)))
    return MicroBatch(shard_rows(batch, devices, axis), *rest)


def shard_rows(batch: Batch, devices: Devices, axis: int = 0) -> Rows:
    """Spreads the rows of a batch; arrays that are on a mesh are not moved."""
    mesh = devices.mesh
    if mesh is None:
        return Rows(batch, (), axis, None)
    leaves = jax.tree.leaves(batch)
    everywhere = NamedSharding(mesh, P())
    arrays = [i for i, x in enumerate(leaves) if jnp.ndim(x) > axis]
    copies = [i for i in arrays if _is_whole(leaves[i], devices.names)]
    rows = [i for i in arrays if i not in copies]
    if not rows:  # the caller placed the whole batch on every device
        rows, copies = copies, []
    if not everywhere.is_fully_addressable:
        _check_are_everywhere(leaves)
    if rows and devices.size > 1:
        _check_rows(batch, rows, copies, axis, devices)
    is_whole = tuple(i not in rows for i in range(len(leaves)))
    spread = Rows(batch, is_whole, axis, entry_of(devices.names))

    def place(x: Leaf, spec: P) -> Leaf:
        is_given = is_placed(x) or not is_concrete(x)
        return x if is_given else put(x, NamedSharding(mesh, spec))

    placed = jax.tree.map(place, batch, spread.specs())
    return dataclasses.replace(spread, batch=placed)


def _is_whole(x: Leaf, names: tuple[str, ...]) -> bool:
    """Whether `x` is known to be whole on every device of the data axes."""
    sharding = sharding_of(x)
    if sharding is None:
        return False
    if not is_concrete(x) and not {*names} <= {*sharding.mesh.explicit_axes}:
        return False  # its type does not tell
    return used(sharding).isdisjoint(names)


def _check_are_everywhere(leaves: list[Leaf]) -> None:
    """Raises `ValueError` for arrays of this process alone, if devices are elsewhere.

    Each process would take its own rows for those of all of them.
    """
    for x in leaves:
        if hasattr(x, "__array__") and is_concrete(x) and not is_placed(x):
            raise ValueError(
                "On devices of several processes, a batch must be of arrays over all "
                f"of them: got one of this process alone, {jnp.shape(x)}. Give its "
                "rows to jax.make_array_from_process_local_data."
            )


def _check_rows(
    batch: Batch, rows: list[int], copies: list[int], axis: int, devices: Devices
) -> None:
    """Raises `ValueError` unless the rows can be spread over the devices.

    `rows` and `copies` are the indices of leaves with rows, and of leaves that are
    whole on every device.
    """
    found = [(path, jnp.shape(x)) for path, x in named_leaves(batch)]
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
