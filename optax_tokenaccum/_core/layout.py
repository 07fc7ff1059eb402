"""Where the sums of an open window live, and how the devices that share it talk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from optax import Params

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Batch, Gradients, P, T


@dataclass(frozen=True)
class Layout:
    """On one device: a sum for each parameter, of its shape, placed like it.

    The layouts over several devices override these methods.
    """

    @property
    def leading_axes(self) -> tuple[int, ...]:
        """The axes of a sum before those of its parameter."""
        return ()

    def check(self, stored: Gradients, params: Any) -> None:
        """Raises `ValueError` if the sums belong to another number of devices."""
        named = trees.named_leaves(stored)
        for (path, acc), p in zip(named, jax.tree.leaves(params), strict=False):
            got, own = jnp.shape(acc), jnp.shape(p)
            expected = (*self.leading_axes, *own)
            if got != expected and own in (got, got[1:]):
                raise ValueError(
                    "The sums of the open window must be laid out for this step's "
                    f"devices: at {path} of acc_grads expected shape {expected}, got "
                    f"{got}. Take over the state of a run on others with "
                    "regroup_sums(state, step.init(params))."
                )

    def zeros(self, params: Params, dtypes: Params) -> Gradients:
        """Sums of nothing, as the state holds them."""
        return jax.tree.map(lambda p, dtype: jnp.zeros_like(p, dtype), params, dtypes)

    def read(self, stored: T) -> T:
        """The sums to add to, with the shapes of the parameters."""
        return stored

    def write(self, sums: T) -> T:
        """The inverse of `read`."""
        return sums

    def total(self, stored: Gradients) -> Gradients:
        """The sums over all devices: called once, when the window closes."""
        return stored

    def has_whole_axes(self, sums: list[jax.Array], axes: list[int]) -> list[bool]:
        """Whether such an axis of each sum is not spread over devices."""
        return [True] * len(sums)

    def scatters(self) -> bool:
        """Whether every device adds its part of the gradient of all rows."""
        return False

    def axes_of_layers(self, sums: list[jax.Array]) -> list[int]:
        """The axis of each parameter that is the first one of its sum."""
        return [0] * len(sums)

    def gathers(self, params: Params) -> bool:
        """Whether `place` gathers most of the parameters."""
        return False

    def place(self, params: P) -> P:
        """Updated parameters, placed where they were before the update."""
        return params


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

    counts: dict[str, ArrayLike] = {}
    same: dict[str, jax.Array] = {}
    loss_sum: ArrayLike = 0.0
    rest: Any = None


@dataclass(frozen=True)
class Peers:
    """A device without others, or the compiler's view of all of them at once.

    What holds for a map over named axes overrides these methods.
    """

    may_communicate = True  # whether a loss may name the axes of a map around it

    def sum(self, x: T) -> T:
        """The sum over all devices of the value that each of them holds."""
        return x

    def reduced(self, x: jax.Array) -> Reduced:
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

    def agree(self, flag: jax.Array, record: T) -> tuple[jax.Array, T]:
        """Whether `flag` is set on any device, and the record of the first such one."""
        return flag, record

    def own_key(self, rng: jax.Array) -> jax.Array:
        """A key that differs from device to device."""
        return rng

    def unify(self, x: jax.Array) -> jax.Array:
        """One value for all devices of what each of them computed from its rows."""
        return x

    def check_tokens(
        self, gradients: Gradients, num_tokens: jax.Array, *, is_mean: bool
    ) -> None:
        """Raises `ValueError` if these cannot be gradients of `num_tokens` tokens."""

    def check_counts(
        self,
        of_rows: Callable[[Params, Batch, jax.Array | None], Computed],
        params: Params,
        batch: Batch,
        rng: jax.Array | None,
    ) -> None:
        """Raises `ValueError` if `of_rows(params, batch, rng)` cannot be added up.

        Its counts must be of the rows of this device alone.
        """


ALONE = Peers()
