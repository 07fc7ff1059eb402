"""A window in a user's own `shard_map`, whose types tell what differs where."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.dependence import exchanges
from optax_tokenaccum._core.layout import Layout, Reduced
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.sums import Kind, kinds_of
from optax_tokenaccum._core.trees import Gradients, Params, as_varying, varying_axes


@dataclass(frozen=True)
class SumsInMap(Layout):
    """Sums whose types are those of the gradients.

    A gradient with respect to a parameter that is the same on all devices is a sum over
    them, which JAX reduces. So the count and the loss are summed over them too.
    """

    names: tuple[str, ...]  # the axes along which some parameter is the same

    def zeros(self, params: Params, dtypes: Any) -> Any:
        zeros = super().zeros(params, dtypes)
        return jax.tree.map(lambda x, p: as_varying(x, varying_axes(p)), zeros, params)

    def sum(self, x: Any) -> Any:
        return jax.lax.psum(x, self.names) if self.names else x

    def reduced(self, x: Any) -> Reduced:
        return tuple(name for name in self.names if name not in varying_axes(x))

    def tokens_of(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        return jax.lax.psum(num_tokens, reduced) if reduced else num_tokens

    def contributes(self, reduced: Reduced, num_tokens: jax.Array) -> jax.Array:
        return self.tokens_of(reduced, num_tokens) > 0

    def check_tokens(
        self, gradients: Gradients, num_tokens: Any, *, is_mean: bool
    ) -> None:
        for path, g in trees.named_leaves(gradients) if is_mean else ():
            check_are_not_means(path, self.reduced(g))

    def own(self, params: Params) -> Params:
        """The parameters as each device's own: their gradients are not reduced."""
        return jax.tree.map(lambda x: as_varying(x, self.names), params)

    def in_loop(self) -> "SumsInMap":
        return SumsInMap(())

    def reduced_like(
        self, state: TokenAccumulationState, params: Params
    ) -> TokenAccumulationState:
        """The state after a loop over `own(params)`, reduced as that of `params`."""

        def reduce(g: Any, p: Any, kind: Kind) -> Any:
            axes = self.reduced(p)
            over_devices = jax.lax.psum if kind.is_gradient else jax.lax.pmax
            return over_devices(g, axes) if axes else g

        return state._replace(
            acc_grads=jax.tree.map(
                reduce, state.acc_grads, params, kinds_of(state.acc_grads)
            ),
            acc_tokens=self.sum(state.acc_tokens),
            acc_value=self.sum(state.acc_value),
        )


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


def layout_in_map(of_first: Callable[[], tuple[Any, Any, Any]]) -> SumsInMap:
    """The layout of a window's sums where this is called.

    `of_first()` returns the losses and the counts of the first micro-batch, and the
    parameters or their gradients. It is only traced.

    Raises:
      ValueError: a sum over devices needs the loss and the count of each of them.
    """
    if not trees.types_are_marked():
        return SumsInMap(())
    found: list[list[frozenset[str]]] = []

    def trace() -> Any:
        values, counts, like = map(jax.tree.leaves, of_first())
        # A Python number, such as that of the rows, is each device's own.
        counts = [n for n in counts if not trees.is_concrete(n)]
        found.extend([*map(varying_axes, leaves)] for leaves in (values, counts, like))
        return values, like

    traced = jax.make_jaxpr(trace)()
    values, counts, like = found
    value = frozenset().union(*values)
    along = value.union(*counts)
    names = tuple(sorted(along.difference(along.intersection(*like))))
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
    return SumsInMap(names)
