"""A mesh of devices: where parameters, their sums and results are placed.

With `reduce_every="window"` each device has a sum of its own, and the sums are reduced
when the window closes. With `"micro_batch"` the compiler sees all rows, and the sums
are only placed.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import DType, Leaf, Params, T, Tree

ReduceEvery = Literal["window", "micro_batch"]
Entry = str | tuple[str, ...] | None  # an axis of a partition spec
# Of each parameter, if it is known; `None` for all if none is.
Shardings = Sequence[NamedSharding | None] | None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices over which rows are spread; none of them without a mesh."""

    mesh: Mesh | None = None
    names: tuple[str, ...] = ()  # the data axes; others are left to the compiler
    size: int = 1  # the number of devices along them
    # The axes of a sum before those of its parameter: `(size,)` if each device sums
    # its own gradients.
    device_axis: tuple[int, ...] = ()
    warns: bool = False  # that parameters are spread, and sums are not

    def place(self, tree: T) -> T:
        """Arrays on the mesh stay where they are; others go to all devices."""
        if self.mesh is None:
            return tree
        leaves = []
        for path, x in trees.named_leaves(tree):
            if not is_placed(x):
                x = put(x, self._sharding())
            elif trees.is_concrete(x) and x.sharding.mesh != self.mesh:
                raise ValueError(
                    "Parameters must be on the mesh of the step, or on one device: at "
                    f"{path} got {x.sharding.mesh}, the step has {self.mesh}."
                )
            leaves.append(x)
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def replicate(self, tree: T) -> T:
        """Arrays that are bound to one device, on all devices of the mesh."""
        if self.mesh is None:
            return tree

        def move(x: Leaf) -> Leaf:
            is_bound = trees.is_concrete(x) and getattr(x, "committed", False)
            return put(x, self._sharding()) if is_bound and not is_placed(x) else x

        return jax.tree.map(move, tree)

    def init(self, init: Callable[[Params], T], params: Params) -> T:
        """What `init` makes of parameters that are placed; laid out like the sums."""
        leaves = jax.tree.leaves(params)
        if self.mesh is None or not all(map(trees.is_concrete, leaves)):
            return init(params)
        if not self.device_axis:
            params = jax.tree.map(lambda x: put(x, self._sharding_of_sum(x)), params)
        # An optimizer's init may make arrays from those that the mesh's types bind.
        are_arrays = all(isinstance(x, jax.Array) for x in leaves)
        binds = trees.is_explicit(self.mesh) and are_arrays
        with jax.set_mesh(self.mesh) if binds else contextlib.nullcontext():
            return init(params)

    def zeros(self, params: Params, dtypes: Tree) -> Params:
        """Zeros for the sums, `[devices, ...]` where each device has its own."""

        def zero(p: Leaf, dtype: DType) -> Leaf:
            if self.mesh is None:
                return jnp.zeros_like(p, dtype)
            shape = *self.device_axis, *jnp.shape(p)
            sharding = self._sharding_of_sum(p)
            # Never made on one device first, where it may not fit.
            if trees.is_concrete(p):
                return jnp.zeros(shape, dtype, device=sharding)
            zeros, known = jnp.zeros(shape, dtype), trees.sharding_of(p)
            if known is None:
                return zeros
            sharding = NamedSharding(known.mesh, sharding.spec)
            return jax.sharding.reshard(zeros, sharding)

        return jax.tree.map(zero, params, dtypes)

    def flatten_device_axis(
        self, sums: Params, params: Params, shardings: Shardings
    ) -> tuple[Params, list[bool], Callable[[Params], Params]]:
        """The sums as arrays that the gradients of all devices can be added to.

        Returns `(flat sums, are_spread, stack)`. The flags say, for each sum, whether
        further devices share its first axis. `stack` also restores shardings.
        """
        leaves, structure = jax.tree.flatten(sums)
        shapes = [*map(jnp.shape, jax.tree.leaves(params))]
        known = shardings or [None] * len(shapes)
        specs = [*map(self._spec, shapes, known)]

        def is_spread(spec: list[Entry], sharding: NamedSharding | None) -> bool:
            mesh: Any = self.mesh or (sharding and sharding.mesh)
            first = spec[len(self.device_axis) :][:1]  # of the parameter itself
            return any(mesh.shape[n] > 1 for x in first for n in names_in(x))

        # A device's own sums are `[1, n, ...]` of `[devices, n, ...]`. The gradient of
        # its copy of a parameter is a block of `[devices * n, ...]`, which is what the
        # `shard_map` in the loss takes. To merge the two axes moves nothing: the data
        # axes stay first in the spec, before those over which `n` is spread.
        def flat(x: jax.Array, spec: list[Entry]) -> jax.Array:
            if x.ndim == 1 or not self.device_axis:
                return x
            _, first, *rest = spec
            x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            merged = entry_of((*self.names, *names_in(first)))
            return self._constrain(x, [merged, *rest])

        def stacked(x: jax.Array, spec: list[Entry], shape: tuple[int, ...]) -> Leaf:
            x = x.reshape(*self.device_axis, *shape) if self.device_axis else x
            holds = self.mesh is not None and shardings is not None
            return self._constrain(x, spec) if holds else x

        def stack(sums: Params) -> Params:
            leaves = jax.tree.leaves(sums)
            return structure.unflatten(map(stacked, leaves, specs, shapes))

        are_spread = [shardings is not None and x for x in map(is_spread, specs, known)]
        return structure.unflatten(map(flat, leaves, specs)), are_spread, stack

    def constrain(
        self, params: T, shardings: Shardings, *, like_sums: bool = False
    ) -> T:
        """Parameters in their own shardings, or laid out like the sums."""
        if self.mesh is None or self.device_axis or shardings is None:
            return params

        def placed(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
            of_sum, own = self._spec(x.shape, sharding), entries_of(sharding, x.ndim)
            return self._constrain(x, of_sum if like_sums else own)

        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(map(placed, leaves, shardings))

    def reduce_over_devices(self, sums: Params, shardings: Shardings) -> Params:
        """The sums over all devices: called once, when the window closes.

        Each device gets the part of a sum that it has of the parameter.
        """
        if self.mesh is None or not self.device_axis:
            return sums
        leaves, structure = jax.tree.flatten(sums)
        known = shardings or [None] * len(leaves)
        given = [*zip((x.shape[1:] for x in leaves), known, strict=True)]
        specs = [entries_of(sharding, len(shape)) for shape, sharding in given]

        def add_up(sums: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(sums, specs, strict=True)
            return [self._reduced(x.reshape(x.shape[1:]), spec) for x, spec in pairs]

        def last(entry: Entry) -> Entry:
            """With the data axes last, where a scatter puts them."""
            return entry_of(tuple(sorted(names_in(entry), key=self.names.__contains__)))

        # If shardings are known, map over all axes: XLA would gather an array that is
        # spread over an axis left to the compiler before scattering it over another.
        sums = over_devices(
            add_up,
            self.mesh,
            self.names if shardings is None else self.mesh.axis_names,
            in_specs=([P(*self._spec(*x)) for x in given],),
            out_specs=[P(*map(last, spec)) for spec in specs],
        )(leaves)
        return structure.unflatten(sums)

    def _reduced(self, x: jax.Array, spec: list[Entry]) -> jax.Array:
        """The sum over the devices; each device keeps its part according to `spec`."""
        rest = self.names
        for axis, entry in enumerate(only(self.names, spec)):
            if entry is not None:
                x = jax.lax.psum_scatter(x, entry, scatter_dimension=axis, tiled=True)
                rest = tuple(name for name in rest if name not in names_in(entry))
        return jax.lax.psum(x, rest) if rest else x

    def of_rows(self, axis: int) -> NamedSharding | None:
        """The sharding of rows along `axis`, if each device has its own."""
        if not self.device_axis:
            return None
        return self._sharding(*[None] * axis, entry_of(self.names))

    def _sharding(self, *spec: Entry) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, P(*spec))

    def _sharding_of_sum(self, p: Leaf) -> NamedSharding:
        return self._sharding(*self._spec(jnp.shape(p), trees.sharding_of(p)))

    def _spec(
        self, shape: tuple[int, ...], sharding: NamedSharding | None
    ) -> list[Entry]:
        """The spec of the sum of a parameter with this shape and sharding."""
        spec = entries_of(sharding, len(shape))
        if self.mesh is None:
            return spec
        # The first axis has one element for each device. The others are spread as the
        # parameter is, except over the data axes, which are used up.
        if self.device_axis:
            others = [name for name in self.mesh.axis_names if name not in self.names]
            return [entry_of(self.names), *only(others, spec)]
        # ZeRO-2: data axes that the parameter leaves free spread the longest axis of
        # its sum that they divide, so that each gradient is scattered instead of copied
        # to all devices.
        free = tuple(n for n in self.names if n not in used(sharding))
        parts = math.prod(self.mesh.shape[name] for name in free)
        for axis in np.argsort([-n for n in shape], kind="stable"):
            if free and not spec[axis] and shape[axis] % parts == 0:
                spec[axis] = entry_of(free)
                break
        return spec

    def _constrain(self, x: jax.Array, spec: Sequence[Entry]) -> jax.Array:
        mesh: Any = self.mesh
        if trees.is_concrete(x):
            return x
        if trees.is_explicit(mesh):  # under auto_axes, which replaces the mesh
            mesh = jax.sharding.get_abstract_mesh()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def make_devices(
    mesh: Mesh | None,
    data_axes: str | Sequence[str] | None,
    reduce_every: ReduceEvery | None,
) -> Devices:
    """Checks the arguments of steps about devices."""
    if reduce_every not in (None, "window", "micro_batch"):
        raise ValueError(
            f"reduce_every must be 'window' or 'micro_batch': got {reduce_every!r}."
        )
    if (mesh is None) != (data_axes is None) or (mesh is None and reduce_every):
        raise ValueError("mesh and data_axes go together, and reduce_every needs both.")
    if mesh is None:
        return Devices()
    names = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes or ())
    if not names or not {*names} <= {*mesh.axis_names}:
        raise ValueError(
            f"data_axes must be of the mesh's {mesh.axis_names}: got {data_axes!r}."
        )
    size = math.prod(mesh.shape[name] for name in names)
    device_axis = () if reduce_every == "micro_batch" else (size,)
    return Devices(mesh, names, size, device_axis, warns=reduce_every is None)


