"""Where the sums of an open window live, and what they are a sum over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import Batch, Gradients, Params

# The axes along which a value is the same on every device, being a sum over them.
Reduced = tuple[str, ...]


class Computed(NamedTuple):
    """What is computed from the rows of one device.

    Attributes:
      counts: numbers by their names in errors, which are added up over devices.
      same: values by their names, which must be the same on all devices.
      loss_sum: is differentiated.
      rest: everything else.
    """

    counts: dict[str, Any] = {}
    same: dict[str, Any] = {}
    loss_sum: Any = 0.0
    rest: Any = None


@dataclass(frozen=True)
class Layout:
    """The layout on one device: a sum for each parameter, of its shape, placed like it.

    The layouts over several devices override these methods.
    """

    may_communicate = True  # whether a loss may name the axes of a map around it

    def bound(self) -> Self:
        """The layout, knowing which mesh axes are bound where this is called."""
        return self

    def in_loop(self) -> "Layout":
        """The layout in a loop whose number of rounds may differ between devices."""
        return self

    def zeros(self, params: Params, dtypes: Any) -> Any:
        """Sums of nothing, as the state holds them."""
        return jax.tree.map(lambda p, dtype: jnp.zeros_like(p, dtype), params, dtypes)

    def opened(self, stored: Any) -> Any:
        """The sums to add to, with the shapes of the parameters."""
        return stored

    def stored(self, opened: Any) -> Any:
        """The inverse of `opened`."""
        return opened

    def total(self, stored: Any) -> Any:
        """The sums over all devices: called once, when the window closes."""
        return stored

    def has_whole_first_axes(self, opened: list[jax.Array]) -> list[bool]:
        """Whether the first axis of each sum is not spread over devices."""
        return [True] * len(opened)

    def settled(self, params: Params) -> Any:
        """Updated parameters, placed where they were before the update."""
        return params

    def sum(self, x: Any) -> Any:
        """The sum over all devices of the value that each of them holds."""
        return x

    def reduced(self, x: Any) -> Reduced:
        """The axes along which `x` is the same on every device."""
        return ()

    def tokens_of(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        """The number of tokens in a value that is a sum over the axes `reduced`."""
        return num_tokens

    def contributes(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        """Whether this device adds such a value, so that it is counted once in all.

        `num_tokens` are its tokens on this device; 0 where it must not count.
        """
        return num_tokens > 0

    def check_tokens(
        self, gradients: Gradients, num_tokens: Any, *, is_mean: bool
    ) -> None:
        """Raises `ValueError` if these cannot be gradients of `num_tokens` tokens."""

    def check_counts(
        self,
        of_rows: Callable[[Params, Batch, Any], Computed],
        params: Params,
        batch: Batch,
        rng: jax.Array | None,
    ) -> None:
        """Raises `ValueError` if `of_rows(params, batch, rng)` cannot be added up.

        Its counts must be of the rows of this device alone.
        """

    def agree(self, flag: jax.Array, record: Any) -> tuple[jax.Array, Any]:
        """Whether `flag` is set on any device, and the record of the first such one."""
        return flag, record

    def own_key(self, rng: jax.Array) -> jax.Array:
        """A key that differs from device to device."""
        return rng

    def shared(self, x: jax.Array) -> jax.Array:
        """One value for all devices of what each of them computed from its rows."""
        return x

    def stacked(self, tree: Any, axis: int = 0) -> Any:
        """`tree` with a new axis, along which the devices' values are concatenated."""
        return tree
