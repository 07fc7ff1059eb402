"""Data parallelism over a mesh: the devices over which rows are spread."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from optax_tokenaccum._core.trees import T
from optax_tokenaccum._devices.shardings import (
    Entry,
    Unknown,
    entries_of,
    entry_of,
    is_explicit,
    names_in,
)


@dataclass(frozen=True)
class DataParallel:
    """The part of a mesh over which rows are spread."""

    mesh: Mesh  # all devices, possibly with axes for other kinds of parallelism
    names: tuple[str, ...]  # the axes over which rows are spread

    @property
    def size(self) -> int:
        """The number of parts into which the rows are split."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def entry(self) -> Entry:
        """The entry in a partition spec for an axis that is spread over the devices."""
        return entry_of(self.names)

    def sharding(self, *spec: Entry) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def rows_spec(self, axis: int) -> P:
        """The spec of what is spread over the devices along `axis`."""
        return P(*[None] * axis, self.entry)

    def map(
        self,
        f: Callable[..., T],
        in_specs: Any,
        out_specs: Any,
        axes: Iterable[str] | None = None,
    ) -> Callable[..., T]:
        """Applies `f` to each device's part.

        Other axes than `axes`, by default the data axes, are left to the compiler.

        Types in `f` do not mark values that differ between devices (`check_vma=False`).
        With marks, a `loss_fn` with a loop that starts from zeros would have to cast
        these zeros first.
        """
        return jax.shard_map(
            f,
            # Under auto_axes the mesh must be the one of the context.
            mesh=None if is_explicit(self.mesh) else self.mesh,
            axis_names={*(self.names if axes is None else axes)},
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def spread(self, x: ArrayLike, sharding: NamedSharding | Unknown) -> list[Entry]:
        """The spec of `x` with the data axes on the longest axis that they divide.

        `x` is a parameter or its sum; `sharding` is the parameter's.
        """
        shape = jnp.shape(x)
        spec = entries_of(sharding, len(shape))
        taken = {name for entry in spec for name in names_in(entry)}
        free = tuple(name for name in self.names if name not in taken)
        parts = math.prod(self.mesh.shape[name] for name in free)
        for axis in np.argsort([-n for n in shape], kind="stable"):
            if free and not spec[axis] and shape[axis] % parts == 0:
                spec[axis] = entry_of(free)
                break
        return spec