def over_devices(
    f: Callable[..., T],
    mesh: Mesh | None,
    names: Sequence[str],
    in_specs: Tree,
    out_specs: Tree,
) -> Callable[..., T]:
    """Applies `f` to each device's part along these axes."""
    return jax.shard_map(
        f,
        # Under auto_axes the mesh must be the one of the context.
        mesh=None if trees.is_explicit(mesh) else mesh,
        axis_names={*names},
        in_specs=in_specs,
        out_specs=out_specs,
        # Types do not mark values that differ between devices: with marks, a `loss_fn`
        # with a loop that starts from zeros would have to cast these zeros first.
        check_vma=False,
    )


def with_auto_axes(
    f: Callable[..., T], devices: Devices, out: Tree
) -> Callable[..., T]:
    """`f`, with the compiler choosing shardings on an Explicit mesh too.

    `out` is a prefix of the tree that `f` returns, of the shardings that are known.
    """
    mesh = devices.mesh
    if mesh is None or not trees.is_explicit(mesh):
        return f
    names = mesh.explicit_axes

    def in_types(x: NamedSharding | None) -> NamedSharding:
        return NamedSharding(mesh, P(*only(names, x.spec if x else ())))

    out = jax.tree.map(in_types, out, is_leaf=lambda x: x is None)
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(f, out_sharding=out)


def warn_of_whole_sums(devices: Devices, params: Params) -> bool:
    """Warns if parameters are spread over the data axes, and sums are not."""
    leaves = jax.tree.leaves(params) if devices.warns else []
    over = [x for x in leaves if {*devices.names} & used(trees.sharding_of(x))]
    if over:
        warnings.warn(
            f"Parameters are spread over data_axes {devices.names}, and every device "
            f"keeps whole sums of their gradients, {sum(4 * x.size for x in over):,} "
            'bytes. reduce_every="micro_batch" spreads them (FSDP); '
            'reduce_every="window" keeps them whole without this warning.',
            stacklevel=3,  # the caller of `init`
        )
    return bool(over)


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


def entry_of(names: tuple[str, ...]) -> Entry:
    """The spec entry for `names`; older jax distinguishes `("x",)` from `"x"`."""
    return (names[0] if len(names) == 1 else names) if names else None


def is_placed(x: Leaf) -> bool:
    """Whether `x` is an array on a mesh."""
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def put(x: Leaf, sharding: jax.sharding.Sharding | None) -> Leaf:
    """An array that is moved, or a shape that says where its array would be."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)
