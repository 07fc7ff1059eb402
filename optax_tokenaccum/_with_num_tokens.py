"""Hands the number of tokens on through code that does not know it."""

from typing import Any

import optax
from jax.typing import ArrayLike

from optax_tokenaccum._core.state import TokenAccumulationState, nodes_of
from optax_tokenaccum._core.trees import Gradients, OptState, Params


def with_num_tokens(
    tx: optax.GradientTransformation, num_tokens: ArrayLike, **extra_args: Any
) -> optax.GradientTransformation:
    """Returns a plain transformation whose `update` is given the number of tokens.

    Some trainers call `optimizer.update(grads, state, params)` themselves, without
    keywords, so the count that `token_accumulation` needs cannot reach the optimizer.
    Build this transformation where the count is known, and give it to the trainer in
    place of `tx`. The state is that of `tx`. Under `jit`, build it inside of the traced
    function: a count from outside would be a constant of the program.

    Args:
      tx: `token_accumulation(...)`, or a transformation around it that passes extra
        arguments on.
      num_tokens: the number of tokens behind the gradients of the next `update`, a
        scalar.
      **extra_args: other arguments for `tx.update`, such as `value`.

    Raises:
      TypeError: `tx` takes no extra arguments, so it would drop the count.
      ValueError: `update` is given a state without an accumulation.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation, with_num_tokens
      >>> def apply_gradients(tx, params, opt_state, grads):  # of a trainer
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> tx = token_accumulation(optax.sgd(1.0), every_k_schedule=2)
      >>> @jax.jit
      ... def train_step(params, opt_state, x):
      ...     grads, n = jnp.sum(x), jnp.size(x)
      ...     counted = with_num_tokens(tx, n)
      ...     return apply_gradients(counted, params, opt_state, grads)
      >>> params = jnp.zeros(())
      >>> opt_state = tx.init(params)
      >>> for x in (jnp.array([8.0]), jnp.array([1.0, 2.0, 1.0])):
      ...     params, opt_state = train_step(params, opt_state, x)
      >>> print(params)
      -3.0
    """
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        raise TypeError(
            "tx must take extra arguments, to be given num_tokens: got a "
            f"{type(tx).__name__}. Give token_accumulation(...) itself, "
            "MultiSteps(...).gradient_transformation(), or a transformation around "
            "them that passes extra arguments on."
        )

    def update(
        updates: Gradients, state: OptState, params: Params | None = None
    ) -> tuple[Gradients, OptState]:
        if not nodes_of((TokenAccumulationState,), state):
            raise ValueError(
                "tx must accumulate, or num_tokens would be dropped: got a state "
                "without a TokenAccumulationState. Give token_accumulation(...)."
            )
        return tx.update(updates, state, params, num_tokens=num_tokens, **extra_args)

    return optax.GradientTransformation(tx.init, update)
