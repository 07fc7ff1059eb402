"""Partition specs, and the rows of a batch on a mesh."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._trees import Batch, Leaf, is_concrete, named_leaves

Entry = str | tuple[str, ...] | None  # an axis of a partition spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A batch on the devices of a step.

    `is_whole` tells for each leaf whether every device has all of it: inside `jit`,
    arrays on a mesh with Auto axes no longer tell how they are placed. `axis` is the
    axis of the rows in the other leaves.
    """

    batch: Batch
    is_whole: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    def specs(self, entry: Entry) -> Batch:
        rows = P(*[None] * self.axis, entry)
        specs = [P() if is_whole else rows for is_whole in self.is_whole]
        return jax.tree.unflatten(jax.tree.structure(self.batch), specs)


def check_are_everywhere(batch: Batch, everywhere: NamedSharding) -> None:
    """Raises `ValueError` for arrays of this process alone, if devices are elsewhere.

    Each process would take its own rows for those of all of them.
    """
    if everywhere.is_fully_addressable:
        return
    for x in jax.tree.leaves(batch):
        is_local = hasattr(x, "__array__") and is_concrete(x)
        if not is_local or isinstance(getattr(x, "sharding", None), NamedSharding):
            continue
        if jax.process_count() == 1:
            raise ValueError(
                "A batch for devices that are not there must be made of shapes: got an "
                f"array of shape {jnp.shape(x)}. Give lower a jax.ShapeDtypeStruct in "
                "its place."
            )
        raise ValueError(
            "A batch for the devices of several processes must be made of arrays over "
            f"all of them: got one of this process alone, of shape {jnp.shape(x)}. Let "
            "each process give its rows to jax.make_array_from_process_local_data."
        )


def check_rows(
    batch: Batch,
    rows: list[int],
    copies: list[int],
    axis: int,
    names: tuple[str, ...],
    size: int,
) -> None:
    """Raises `ValueError` unless rows can be spread over `size` devices of `names`.

    Args:
      batch: the batch.
      rows: the indices of leaves with rows.
      copies: those of leaves that are whole on every device.
      axis: of the rows.
      names: the data axes.
      size: the number of devices along them.
    """
    over = f"the {size} devices of data_axes {names}"
    found = [(path, jnp.shape(x)) for path, x in named_leaves(batch)]
    path, shape = found[rows[0]]
    for other, its_shape in [found[i] for i in rows]:
        if its_shape[axis] != shape[axis]:
            raise ValueError(
                "All arrays of a micro-batch must have the same number of rows, which "
                f"are spread over {over}: got shape {shape} at {path} and {its_shape} "
                f"at {other}. Give loss_fn what has no rows as a keyword, step(state, "
                "batch, name=array), or place it on every device with "
                "NamedSharding(mesh, PartitionSpec())."
            )
    for other, its_shape in [found[i] for i in copies]:
        if its_shape[axis] == shape[axis]:
            raise ValueError(
                "An array that is whole on every device must not have as many rows as "
                f"those that are spread over {over}: got shape {its_shape} at {other}, "
                f"whole, and {shape} at {path}. If these are rows, spread them too; "
                "if not, give them to loss_fn as a keyword, step(state, batch, "
                "name=array)."
            )
    if shape[axis] % size:
        raise ValueError(
            f"The rows of a micro-batch must be a multiple of {over}: got "
            f"{shape[axis]} in an array of shape {shape} at {path}. Add rows "
            f"without tokens, for example by planning with batch_multiple={size}."
        )


def entries_of(sharding: NamedSharding | None, ndim: int) -> list[Entry]:
    """The entries of a sharding's spec, one for each axis."""
    given = [] if sharding is None else list(sharding.spec)
    return given + [None] * (ndim - len(given))


def names_in(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def used(sharding: NamedSharding | None) -> set[str]:
    return {n for entry in entries_of(sharding, 0) for n in names_in(entry)}


def only(names: Sequence[str], spec: Iterable[Entry]) -> list[Entry]:
    """A partition spec without other names than `names`."""
    return [entry_of(tuple(n for n in names_in(x) if n in names)) for x in spec]


def without(names: Sequence[str], spec: Iterable[Entry]) -> list[Entry]:
    return [entry_of(tuple(n for n in names_in(x) if n not in names)) for x in spec]


def entry_of(names: tuple[str, ...]) -> Entry:
    """The spec entry for `names`; older jax distinguishes `("x",)` from `"x"`."""
    return (names[0] if len(names) == 1 else names) if names else None


def put(x: Leaf, sharding: jax.sharding.Sharding | None) -> Any:
    """An array that is moved, or a shape that says where its array would be."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
