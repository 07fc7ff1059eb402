"""Flax Linen: a `TrainState` that takes gradients with their number of tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.typing import ArrayLike

from optax_tokenaccum._core import overwritten
from optax_tokenaccum._core.state import TokenAccumulationState, nodes_of
from optax_tokenaccum._core.trees import Params, TracedBool
from optax_tokenaccum._multi_steps import MultiSteps
from optax_tokenaccum._transformation import has_updated
from optax_tokenaccum._with_num_tokens import with_num_tokens


class OverwriteState(NamedTuple):
    """The optimizer's state of a model with 8-bit floats.

    Attributes:
      opt_state: the state of `tx`.
      acc_overwrite: the maximum over the open window of the values that overwrite the
        scales when the window closes.
    """

    opt_state: optax.OptState
    acc_overwrite: Params


class TrainState(train_state.TrainState):
    """Flax's `TrainState` for a `tx` that accumulates; `step` counts updates.

    Flax's own `apply_gradients` passes only gradients to `tx`, so the token count would
    be lost, and `step` would count micro-batches. With Flax's 8-bit floats, `opt_state`
    is an `OverwriteState`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation
      >>> from optax_tokenaccum.linen import TrainState
      >>> state = TrainState.create(
      ...     apply_fn=lambda variables, x: x @ variables["params"]["w"],
      ...     params={"w": jnp.zeros(2)},
      ...     tx=token_accumulation(optax.sgd(1.0), every_k_schedule=2),
      ... )
      >>> for grad_of_sum, n in [(8.0, 1), (4.0, 3)]:
      ...     grads = {"w": jnp.full(2, grad_of_sum)}
      ...     state = state.apply_gradients(grads=grads, num_tokens=n)
      ...     print(state.step, state.params["w"])
      0 [0. 0.]
      1 [-3. -3.]
    """

    @classmethod
    def create(
        cls, *, apply_fn: Any, params: Params, tx: Any, **kwargs: Any
    ) -> "TrainState":
        """Creates a state; see `flax.training.train_state.TrainState.create`."""
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
            return state.replace(opt_state=_with_overwrite_state(state))
        return state

    def apply_gradients(
        self,
        *,
        grads: Params,
        num_tokens: ArrayLike | None = None,
        value: ArrayLike | None = None,
        close_window: TracedBool | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """Adds a micro-batch, and applies the update if the window closes with it.

        Args:
          grads: gradients of the micro-batch, with the tree of `params`.
          num_tokens: the number of tokens behind `grads`, a scalar.
          value: the micro-batch's loss, for optimizers that need it.
          close_window: `True` closes the window now.
          **kwargs: attributes to replace, for example `batch_stats`. A rejected
            micro-batch replaces them too: to keep the old values, select them with
            `jnp.where`.

        Raises:
          TypeError: `num_tokens` is missing.
          ValueError: `tx` does not accumulate or holds several accumulations, or
            `token_accumulation`'s `update` raises it.
        """
        if num_tokens is None:
            raise TypeError(
                "apply_gradients() needs num_tokens, the number of loss tokens (or the "
                "sum of weights) behind grads: got None. Write state.apply_gradients("
                "grads=grads, num_tokens=n)."
            )
        count = len(nodes_of(TokenAccumulationState, self.opt_state))
        if count != 1:
            raise ValueError(
                "The tx of this TrainState must accumulate exactly once, since step "
                f"counts its updates: got {count} accumulations. Write "
                "tx=token_accumulation(optimizer, k) around the whole optimizer, or "
                "optax_tokenaccum.MultiSteps in place of optax's."
            )
        tx: Any = self.tx
        # optax would treat the class as a plain transformation and drop the count.
        tx = tx.gradient_transformation() if isinstance(tx, MultiSteps) else tx
        tx = optax.with_extra_args_support(tx)
        of_update = {"value": value, "close_window": close_window}
        before = self.replace(tx=with_num_tokens(tx, num_tokens, **of_update))
        if OVERWRITE_WITH_GRADIENT in grads:
            before = before.replace(opt_state=_with_overwrite_state(self).opt_state)
        after = super(TrainState, before).apply_gradients(grads=grads, **kwargs)
        after = after.replace(tx=self.tx, step=self.step + has_updated(after.opt_state))
        if OVERWRITE_WITH_GRADIENT in grads:
            return _overwritten_when_closed(self, after, num_tokens)
        return after

    def close_window(self) -> "TrainState":
        """Closes a partial window, for example at the end of an epoch.

        The window's tokens so far are the denominator. On an empty window nothing
        changes.
        """
        return self.apply_gradients(
            grads=jax.tree.map(jnp.zeros_like, self.params),
            num_tokens=0,
            value=0.0,
            close_window=True,
        )


def _with_overwrite_state(state: TrainState) -> OverwriteState:
    """Its `opt_state`, with a maximum over nothing if there is none, as in 0.1.0."""
    if isinstance(state.opt_state, OverwriteState):
        return state.opt_state
    scales = state.params[OVERWRITE_WITH_GRADIENT]
    nothing = jax.tree.map(lambda x: jnp.full_like(x, overwritten.NOTHING), scales)
    return OverwriteState(state.opt_state, nothing)


def _overwritten_when_closed(
    before: TrainState, after: TrainState, num_tokens: ArrayLike
) -> TrainState:
    """`after`, with the scales overwritten only when the window closes.

    Flax overwrites the scales in every call. Here they keep the values of `before`
    until the window closes, and then take the maximum over the window.
    """
    scales, given = (x.params[OVERWRITE_WITH_GRADIENT] for x in (before, after))
    opt_state, acc_overwrite = _with_overwrite_state(before)
    (old,), (new,) = (
        nodes_of(TokenAccumulationState, x) for x in (opt_state, after.opt_state)
    )
    is_first = old.mini_step == 0
    was_added = jnp.where(
        new.has_updated,
        is_first | (new.acc_tokens != old.acc_tokens),  # else nothing was added
        new.mini_step != old.mini_step,
    )
    n = jnp.asarray(num_tokens)
    counts = was_added & jnp.isfinite(n) & (n > 0)
    maxima, structure = jax.tree.flatten(acc_overwrite)
    maxima = overwritten.add(maxima, jax.tree.leaves(given), is_first, counts)
    acc_overwrite = structure.unflatten(maxima)
    scales = jax.tree.map(
        lambda x, scale: jnp.where(new.has_updated, x, scale), acc_overwrite, scales
    )
    return after.replace(
        params={**after.params, OVERWRITE_WITH_GRADIENT: scales},
        opt_state=OverwriteState(after.opt_state, acc_overwrite),
    )
