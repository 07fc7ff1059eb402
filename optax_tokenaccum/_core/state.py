"""What lives between calls: the open window."""

import dataclasses
from typing import Any, NamedTuple

import jax

from optax_tokenaccum._core.trees import Gradients, OptState, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SkipState:
    """What `should_skip_update_fn` last returned, and how often it rejected.

    Attributes:
      of_function: its tree; `skip_state[...]` is `skip_state.of_function[...]`.
      rejected: micro-batches that the open window rejected so far.
    """

    of_function: Tree
    rejected: jax.Array  # shape=(), dtype=int32

    def __getitem__(self, key: Any) -> Tree:
        return self.of_function[key]


class TokenAccumulationState(NamedTuple):
    """State of `token_accumulation`, and of every train step as `opt_state`.

    Shapes, dtypes, weak types and placement never change after `init`, so the state
    passes through `jax.lax.scan` and a donating `jax.jit` without a second trace. One
    exception: if the optimizer has state whose shape matches no parameter, your own
    `jax.jit` over several devices needs `out_shardings` to keep the placement.

    Between windows, `grad_sums`, `acc_tokens` and `acc_value` are zeros. The token mean
    of the open window is `window_gradient(state)`.

    Attributes:
      mini_step: micro-batches accumulated so far in the open window.
      gradient_step: windows closed by an update so far.
      inner_opt_state: the state of the inner optimizer.
      grad_sums: sum of the window's gradients, with the tree and shapes of the
        parameters. Where each device keeps a separate sum, a leading axis of devices
        is added.
      acc_tokens: sum of the window's `num_tokens`.
      acc_value: sum of the window's losses; 0 if no `value` was given.
      has_updated: whether the last call closed its window with an update.
      skip_state: a `SkipState`, whose items are those of the tree that
        `should_skip_update_fn` last returned; `()` without such a function.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation
      >>> optimizer = token_accumulation(optax.sgd(1.0), every_k_schedule=2)
      >>> state = optimizer.init(jnp.zeros(()))
      >>> grad_of_sum = jnp.asarray(8.0)
      >>> _, state = optimizer.update(grad_of_sum, state, num_tokens=3)
      >>> print(state.mini_step, state.gradient_step, state.grad_sums, state.acc_tokens)
      1 0 8.0 3.0
    """

    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    inner_opt_state: OptState
    grad_sums: Gradients  # dtype=float32, or the parameter's if wider
    acc_tokens: jax.Array  # shape=(), dtype=float32, or a parameter's if wider
    acc_value: jax.Array  # shape=(), dtype=acc_tokens.dtype
    has_updated: jax.Array  # shape=(), dtype=bool
    skip_state: Tree = ()  # a `SkipState`, or `()`

    @property
    def acc_grads(self) -> Gradients:
        raise AttributeError(
            "acc_grads, in optax a running mean, is grad_sums. The token mean so far "
            "is optax_tokenaccum.window_gradient(state)."
        )
