"""Flax Linen: a `TrainState` that takes gradients with their number of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax.typing import ArrayLike

from optax_tokenaccum._core.checks import check_params
from optax_tokenaccum._core.trees import Params, TracedBool
from optax_tokenaccum._multi_steps import MultiSteps
from optax_tokenaccum._transformation import has_updated, with_num_tokens


class TrainState(train_state.TrainState):
    """Flax's `TrainState` for a `tx` that accumulates; `step` counts updates.

    Flax's own `apply_gradients` passes only gradients to `tx`, so the token count would
    be lost, and `step` would count micro-batches.

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
        check_params(params)
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)

    def apply_gradients(  # pyrefly: ignore[bad-override]
        self,
        *,
        grads: Params,
        num_tokens: ArrayLike,
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
          ValueError: `tx` does not accumulate or holds several accumulations, or
            `token_accumulation`'s `update` raises it.
        """
        has_updated(self.opt_state)  # raises unless one accumulation counts updates
        tx: Any = self.tx
        # optax would treat the class as a plain transformation and drop the count.
        tx = tx.gradient_transformation() if isinstance(tx, MultiSteps) else tx
        tx = optax.with_extra_args_support(tx)
        of_update = {"value": value, "close_window": close_window}
        before = self.replace(tx=with_num_tokens(tx, num_tokens, **of_update))
        after = super(TrainState, before).apply_gradients(grads=grads, **kwargs)
        return after.replace(tx=self.tx, step=self.step + has_updated(after.opt_state))

    def close_window(self) -> "TrainState":
        """Closes a partial window, for example at the end of an epoch.

        The window's tokens so far are the denominator. On an empty window nothing
        changes.
        """
        zeros = jax.tree.map(jnp.zeros_like, self.params)
        return self.apply_gradients(
            grads=zeros, num_tokens=0, value=0.0, close_window=True
        )
