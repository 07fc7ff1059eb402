"""A mesh of devices: where arrays are placed, and the loss of copies of parameters.

`reduce_every="window"` is a change of variables: the loss is differentiated with
respect to a copy of the parameters on each device, and the gradient of a copy is the
gradient of this device's rows. The `shard_map` is inside of the loss, so that the core
sees a scalar loss and a tree of arrays. With `"micro_batch"` the compiler sees all
rows, and the sums are only placed.
"""

import contextlib
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._rows import (
    Entry,
    Rows,
    check_are_everywhere,
    check_rows,
    entries_of,
    entry_of,
    names_in,
    only,
    put,
    used,
    without,
)
from optax_tokenaccum._scans import Traced, TwinArrays, equations, exchanges
from optax_tokenaccum._trees import (
    Batch,
    DType,
    Leaf,
    ModelState,
    Params,
    T,
    Tree,
    at_least_float32,
    is_concrete,
    is_explicit,
    is_float,
    is_key,
    named_leaves,
    sharding_of,
)

ReduceEvery = Literal["window", "micro_batch"]
# `loss(params, model_state, batch, rng, loss_kwargs) -> (loss_sum, (num_tokens, (aux,
# changes of the model state)))`.
LossOfRows = Callable[..., tuple[jax.Array, tuple[jax.Array, Tree]]]
# Of each parameter, if it is known; `None` for all if none is.
Shardings = Sequence[NamedSharding | None] | None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices over which rows are spread; none of them without a mesh."""

    mesh: Mesh | None = None
    names: tuple[str, ...] = ()  # the data axes; others are left to the compiler
    keeps_sums_apart: bool = False  # whether each device sums its own gradients
    warns: bool = False  # that parameters are spread, and sums are not

    @property
    def size(self) -> int:
        return math.prod(self.mesh.shape[n] for n in self.names) if self.mesh else 1

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes that a sum has before those of its parameter."""
        return (self.size,) * self.keeps_sums_apart

    @property
    def entry(self) -> Entry:
        return entry_of(self.names)

    @property
    def _known_mesh(self) -> Mesh:
        assert self.mesh is not None
        return self.mesh

    def sharding(self, *spec: Entry) -> NamedSharding:
        return NamedSharding(self._known_mesh, P(*spec))

    def map(
        self,
        f: Callable[..., T],
        in_specs: Tree,
        out_specs: Tree,
        names: Sequence[str] | None = None,
    ) -> Callable[..., T]:
        """Applies `f` to each device's part; other axes are left to the compiler.

        Types do not mark values that differ between devices: with marks, a `loss_fn`
        with a loop that starts from zeros would have to cast these zeros first.
        """
        return jax.shard_map(
            f,
            # Under auto_axes the mesh must be the one of the context.
            mesh=None if is_explicit(self.mesh) else self.mesh,
            axis_names={*(self.names if names is None else names)},
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def auto(self, f: Callable[..., T], out: Any) -> Callable[..., T]:
        """`f`, with the compiler choosing shardings on an Explicit mesh too.

        `out` is a prefix of the result's tree, of the shardings that are known.
        """
        if not is_explicit(self.mesh):
            return f
        explicit = self._known_mesh.explicit_axes

        def in_types(x: NamedSharding | None) -> NamedSharding:
            return self.sharding(*(only(explicit, x.spec) if x else ()))

        out = jax.tree.map(in_types, out, is_leaf=lambda x: x is None)
        auto_axes: Any = jax.sharding.auto_axes
        return auto_axes(f, out_sharding=out)

    def of_aux(self, axis: int) -> NamedSharding | None:
        """The sharding of what devices return, as far as it is known."""
        apart = self.keeps_sums_apart
        return self.sharding(*[None] * axis, self.entry) if apart else None

    def place(self, tree: T) -> T:
        """Arrays on the mesh stay where they are; others go to all devices."""
        if self.mesh is None:
            return tree
        for path, x in named_leaves(tree):
            sharding: Any = getattr(x, "sharding", None)
            is_placed = isinstance(sharding, NamedSharding) and is_concrete(x)
            if is_placed and sharding.mesh != self.mesh:
                raise ValueError(
                    "The parameters must be on the mesh given to the step, or on a "
                    f"single device: at {path} got {sharding.mesh}, the step has "
                    f"{self.mesh}. Make one mesh, and use it for both."
                )

        def place(x: Leaf) -> Leaf:
            is_placed = isinstance(getattr(x, "sharding", None), NamedSharding)
            return x if is_placed else put(x, self.sharding())

        return jax.tree.map(place, tree)

    def init(self, init: Callable[[Params], T], params: Params) -> T:
        """What `init` makes of parameters that are placed; laid out like the sums."""
        if self.mesh is None:
            return init(params)
        if not self.keeps_sums_apart:
            params = jax.tree.map(self._spread, params)
        leaves = jax.tree.leaves(params)
        are_arrays = all(is_concrete(x) and isinstance(x, jax.Array) for x in leaves)
        # An optimizer's init may make arrays from those that the mesh's types bind.
        binds = is_explicit(self.mesh) and are_arrays
        with jax.set_mesh(self.mesh) if binds else contextlib.nullcontext():
            return init(params)

    def warn_of_whole_sums(self, params: Params) -> bool:
        """Warns if parameters are spread over the data axes, and sums are not."""
        leaves = jax.tree.leaves(params) if self.warns else []
        over = [x for x in leaves if {*self.names} & used(sharding_of(x))]
        if over:
            warnings.warn(
                f"Parameters are spread over data_axes {self.names}, and every device "
                "keeps whole float32 sums of their gradients: "
                f"{sum(4 * x.size for x in over):,} bytes. "
                'reduce_every="micro_batch" spreads the sums too (FSDP); '
                'reduce_every="window" keeps them whole without this warning.',
                stacklevel=_level_of_caller(),
            )
        return bool(over)

    def _spread(self, p: Leaf) -> Leaf:
        if not is_concrete(p):
            return p
        return put(p, self.sharding(*self._spec(jnp.shape(p), sharding_of(p))))

    def zeros(self, params: Params, dtypes: Tree) -> Params:
        """Sums of nothing, `[devices, ...]` where each device has its own."""

        def zero(p: Leaf, dtype: DType) -> Leaf:
            if self.mesh is None:
                return jnp.zeros_like(p, dtype)
            shape = (*self.lead, *jnp.shape(p))
            sharding = self.sharding(*self._spec(jnp.shape(p), sharding_of(p)))
            if isinstance(p, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            if is_concrete(p):  # never made on one device first, where it may not fit
                return jnp.zeros(shape, dtype, device=sharding)
            zeros = jnp.zeros(shape, dtype)
            known = sharding_of(p) is not None
            return jax.sharding.reshard(zeros, sharding.spec) if known else zeros

        return jax.tree.map(zero, params, dtypes)

    def _spec(
        self, shape: tuple[int, ...], sharding: NamedSharding | None
    ) -> list[Entry]:
        """The spec of the sum of a parameter with this shape and sharding.

        Without a sum on each device, the longest axis that the data axes divide is
        spread over them.
        """
        spec = entries_of(sharding, len(shape))
        if self.keeps_sums_apart:
            return [self.entry, *without(self.names, spec)]
        free = tuple(n for n in self.names if n not in used(sharding))
        parts = math.prod(self._known_mesh.shape[name] for name in free)
        for axis in np.argsort([-n for n in shape], kind="stable"):
            if free and not spec[axis] and shape[axis] % parts == 0:
                spec[axis] = entry_of(free)
                break
        return spec

    def are_spread(self, params: Params, shardings: Shardings) -> list[bool]:
        """Whether the first axis of a device's sum is spread over further devices."""
        leaves = jax.tree.leaves(params)
        if shardings is None:
            return [False] * len(leaves)

        def is_spread(p: jax.Array, sharding: NamedSharding | None) -> bool:
            spec = entries_of(sharding, p.ndim)
            if self.mesh is not None:
                spec = self._spec(p.shape, sharding)[self.keeps_sums_apart :]
            mesh: Any = self.mesh or (sharding and sharding.mesh)
            return bool(spec) and any(mesh.shape[n] > 1 for n in names_in(spec[0]))

        return [*map(is_spread, leaves, shardings)]

    def flat(self, sums: Params, shardings: Shardings) -> Params:
        """The sums as one array for the devices' copies, `[devices * n, ...]`."""
        if not self.keeps_sums_apart:
            return sums

        def flat(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
            if x.ndim == 1:
                return x
            _, first, *rest = self._spec(x.shape[1:], sharding)
            x = x.reshape(-1, *x.shape[2:]) if x.size else x.reshape(0, *x.shape[2:])
            return self._held(x, [entry_of((*self.names, *names_in(first))), *rest])

        return _each(flat, sums, shardings)

    def stacked(self, sums: Params, params: Params, shardings: Shardings) -> Params:
        """The inverse of `flat`; holds the sums where they are placed."""
        if self.mesh is None:
            return sums

        def stacked(x: jax.Array, sharding: Any, p: jax.Array) -> jax.Array:
            if self.keeps_sums_apart:
                x = x.reshape(self.size, *jnp.shape(p))
            is_known = shardings is not None
            return self._held(x, self._spec(jnp.shape(p), sharding)) if is_known else x

        return _each(stacked, sums, shardings, jax.tree.leaves(params))

    def _held(self, x: jax.Array, spec: Sequence[Entry]) -> jax.Array:
        if is_concrete(x):
            return x
        mesh: Any = self.mesh
        if is_explicit(mesh):  # under auto_axes, which replaces the mesh
            mesh = jax.sharding.get_abstract_mesh()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def held(self, params: T, shardings: Shardings, *, like_sums: bool = False) -> T:
        """Parameters in their own shardings, or laid out like the sums.

        The update computes them like the sums, which may be spread further.
        """
        if self.mesh is None or self.keeps_sums_apart or shardings is None:
            return params

        def held(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
            own = entries_of(sharding, x.ndim)
            return self._held(x, self._spec(x.shape, sharding) if like_sums else own)

        return _each(held, params, shardings)

    def of_copies(
        self,
        loss: LossOfRows,
        params: Params,
        model_state: ModelState,
        rows: Rows,
        rng: jax.Array | None,
        loss_kwargs: Any,
    ) -> Callable[[TwinArrays], Any]:
        """The loss of all rows, as a function of the twins of each device's copy.

        It returns `(loss_sum, (num_tokens, (aux, changes of the model state)))`. All
        devices run the backward pass, because other axes of the mesh may need
        collectives. On a device without tokens, `select` replaces its gradients by
        zeros.
        """

        def of_device(twins: TwinArrays, params: Params, *args: Any) -> Any:
            model_state, batch, rng, loss_kwargs = args
            place = jax.lax.axis_index(self.names)
            if rng is not None:
                rng = jax.random.fold_in(rng, place)
            model_state = jax.tree.map(lambda x: own_key(x, place), model_state)
            args = model_state, batch, rng, loss_kwargs
            traced = Traced(loss, params, *args)
            self._check(traced, loss, rows.is_whole, params, args)
            n = traced.alone(1).value()
            leaves = jax.tree.leaves(params)
            own = [
                twin if twin is None else twin.reshape(p.shape)
                for twin, p in zip(twins, leaves, strict=True)
            ]
            loss_sum, (_, (aux, changed)) = traced.of_twins(own, counts=n > 0)
            loss_sum = jax.lax.select(n > 0, loss_sum, jnp.zeros_like(loss_sum))
            aux = jax.tree.map(lambda x: jnp.expand_dims(x, 0), aux)
            changed = {i: self._unified(x) for i, x in changed.items()}
            loss_sum = loss_sum.astype(at_least_float32(loss_sum.dtype))
            loss_sum, total = jax.lax.psum((loss_sum, n), self.names)
            return loss_sum, (total, (aux, changed))

        own = P(self.entry)
        in_specs = own, P(), P(), rows.specs(self.entry), P(), P()
        out_specs = P(), (P(), (own, P()))
        mapped = self.map(of_device, in_specs, out_specs)
        return lambda twins: mapped(
            twins, params, model_state, rows.batch, rng, loss_kwargs
        )

    def _unified(self, x: jax.Array) -> jax.Array:
        """The mean of floating values; the first device's keys; others are the same."""
        if is_key(x):
            return value_at(0, x, self.names)
        return jax.lax.pmean(x, self.names) if is_float(x) else x

    def _check(
        self,
        traced: Traced,
        loss: LossOfRows,
        is_whole: Sequence[bool],
        params: Params,
        args: tuple[Any, ...],
    ) -> None:
        """Raises unless the losses and counts of all devices can be added up."""
        model_state, _, rng, loss_kwargs = args

        def summed(params: Params) -> jax.Array:
            return loss(params, *args)[0]

        passes = {"": traced.closed}
        operations = {x.primitive.name for x in equations(traced.closed)}
        has_rules = any(name.startswith("custom_vjp") for name in operations)
        if has_rules and jax.tree.leaves(params):
            backward = jax.make_jaxpr(jax.grad(summed, allow_int=True))(params)
            passes[" in its backward pass"] = backward
        for where, one in passes.items():
            for name, along in exchanges(one):
                if not along.isdisjoint(self.names):
                    raise ValueError(
                        "loss_fn must not name the data axes: it is given the rows of "
                        "one device, and the sums of all are added up after it. Got "
                        f"a {name} over {sorted(along)}{where}. Return this device's "
                        "sums."
                    )
        if self.size == 1:
            return
        # Of each input of the loss, whether devices have different values.
        own = (
            jax.tree.map(lambda _: False, params),
            jax.tree.map(is_key, model_state),
            [not whole for whole in is_whole],
            jax.tree.map(lambda _: True, rng),
            jax.tree.map(lambda _: False, loss_kwargs),
        )
        is_own = jax.tree.leaves(own)

        def needs(output: int) -> set[bool]:
            alone = traced.alone(output)
            pairs = zip(is_own, alone.needed, strict=True)
            found = {own for own, is_needed in pairs if is_needed}
            operations = {x.primitive.name for x in equations(alone.jaxpr)}
            return found | {True} if "axis_index" in operations else found

        if needs(1) == {False}:
            raise ValueError(
                "num_tokens must be a count of the rows that loss_fn is given, those "
                "of one device, because the counts of all devices are added up: got a "
                "number that does not depend on these rows and would be added "
                f"{self.size} times. Sum their mask in loss_fn; multiply a weight that "
                "all rows share by mask.sum()."
            )
        shapes = traced.structure.unflatten(range(traced.structure.num_leaves))
        _, (_, (_, changed)) = shapes
        names = [path for path, _ in named_leaves(model_state)]
        for i, output in changed.items():
            kind = traced.closed.out_avals[output].dtype
            cannot_mean = jnp.issubdtype(kind, jnp.integer) or kind == jnp.bool_
            if cannot_mean and True in needs(output):
                raise ValueError(
                    f"{names[i].removeprefix('.')} must be the same on all devices, "
                    "because the model has only one: got a value that depends on the "
                    "rows of the batch, which differ from device to device, and no "
                    "mean of it can be taken. Return it as aux, or use "
                    'reduce_every="micro_batch", where loss_fn sees all rows.'
                )

    def total(self, sums: Params, shardings: Shardings) -> Params:
        """The sums over all devices: called once, when the window closes.

        Each device gets the part of a sum that it has of the parameter.
        """
        if not self.keeps_sums_apart:
            return sums
        leaves, structure = jax.tree.flatten(sums)
        known = shardings or [None] * len(leaves)
        specs = [entries_of(s, x.ndim - 1) for x, s in zip(leaves, known, strict=True)]
        scattered = [only(self.names, spec) for spec in specs]

        def add_up(sums: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(sums, scattered, strict=True)
            return [_reduce(x.reshape(x.shape[1:]), self.names, s) for x, s in pairs]

        # If shardings are known, map over all axes: XLA would gather an array that is
        # spread over an axis left to the compiler before scattering it over another.
        sums = self.map(
            add_up,
            in_specs=([P(self.entry, *without(self.names, s)) for s in specs],),
            out_specs=[P(*_innermost(self.names, s)) for s in specs],
            names=self.names if shardings is None else self._known_mesh.axis_names,
        )(leaves)
        return structure.unflatten(sums)

    def spread(self, batch: Batch, axis: int = 0) -> Rows:
        """Spreads the rows of a batch; arrays that are on a mesh are not moved."""
        if self.mesh is None:
            return Rows(batch, (False,) * len(jax.tree.leaves(batch)), axis)
        check_are_everywhere(batch, self.sharding())
        leaves = jax.tree.leaves(batch)
        arrays = [i for i, x in enumerate(leaves) if jnp.ndim(x) > axis]
        copies = [i for i in arrays if self._is_whole(leaves[i])]
        rows = [i for i in arrays if i not in copies]
        if not rows:  # the caller placed the whole batch on every device
            rows, copies = copies, []
        divide = all(jnp.shape(leaves[i])[axis] % self.size == 0 for i in rows)
        if rows and not (divide and (self.size == 1 or not self.keeps_sums_apart)):
            check_rows(
                batch,
                rows,
                copies * self.keeps_sums_apart,
                axis,
                self.names,
                self.size,
            )
        spread = Rows(batch, tuple(i not in rows for i in range(len(leaves))), axis)

        def place(x: Leaf, spec: P) -> Leaf:
            is_placed = isinstance(getattr(x, "sharding", None), NamedSharding)
            if is_placed or not is_concrete(x):
                return x
            return put(x, self.sharding(*spec))

        placed = jax.tree.map(place, batch, spread.specs(self.entry))
        return dataclasses.replace(spread, batch=placed)

    def _is_whole(self, x: Leaf) -> bool:
        """Whether `x` is known to be whole on every device of the data axes."""
        sharding = sharding_of(x)
        if sharding is None:
            return False
        if not is_concrete(x) and not {*self.names} <= {*sharding.mesh.explicit_axes}:
            return False  # its type does not tell
        return used(sharding).isdisjoint(self.names)


def make_devices(
    mesh: Mesh | None,
    data_axes: str | Sequence[str] | None,
    reduce_every: ReduceEvery | None,
) -> Devices:
    """Checks the arguments of steps about devices."""
    if reduce_every not in (None, "window", "micro_batch"):
        raise ValueError(
            "reduce_every must be 'window' or 'micro_batch', when the devices' sums "
            f"are reduced: got {reduce_every!r}."
        )
    if (mesh is None) != (data_axes is None) or (mesh is None and reduce_every):
        raise ValueError(
            "mesh and data_axes go together, the devices and the axes over which rows "
            f"are spread, and reduce_every needs both: got mesh={mesh!r}, data_axes="
            f"{data_axes!r} and reduce_every={reduce_every!r}."
        )
    if mesh is None:
        return Devices()
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh: got {mesh!r}.")
    names = (data_axes,) if isinstance(data_axes, str) else data_axes
    are_names = isinstance(names, Sequence) and all(isinstance(n, str) for n in names)
    if not are_names or not names or len({*names}) < len(names):
        error = ValueError if are_names else TypeError
        raise error(
            "data_axes must be the name of a mesh axis or several different ones: got "
            f"{data_axes!r}."
        )
    names = tuple(names)
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"data_axes must be axes of the mesh: got {unknown}, the mesh has "
            f"{list(mesh.axis_names)}."
        )
    apart = reduce_every != "micro_batch"
    return Devices(mesh, names, apart, warns=reduce_every is None)


def _level_of_caller() -> int:
    """The `stacklevel` of the call into this package, for the caller of this function.

    `skip_file_prefixes` does the same from Python 3.12 on.
    """
    package, _, _ = __name__.partition(".")
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def _each(
    f: Callable[..., Any], tree: T, shardings: Shardings, *others: Sequence[Any]
) -> T:
    leaves, structure = jax.tree.flatten(tree)
    known = shardings or [None] * len(leaves)
    return structure.unflatten(map(f, leaves, known, *others))


def _reduce(x: jax.Array, names: tuple[str, ...], spec: list[Entry]) -> jax.Array:
    """The sum over the devices; each device keeps its part according to `spec`."""
    scattered = [(axis, entry) for axis, entry in enumerate(spec) if entry]
    gone = {name for _, entry in scattered for name in names_in(entry)}
    rest = tuple(name for name in names if name not in gone)
    for axis, entry in scattered:
        x = jax.lax.psum_scatter(x, entry, scatter_dimension=axis, tiled=True)
    return jax.lax.psum(x, rest) if rest else x


def _innermost(names: tuple[str, ...], spec: list[Entry]) -> list[Entry]:
    """`spec` with `names` last in each entry, where a scatter puts them."""
    return [
        entry_of(tuple(sorted(names_in(entry), key=lambda name: name in names)))
        for entry in spec
    ]


def value_at(place: Any, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The value of `x` on one device, on all of them."""
    if is_key(x):
        data = value_at(place, jax.random.key_data(x), names)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    is_source = jax.lax.axis_index(names) == place
    masked = jnp.where(is_source, wide, jnp.zeros_like(wide))
    return jax.lax.psum(masked, names).astype(x.dtype)


def own_key(x: Leaf, place: jax.Array) -> Any:
    """A device's own value of a part of the model's state: keys are folded."""
    if not is_key(x):
        return x
    keys = jax.vmap(lambda key: jax.random.fold_in(key, place))(x.reshape(-1))
    return keys.reshape(x.shape)
