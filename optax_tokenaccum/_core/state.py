"""What an accumulation carries from call to call, and finding it in other states."""

from typing import Any, NamedTuple

import jax

from optax_tokenaccum._core.trees import Gradients, OptState


class TokenAccumulationState(NamedTuple):
    """State of `token_accumulation`.

    Shapes, dtypes and weak types are those of `init` for ever, so it goes through
    `jax.lax.scan` and a donating `jax.jit` without a second trace. So is the placement;
    but over several devices a `jit` of your own needs `out_shardings` for that, if the
    optimizer has state of other shapes than the parameters. The three `acc_*` mean
    something only while `mini_step > 0`: when a window closes they are not zeroed, and
    may hold its updates; the first micro-batch of the next overwrites them.

    Attributes:
      mini_step: micro-batches accumulated so far in the open window.
      gradient_step: windows closed by an update so far.
      inner_opt_state: the state of the inner optimizer.
      acc_grads: sum of the window's gradients; the tree and shapes of the parameters,
        behind a leading axis of devices where each keeps a sum of its own.
      acc_tokens: sum of the window's `num_tokens`.
      acc_value: sum of the window's losses; 0 where no `value` was given.
      has_updated: whether the last call closed its window with an update.
      skip_state: what `should_skip_update_fn` last returned, `()` without one.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation
      >>> optimizer = token_accumulation(optax.sgd(1.0), every_k_schedule=2)
      >>> state = optimizer.init(jnp.zeros(()))
      >>> grad_of_sum = jnp.asarray(8.0)
      >>> _, state = optimizer.update(grad_of_sum, state, num_tokens=3)
      >>> print(state.mini_step, state.gradient_step, state.acc_grads, state.acc_tokens)
      1 0 8.0 3.0
    """

    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    inner_opt_state: OptState
    acc_grads: Gradients  # dtype=float32, or wider where the parameter is
    acc_tokens: jax.Array  # shape=(), dtype=float32, or wider where a parameter is
    acc_value: jax.Array  # shape=(), dtype=that of acc_tokens
    has_updated: jax.Array  # shape=(), dtype=bool
    skip_state: Any = ()


def nodes_of(kind: Any, tree: Any) -> list[Any]:
    """The nodes of `tree` of one class or several, not looking inside of them."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in nodes if isinstance(node, kind)]
