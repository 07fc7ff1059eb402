"""Rows spread over devices: each sums the gradients of its own, and they meet once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Params
from optax_tokenaccum._devices.shardings import (
    entries_of,
    entry_of,
    is_explicit,
    names_in,
)


@dataclass(frozen=True)
class DataParallel:
    """The part of a mesh over which rows are spread.

    Attributes:
      mesh: all devices, with axes for other kinds of parallelism perhaps.
      names: of the axes over which rows are spread.
    """

    mesh: Mesh
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """The parts that the rows are cut into."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def entry(self) -> Any:
        """What a spec has for an axis that is spread over the devices."""
        return entry_of(self.names)

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

    def spread(self, x: Any, sharding: NamedSharding | None) -> list[Any]:
        """The spec of `x` with the data axes on the longest axis that they divide.

        Args:
          x: a parameter or its sum.
          sharding: of the parameter.
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

    def place_params(self, params: Params) -> Any:
        """The parameters on the mesh, as they are where they are on it already.

        Raises:
          ValueError: some are on another mesh.
        """

        def place(path: str, x: Any) -> Any:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                return jax.device_put(x, self.sharding())
            if trees.is_concrete(x) and sharding.mesh != self.mesh:
                raise ValueError(
                    "The parameters must be on the mesh given to the step, or on a "
                    f"single device: at {path} got {sharding.mesh}, the step has "
                    f"{self.mesh}. Make one mesh, and use it for both."
                )
            return x

        leaves = [place(path, x) for path, x in trees.named_leaves(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)
