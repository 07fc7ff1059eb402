"""A step on one device, or on devices that only the compiler knows."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate

import jax

from optax_tokenaccum._core.layout import ALONE, Layout, Peers
from optax_tokenaccum._core.loss import Output
from optax_tokenaccum._core.trees import Batch, M, ParamShardings, T
from optax_tokenaccum._devices.shardings import is_whole


@dataclass(frozen=True)
class PlacedSums(Layout):
    """Sums that lie like parameters whose shardings are known."""

    shardings: ParamShardings

    def has_whole_axes(self, sums: list[jax.Array], axes: list[int]) -> list[bool]:
        shardings = jax.tree.leaves(self.shardings)
        return [*map(is_whole, shardings, axes)]


class OneDevice:
    """Without a mesh, arrays stay where they are, and `jit` places the others.

    The two ways to run a step over a mesh have the same methods.
    """

    data_axes: tuple[str, ...] = ()
    num_devices = 1

    def spread(self, batch: Batch, axis: int = 0) -> Batch:
        """The batch with its rows, along `axis`, spread over the devices."""
        return batch

    def place(self, params: T) -> T:
        """Arrays where they belong: those on the mesh stay where they are."""
        return params

    def init(self, init: Callable[[T], M], params: T) -> M:
        """What `init` returns for parameters that are placed."""
        return init(params)

    def layout(self, shardings: ParamShardings = None) -> Layout:
        """Where the sums live, outside of `on_rows`."""
        return Layout() if shardings is None else PlacedSums(shardings)

    def on_rows(
        self,
        f: Callable[Concatenate[T, ...], Output],
        on: Callable[[Layout, Peers], T],
        shardings: ParamShardings = None,
    ) -> Callable[..., Output]:
        """A function that runs `f` on the rows of every device.

        It is called as `(opt_state, micro_batch, *others)`, and runs
        `f(on(layout, peers), opt_state, micro_batch, *others)`: the rows of
        `micro_batch` come from `spread`, `opt_state` may be `None`, and every device
        gets all of `others`. What devices return as `aux` is concatenated along the
        axis of the rows.
        """
        return functools.partial(f, on(self.layout(shardings), ALONE))

    def auto(
        self, f: Callable[..., Output], shardings: ParamShardings, axis: int = 0
    ) -> Callable[..., Output]:
        """`f`, with the compiler choosing shardings on an Explicit mesh too.

        `shardings` are those of the state that `f` returns, where known.
        """
        return f
