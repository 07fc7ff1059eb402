"""The layout of each device's sums inside a map over named axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.layout import Computed, Layout, Reduced
from optax_tokenaccum._core.trees import (
    Batch,
    Gradients,
    Params,
    as_varying,
    named_leaves,
    varying_axes,
)
from optax_tokenaccum._devices.counts import check_counts
from optax_tokenaccum._devices.own_map import check_are_not_means


@dataclass(frozen=True)
class LocalSums(Layout):
    """One sum per device, as the device sees it inside a map over named axes.

    The map is a `shard_map`, `pmap` or `vmap`. The state holds the sums with a leading
    axis of 1, so outside the map they are one array, `[devices, ...]`, which can be
    saved.

    `shard_map` marks in the type of a value the axes along which it may differ. With
    `check_vma=False`, and under `pmap` and `vmap`, there are no marks, and every value
    is assumed to belong to this device alone. `copies` are the same on all devices.
    """

    names: tuple[str, ...]  # the axes over which rows are spread
    marked: tuple[str, ...] | None = None  # those that types can mark, set by `bound`
    copies: frozenset[int] = frozenset()  # indices of leaves of a batch

    may_communicate = False  # `check_counts` refuses such losses

    @property
    def are_bound(self) -> bool:
        try:
            jax.lax.axis_index(self.names)
        except NameError:
            return False
        return True

    def bound(self) -> Self:
        if not self.are_bound:
            raise ValueError(
                f"{', '.join(map(repr, self.names))} must be axes of a shard_map (or "
                "pmap) around the call: got a call outside of it. Call update there, "
                "or leave axis_name out where jit spreads the work by itself."
            )
        marked = [n for n in self.names if n in varying_axes(jax.lax.axis_index(n))]
        return replace(self, marked=tuple(marked))

    def zeros(self, params: Params, dtypes: Any) -> Any:
        def zero(p: Any, dtype: Any) -> jax.Array:
            x = jnp.zeros((1, *jnp.shape(p)), dtype)
            # If init is called outside the map, the map's specs decide.
            return as_varying(x, self.bound().marked or ()) if self.are_bound else x

        return jax.tree.map(zero, params, dtypes)

    def opened(self, stored: Any) -> Any:
        for path, x in named_leaves(stored):
            if jnp.shape(x)[:1] != (1,):
                raise ValueError(
                    "With axis_name every device must see its own sum of each "
                    f"gradient, in an array [1, ...]: at {path} of acc_grads got shape "
                    f"{jnp.shape(x)}. Call init with this axis_name, and give the "
                    "state to shard_map with PartitionSpec(axis_name) for acc_grads."
                )
        return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), stored)

    def stored(self, opened: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), opened)

    def total(self, stored: Any) -> Any:
        return jax.tree.map(self.sum, self.opened(stored))

    def sum(self, x: Any) -> Any:
        return jax.lax.psum(x, self.names)

    def varying(self, x: Any) -> tuple[str, ...]:
        """The axes along which `x` may differ."""
        marked = self.bound().marked if self.marked is None else self.marked
        if not marked:
            return self.names
        marks = varying_axes(x)
        return tuple(n for n in self.names if n not in marked or n in marks)

    def reduced(self, x: Any) -> Reduced:
        varying = self.varying(x)
        return tuple(name for name in self.names if name not in varying)

    def tokens_of(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        over = tuple(n for n in self.varying(num_tokens) if n in reduced)
        return jax.lax.psum(num_tokens, over) if over else num_tokens

    def contributes(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        any_tokens = self.tokens_of(reduced, num_tokens) > 0
        if not reduced:
            return any_tokens
        return any_tokens & (jax.lax.axis_index(reduced) == 0)

    def check_tokens(
        self, gradients: Gradients, num_tokens: Any, *, is_mean: bool
    ) -> None:
        for path, g in named_leaves(gradients):
            varying, reduced = self.varying(g), self.reduced(g)
            lacking = [name for name in varying if name not in self.varying(num_tokens)]
            if lacking:
                raise ValueError(
                    "num_tokens must be of the same tokens as the gradients: got "
                    f"gradients that differ along {lacking} (at {path}) and a "
                    "num_tokens that does not. Give the tokens of each device; where "
                    "all have as many, jax.lax.pcast(num_tokens, "
                    f"{tuple(lacking)}, to='varying')."
                )
            if is_mean:
                check_are_not_means(path, reduced)

    def check_counts(
        self,
        of_rows: Callable[[Params, Batch, Any], Computed],
        params: Params,
        batch: Batch,
        rng: jax.Array | None,
    ) -> None:
        check_counts(of_rows, params, batch, rng, self.names, self.copies)

    def agree(self, flag: jax.Array, record: Any) -> tuple[jax.Array, Any]:
        names = self.varying(flag)
        if not names:
            return flag, record
        place, end = jax.lax.axis_index(names), jax.lax.axis_size(names)
        first = jax.lax.pmin(jnp.where(flag, place, end), names)
        source = jnp.where(first == end, 0, first)
        record = jax.tree.map(
            lambda x: _value_at(source, jnp.asarray(x), names), record
        )
        return first != end, record

    def own_key(self, rng: jax.Array) -> jax.Array:
        return jax.random.fold_in(rng, jax.lax.axis_index(self.names))

    def shared(self, x: jax.Array) -> jax.Array:
        """The mean of floating values; the first device's keys.

        Other values are the same on all devices: `check_counts` has seen to it.
        """
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = _value_at(0, jax.random.key_data(x), self.names)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, self.names)
        return x

    def stacked(self, tree: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda x: jnp.expand_dims(x, axis), tree)


def _value_at(place: Any, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The value of `x` on one device, on all of them."""
    wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    is_source = jax.lax.axis_index(names) == place
    masked = jnp.where(is_source, wide, jnp.zeros_like(wide))
    return jax.lax.psum(masked, names).astype(x.dtype)


def as_names(axes: Any, argument: str) -> tuple[str, ...]:
    """One axis name, or several, as a tuple of names."""
    rule = f"{argument} must be the name of a mesh axis or several different ones"
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{rule}: got {axes!r}.")
    if not names or len({*names}) < len(names):
        raise ValueError(f"{rule}: got {axes!r}.")
    return tuple(names)
