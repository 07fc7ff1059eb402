"""The state of an accumulation, and how to find it inside other states."""

from typing import Any, NamedTuple

import jax

from optax_tokenaccum._core.trees import T


class TokenAccumulationState(NamedTuple):
    """State of `token_accumulation`, and of every step as `opt_state`.

    Shapes, dtypes, weak types and placement never change after `init`, so the state
    passes through `jax.lax.scan` and a donating `jax.jit` without a second trace. One
    exception: if the optimizer has state whose shape matches no parameter, your own
    `jax.jit` over several devices needs `out_shardings` to keep the placement.

    The three `acc_*` fields are valid only while `mini_step > 0`. What they hold after
    a window closes means nothing; the first micro-batch of the next one overwrites it.

    Attributes:
      mini_step: micro-batches accumulated so far in the open window.
      gradient_step: windows closed by an update so far.
      inner_opt_state: the state of the inner optimizer.
      acc_grads: sum of the window's gradients, with the tree and shapes of the
        parameters. Where each device keeps a separate sum, a leading axis of devices
        is added. In a window step, which has no open window between calls, `()`.
      acc_tokens: sum of the window's `num_tokens`.
      acc_value: sum of the window's losses; 0 if no `value` was given.
      has_updated: whether the last call closed its window with an update.
      skip_state: the tree that `should_skip_update_fn` last returned; `()` if there
        is none.

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
    inner_opt_state: Any
    acc_grads: Any  # dtype=float32, or the parameter's if wider
    acc_tokens: jax.Array  # shape=(), dtype=float32, or a parameter's if wider
    acc_value: jax.Array  # shape=(), dtype=acc_tokens.dtype
    has_updated: jax.Array  # shape=(), dtype=bool
    skip_state: Any = ()


def has_sums(state: Any) -> bool:
    """Whether `state` is that of windows that may be open: not in a window step."""
    if not isinstance(state, TokenAccumulationState):
        return False
    return not isinstance(state.acc_grads, tuple) or state.acc_grads != ()


def nodes_of(kind: type[T] | tuple[type[T], ...], tree: Any) -> list[T]:
    """The nodes of `tree` that are instances of `kind`, a class or several classes."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in nodes if isinstance(node, kind)]
