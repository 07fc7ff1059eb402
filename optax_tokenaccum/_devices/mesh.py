"""Data parallelism over a mesh: placing rows, sums and parameters."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import overwritten, trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.loss import Output
from optax_tokenaccum._core.trees import DType, OptState, Params
from optax_tokenaccum._devices.shardings import (
    Unknown,
    entries_of,
    entry_of,
    is_explicit,
    names_in,
    only,
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
    def entry(self) -> Any:
        """The entry in a partition spec for an axis that is spread over the devices."""
        return entry_of(self.names)

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def rows_spec(self, axis: int) -> P:
        """The spec of what is spread over the devices along `axis`."""
        return P(*[None] * axis, self.entry)

    def map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Applies `f` to each device's part; other axes are left to the compiler.

        Types in `f` do not mark values that differ between devices (`check_vma=False`).
        With marks, a `loss_fn` with a loop that starts from zeros would have to cast
        these zeros first.
        """
        return jax.shard_map(
            f,
            # Under auto_axes the mesh must be the one of the context.
            mesh=None if is_explicit(self.mesh) else self.mesh,
            axis_names={*self.names},
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def spread(self, x: Any, sharding: NamedSharding | Unknown) -> list[Any]:
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

    def place(self, params: Params) -> Params:
        """Places the parameters on the mesh, unless they are on it already."""

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

    def init(self, init: Callable[[Params], OptState], params: Params) -> OptState:
        is_traced = not all(map(trees.is_concrete, jax.tree.leaves(params)))
        # An optimizer's init may make arrays from those that the mesh's types bind.
        binds = is_explicit(self.mesh) and not is_traced
        with jax.set_mesh(self.mesh) if binds else contextlib.nullcontext():
            return init(params)

    def auto(
        self, f: Callable[..., Output], shardings: Any, aux: P
    ) -> Callable[..., Output]:
        """`f`, whose outputs alone have shardings in their types, on an Explicit mesh.

        `shardings` are those of `Output.state`, where known.
        """
        if not is_explicit(self.mesh):
            return f
        explicit = self.mesh.explicit_axes

        def in_types(sharding: Any) -> NamedSharding:
            return self.sharding(*only(explicit, [*sharding.spec]))

        state = same = self.sharding()
        if shardings is not None:
            state = jax.tree.map(in_types, shardings)
        own = self.sharding(*only(explicit, [*aux]))
        auto_axes: Any = jax.sharding.auto_axes
        return auto_axes(f, out_sharding=Output(state, same, own))


def zeros_on(
    sharding: NamedSharding, shape: tuple[int, ...], dtype: DType, like: jax.Array
) -> jax.Array:
    """Zeros that are never made on one device first, where they may not fit."""
    if trees.is_concrete(like):
        return jnp.zeros(shape, dtype, device=sharding)
    return jnp.zeros(shape, dtype)


def split_shardings(layout: Any, params: Params) -> tuple[Layout, Layout]:
    """`Layout.split` of a layout that knows the parameters' shardings."""
    if layout.shardings is None:
        return layout, layout
    trained, values = overwritten.split(layout.shardings, params)
    return replace(layout, shardings=trained), replace(layout, shardings=values)
