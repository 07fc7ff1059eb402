"""A window in a user's own `shard_map`, whose types tell what differs where."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from optax import Params

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.dependence import exchanges
from optax_tokenaccum._core.layout import Layout, Peers, Reduced
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Gradients, T, as_varying, varying_axes
from optax_tokenaccum._devices.axes import check_are_not_means, value_at
from optax_tokenaccum._devices.counts import refuse_own


class SumsInMap(Layout):
    """Sums whose types are those of the parameters."""

    def zeros(self, params: Params, dtypes: Params) -> Gradients:
        zeros = super().zeros(params, dtypes)
        return jax.tree.map(lambda x, p: as_varying(x, varying_axes(p)), zeros, params)


@dataclass(frozen=True)
class PeersInMap(Peers):
    """The devices that share parameters.

    A gradient with respect to a parameter that is the same on all devices is a sum over
    them, which JAX reduces. So the count and the loss are summed over them too.
    """

    names: tuple[str, ...]  # the axes along which some parameter is the same

    def sum(self, x: T) -> T:
        return jax.lax.psum(x, self.names) if self.names else x

    def reduced(self, x: jax.Array) -> Reduced:
        return tuple(name for name in self.names if name not in varying_axes(x))

    def tokens_of(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        return jax.lax.psum(num_tokens, reduced) if reduced else num_tokens

    def contributes(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        return self.tokens_of(reduced, num_tokens) > 0

    def check_tokens(
        self, gradients: Gradients, num_tokens: jax.Array, *, is_mean: bool
    ) -> None:
        for path, g in trees.named_leaves(gradients) if is_mean else ():
            check_are_not_means(path, self.reduced(g))

    def own(self, tree: T) -> T:
        """Values as each device's own, whose gradients JAX does not reduce."""
        return jax.tree.map(lambda x: as_varying(x, self.names), tree)

    def reduced_like(
        self, state: TokenAccumulationState, params: Params
    ) -> TokenAccumulationState:
        """The state after a loop over `own(params)`, reduced as that of `params`."""

        def reduce(x: jax.Array, p: jax.Array) -> jax.Array:
            axes = self.reduced(p)
            return jax.lax.psum(x, axes) if axes else x

        return state._replace(
            acc_grads=jax.tree.map(reduce, state.acc_grads, params),
            acc_tokens=self.sum(state.acc_tokens),
            acc_value=self.sum(state.acc_value),
        )

    def unified_like(self, new: T, old: T) -> T:
        """What devices made of `own(old)`: the mean, or the first device's value."""

        def unify(x: jax.Array, like: jax.Array) -> jax.Array:
            axes = self.reduced(like)
            if not axes:
                return x
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return jax.lax.pmean(x, axes)
            return value_at(0, x, axes)

        return jax.tree.map(unify, new, old)


def peers_in_map(
    of_first: Callable[[], tuple[Any, Any, Any, dict[str, jax.Array]]],
) -> PeersInMap:
    """The devices that share a window where this is called.

    `of_first()` returns the losses and the counts of the first micro-batch, the
    parameters or their gradients, and values by their names that must be the same on
    all devices. It is only traced.

    Raises:
      ValueError: a sum over devices needs the loss and the count of each of them; or
        one of the last values differs.
    """
    if not trees.types_are_marked():
        return PeersInMap(())
    found: list[list[frozenset[str]]] = []
    of_same: dict[str, frozenset[str]] = {}

    def trace() -> Any:
        *of_loss, same = of_first()
        values, counts, like = map(jax.tree.leaves, of_loss)
        # A Python number, such as that of the rows, is each device's own.
        counts = [n for n in counts if not trees.is_concrete(n)]
        found.extend([*map(varying_axes, leaves)] for leaves in (values, counts, like))
        of_same.update({name: varying_axes(x) for name, x in same.items()})
        return values, like

    traced = jax.make_jaxpr(trace)()
    values, counts, like = found
    value = frozenset().union(*values)
    along = value.union(*counts)
    names = tuple(sorted(along.difference(along.intersection(*like))))
    for name, axes in of_same.items():
        if not axes.isdisjoint(names):
            refuse_own(name)
    for name in names:
        if name not in value or not all(name in count for count in counts):
            differs, same = ["loss", "num_tokens"][:: 1 if name in value else -1]
            raise ValueError(
                "In a shard_map, the loss and num_tokens must both be of this device's "
                "rows, or both be reduced, where all devices have the same parameters: "
                f"got a {differs} that differs along {name!r} and a {same} that does "
                "not. Reduce neither. Where all devices have as many tokens, give "
                f"jax.lax.pcast(num_tokens, ({name!r},), to='varying')."
            )
    # Differentiated, a loss that reads from other devices is the sum of their losses.
    needed, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    sent = {name for _, axes in exchanges(needed) for name in axes}
    for name in sorted(along.difference(names) & sent):
        raise ValueError(
            "In a shard_map, loss_fn must reduce the loss and num_tokens, if every "
            f"device has its own parameters and reads from others along {name!r}, such "
            "as parts of a parameter: got a loss and a num_tokens of this device, and "
            "a gradient of the losses of all. Return both reduced with "
            f"jax.lax.psum(..., {name!r})."
        )
    return PeersInMap(names)
