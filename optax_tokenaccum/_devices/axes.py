"""Mesh axes that a program names itself: what differs along them, and its sum."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import named_leaves


@dataclass(frozen=True)
class Axes:
    """The axes of a `shard_map`, `pmap` or `vmap` over which rows are spread.

    With no names everything here is about one device and costs nothing.

    `shard_map` marks in the type of a value the axes along which it may differ. With
    `check_vma=False`, and under `pmap` and `vmap`, there are no marks: then everything
    is taken to be of this device alone.

    Attributes:
      names: of the axes.
      marked: those that types tell of, once `here` has looked.
      copies: the places, among the leaves of a batch, of those that are alike on all
        devices.
    """

    names: tuple[str, ...] = ()
    marked: tuple[str, ...] | None = None
    copies: frozenset[int] = frozenset()

    @property
    def are_bound(self) -> bool:
        """Whether this is called under something that maps over the axes."""
        try:
            jax.lax.axis_index(self.names)
        except NameError:
            return False
        return True

    def here(self) -> Self:
        """The axes as they are where this is called.

        Raises:
          ValueError: nothing maps over them.
        """
        if not self.names:
            return self
        if not self.are_bound:
            raise ValueError(
                f"{', '.join(map(repr, self.names))} must be axes of a shard_map (or "
                "pmap) around the call: got a call outside of it. Call update there, "
                "or leave axis_name out where jit spreads the work by itself."
            )
        marked = [n for n in self.names if n in _marks(jax.lax.axis_index(n))]
        return replace(self, marked=tuple(marked))

    def of(self, x: Any) -> tuple[str, ...]:
        """The axes along which `x` may differ."""
        marked = self.here().marked if self.marked is None else self.marked
        if not marked:
            return self.names
        marks = _marks(x)
        return tuple(n for n in self.names if n not in marked or n in marks)

    def reduced(self, x: Any) -> tuple[str, ...]:
        """The axes along which `x` is alike, being a sum over them."""
        own = self.of(x)
        return tuple(name for name in self.names if name not in own)

    def sum(self, x: Any) -> Any:
        """The sum over all devices of what each of them holds."""
        return jax.lax.psum(x, self.names) if self.names else x

    def behind(self, reduced: tuple[str, ...], num_tokens: jax.Array) -> jax.Array:
        """The tokens behind what is a sum over the axes `reduced`."""
        meet = tuple(n for n in self.of(num_tokens) if n in reduced)
        return jax.lax.psum(num_tokens, meet) if meet else num_tokens

    def adds(self, reduced: tuple[str, ...], num_tokens: jax.Array) -> jax.Array:
        """Whether this device is to add something, so that `sum` has it once.

        Args:
          reduced: the axes along which that is alike.
          num_tokens: behind it on this device, or on all; 0 where it is not to count.
        """
        any_tokens = self.behind(reduced, num_tokens) > 0
        if not reduced:
            return any_tokens
        return any_tokens & (jax.lax.axis_index(reduced) == 0)

    def check_tokens(self, gradients: Any, num_tokens: Any, *, is_mean: bool) -> None:
        """Raises where gradients and `num_tokens` cannot be of the same tokens.

        Raises:
          ValueError: a gradient differs from device to device and `num_tokens` does
            not, or a mean was reduced already.
        """
        if not self.names:
            return
        for path, g in named_leaves(gradients):
            own, reduced = self.of(g), self.reduced(g)
            lacking = [name for name in own if name not in self.of(num_tokens)]
            if lacking:
                raise ValueError(
                    "num_tokens must be of the same tokens as the gradients: got "
                    f"gradients that differ along {lacking} (at {path}) and a "
                    "num_tokens that does not. Give the tokens of each device; where "
                    "all have as many, jax.lax.pcast(num_tokens, "
                    f"{tuple(lacking)}, to='varying')."
                )
            if is_mean and reduced:
                raise ValueError(
                    'gradients="mean" needs the gradients of each device: got some '
                    f"that were reduced over {list(reduced)} already (at {path}), "
                    "where no weight can make up for their unequal counts. Take the "
                    "gradient of a sum, or with regard to parameters that "
                    f"jax.lax.pcast(params, {reduced}, to='varying') made differ."
                )

    def agree(self, flag: jax.Array, record: Any) -> tuple[jax.Array, Any]:
        """Whether `flag` is up anywhere, and the record of the first device where."""
        names = self.of(flag)
        if not names:
            return flag, record
        place, end = jax.lax.axis_index(names), jax.lax.axis_size(names)
        first = jax.lax.pmin(jnp.where(flag, place, end), names)
        speaks = place == jnp.where(first == end, 0, first)

        def spoken(x: jax.Array) -> jax.Array:
            x = jnp.asarray(x)
            wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
            heard = jnp.where(speaks, wide, jnp.zeros_like(wide))
            return jax.lax.psum(heard, names).astype(x.dtype)

        return first != end, jax.tree.map(spoken, record)

    def fold_in(self, rng: jax.Array) -> jax.Array:
        """A key of this device's own."""
        if not self.names:
            return rng
        return jax.random.fold_in(rng, jax.lax.axis_index(self.names))

    def beside(self, tree: Any, axis: int = 0) -> Any:
        """What each device has, with an axis for the devices to stand side by side."""
        if not self.names:
            return tree
        return jax.tree.map(lambda x: jnp.expand_dims(x, axis), tree)

    def differing(self, x: jax.Array) -> jax.Array:
        """`x` with the type of what differs from device to device."""
        names = self.here().marked
        if not names:
            return x
        cast: Any = getattr(jax.lax, "pcast", None)
        if cast is None:  # jax 0.8
            return getattr(jax.lax, "pvary")(x, names)  # noqa: B009
        return cast(x, names, to="varying")


def as_names(axes: Any, argument: str) -> tuple[str, ...]:
    """The names of axes given as one name or several.

    Raises:
      TypeError: they are no names.
      ValueError: there is none, or one twice.
    """
    rule = f"{argument} must be the name of a mesh axis or several different ones"
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{rule}: got {axes!r}.")
    if not names or len({*names}) < len(names):
        raise ValueError(f"{rule}: got {axes!r}.")
    return tuple(names)


def _marks(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    marks = getattr(kind, "manual_axis_type", None)  # newer jax
    return kind.vma if marks is None else marks.varying
