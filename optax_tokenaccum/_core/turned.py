"""Sums that lie with the scanned axis first, where it is another one in the parameters.

Layers may be stacked along an axis that is not the first, such as MaxText's
`param_scan_axis=1` or `nnx.StateAxes({nnx.Param: 1})`. They are transposed before the
scan, and so is their gradient after it, as a whole. During a window the sums are turned
instead, and turned back once at its end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from optax import Params

from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum._core.dependence import scans_over
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.loss import Loss
from optax_tokenaccum._core.trees import T


@dataclass(frozen=True)
class Axis:
    """The axis of a parameter that comes first in its sum. In a tree, a leaf."""

    index: int = 0


@dataclass(frozen=True)
class Turned(Layout):
    """The sums of `layout`, as they are added to, turned."""

    layout: Layout
    axes: Params  # the tree of the parameters, of `Axis`

    def turn(self, tree: T) -> T:
        """A tree like the parameters, with the scanned axes first."""
        return jax.tree.map(lambda axis, x: _move(x, axis.index, 0), self.axes, tree)

    def turn_back(self, tree: T) -> T:
        return jax.tree.map(lambda axis, x: _move(x, 0, axis.index), self.axes, tree)

    def take(self, stored: T) -> T:
        """The sums of `layout`, turned."""
        return self.turn(self.layout.read(stored))

    def hand_over(self, sums: T) -> T:
        """The inverse of `take`."""
        return self.layout.write(self.turn_back(sums))

    def of_turned(self, loss: Loss) -> Loss:
        """The same loss, of parameters that are turned."""

        def call(params: Params, *args: Any, **kwargs: Any) -> Any:
            return loss.call(self.turn_back(params), *args, **kwargs)

        return replace(loss, call=call)

    def write(self, sums: T) -> T:
        return self.take(self.hand_over(sums))

    def has_whole_axes(self, sums: list[jax.Array], axes: list[int]) -> list[bool]:
        own = self.axes_of_layers(sums)
        back = [_move(x, 0, axis) for x, axis in zip(sums, own, strict=True)]
        return self.layout.has_whole_axes(back, own)

    def scatters(self) -> bool:
        return self.layout.scatters()

    def axes_of_layers(self, sums: list[jax.Array]) -> list[int]:
        return [axis.index for axis in jax.tree.leaves(self.axes)]


def _move(x: jax.Array, source: int, destination: int) -> jax.Array:
    return x if source == destination else jnp.moveaxis(x, source, destination)


def turned_for(
    accumulation: Accumulation, loss_sum: Callable[[Params], jax.Array], params: Params
) -> Turned:
    """How the sums lie in a window of this loss, which is only traced."""
    leaves, structure = jax.tree.flatten(params)
    axes = [Axis()] * len(leaves)
    # Whole gradients are shown to a skip function as they are. Stacked matrices have
    # three axes; a model without them need not be traced once more.
    may_turn = BackwardPass.is_supported and accumulation.should_skip_update_fn is None
    if may_turn and max(map(jnp.ndim, leaves), default=0) > 2:
        traced = jax.make_jaxpr(lambda x: loss_sum(structure.unflatten(x)))(leaves)
        for i, scans in scans_over(traced).items():
            if i < len(leaves):
                found = [scan.axis for scan in scans if scan.changed_by is None]
                axes[i] = Axis(min(found, default=0))
    return Turned(accumulation.layout, structure.unflatten(axes))
