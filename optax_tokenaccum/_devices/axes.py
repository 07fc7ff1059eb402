"""One of several devices, inside a map over named axes: its sums and its peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from optax import Params

from optax_tokenaccum._core.layout import Computed, Layout, Peers, Reduced
from optax_tokenaccum._core.trees import (
    Batch,
    DType,
    Gradients,
    T,
)
from optax_tokenaccum._devices.counts import check_counts


@dataclass(frozen=True)
class OwnSums(Layout):
    """One sum per device, as the device sees it: with a leading axis of 1.

    So outside the map they are one array, `[devices, ...]`, which can be saved.
    """

    def zeros(self, params: Params, dtypes: Params) -> Gradients:
        def zero(p: jax.Array, dtype: DType) -> jax.Array:
            return jnp.zeros((1, *jnp.shape(p)), dtype)

        return jax.tree.map(zero, params, dtypes)

    def read(self, stored: T) -> T:
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), stored)

    def write(self, sums: T) -> T:
        return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), sums)


@dataclass(frozen=True)
class PeersOnAxes(Peers):
    """The devices along the data axes, within the `shard_map` of a step."""

    names: tuple[str, ...]  # the axes over which rows are spread
    copies: frozenset[int] = frozenset()  # leaves of a batch that all devices share

    may_communicate = False  # `check_counts` refuses such losses

    def sum(self, x: T) -> T:
        return jax.lax.psum(x, self.names)

    def check_counts(
        self,
        of_rows: Callable[[Params, Batch, jax.Array | None], Computed],
        params: Params,
        batch: Batch,
        rng: jax.Array | None,
    ) -> None:
        check_counts(of_rows, params, batch, rng, self.names, self.copies)

    def agree(self, flag: jax.Array, record: T) -> tuple[jax.Array, T]:
        names = self.names
        place, end = jax.lax.axis_index(names), jax.lax.axis_size(names)
        first = jax.lax.pmin(jnp.where(flag, place, end), names)
        source = jnp.where(first == end, 0, first)
        record = jax.tree.map(lambda x: value_at(source, jnp.asarray(x), names), record)
        return first != end, record

    def own_key(self, rng: jax.Array) -> jax.Array:
        return jax.random.fold_in(rng, jax.lax.axis_index(self.names))

    def unify(self, x: jax.Array) -> jax.Array:
        """The mean of floating values; the first device's keys.

        Other values are the same on all devices: `check_counts` has seen to it.
        """
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return value_at(0, x, self.names)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, self.names)
        return x


def check_are_not_means(path: str, reduced: Reduced) -> None:
    """Raises `ValueError` for a gradient of a mean that is reduced over some axes."""
    if reduced:
        raise ValueError(
            'gradients="mean" needs the gradients of each device: got some that were '
            f"reduced over {list(reduced)} already (at {path}), where no weight can "
            "make up for their unequal counts. Take the gradient of a sum, or "
            f"differentiate with respect to jax.lax.pcast(params, {reduced}, "
            "to='varying')."
        )


def value_at(place: ArrayLike, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The value of `x` on one device, on all of them."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = value_at(place, jax.random.key_data(x), names)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    is_source = jax.lax.axis_index(names) == place
    masked = jnp.where(is_source, wide, jnp.zeros_like(wide))
    return jax.lax.psum(masked, names).astype(x.dtype)


def as_names(axes: str | Sequence[str], argument: str) -> tuple[str, ...]:
    """One axis name, or several, as a tuple of names."""
    rule = f"{argument} must be the name of a mesh axis or several different ones"
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{rule}: got {axes!r}.")
    if not names or len({*names}) < len(names):
        raise ValueError(f"{rule}: got {axes!r}.")
    return tuple(names)
