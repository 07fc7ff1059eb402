"""The state that every step carries from call to call, and its metrics."""

from typing import Any, Generic, NamedTuple, TypeVar

import jax

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.state import TokenAccumulationState, has_sums
from optax_tokenaccum._core.trees import M, P


class StepState(NamedTuple, Generic[P]):
    """The state that a train step carries from call to call; save all of it.

    Attributes:
      params: the parameters.
      opt_state: the open window, the number of updates, and the inner optimizer's
        state, `opt_state.inner_opt_state`. In a window step, which has no open window
        between calls, `acc_grads` is `()`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> step = make_train_step(loss_fn, optax.sgd(1.0), every_k_schedule=2)
      >>> state = step.init(jnp.zeros(()))
      >>> print(state.params, state.opt_state.mini_step)
      0.0 0
      >>> target = jax.eval_shape(step.init, jnp.zeros(()))  # to restore a checkpoint
      >>> print(type(target).__name__, target.params.shape)
      StepState ()
    """

    params: P
    opt_state: TokenAccumulationState


class ModelStepState(NamedTuple, Generic[P, M]):
    """The state of a step with `has_model_state=True`; save all of it.

    Attributes:
      params: the parameters.
      opt_state: as in `StepState`.
      model_state: what the loss changes besides parameters, such as the statistics of
        batch normalization: the state that the last micro-batch left.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> def loss_fn(params, seen, x):  # the state is the largest value seen
      ...     return (jnp.sum(params * x), x.size), jnp.maximum(seen, x.max())
      >>> step = make_train_step(loss_fn, optax.sgd(1.0), 2, has_model_state=True)
      >>> state = step.init(jnp.zeros(()), jnp.zeros(()))
      >>> state, _ = step(state, jnp.array([2.0, 5.0]))
      >>> print(type(state).__name__, state.model_state)
      ModelStepState 5.0
    """

    params: P
    opt_state: TokenAccumulationState
    model_state: M


AnyStepState = StepState[P] | ModelStepState[P, Any]
S = TypeVar("S", bound=AnyStepState)


class StepMetrics(NamedTuple):
    """The metrics of one call; their arrays stay alive when the state is donated.

    Attributes:
      loss: token mean of the loss over the window so far; 0 without tokens.
      num_tokens: tokens in the window so far, including this micro-batch.
      grad_norm: global norm of the gradient given to the optimizer; 0 without update.
      updated: whether this call closed its window with an update.
      skipped: whether this micro-batch was rejected.
      mini_step: micro-batches in the open window after the call.
      gradient_step: number of updates so far, including this call.
      aux: the `aux` that `loss_fn` returned for this micro-batch; `None` without.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> step = make_train_step(loss_fn, optax.sgd(1.0), every_k_schedule=2)
      >>> state = step.init(jnp.ones(()))
      >>> for x in (jnp.full(1, 2.0), jnp.full(9, 10.0)):
      ...     state, m = step(state, x)
      ...     print(m.loss, m.num_tokens, m.grad_norm, m.updated, m.mini_step)
      2.0 1.0 0.0 False 1
      9.2 10.0 9.2 True 0
    """

    loss: jax.Array  # shape=(), dtype=float32, or wider where a parameter is
    num_tokens: jax.Array  # shape=(), of the same dtype
    grad_norm: jax.Array  # shape=(), of the same dtype
    updated: jax.Array  # shape=(), dtype=bool
    skipped: jax.Array  # shape=(), dtype=bool
    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    aux: Any = None


def model_state_of(state: AnyStepState) -> Any:
    return state.model_state if isinstance(state, ModelStepState) else None


def with_parts(state: S, opt_state: TokenAccumulationState, model_state: Any) -> S:
    """The state of the same parameters; `model_state` is dropped if it has none."""
    of_model = {"model_state": model_state} if isinstance(state, ModelStepState) else {}
    return state._replace(opt_state=opt_state, **of_model)


def completed(new: Any, old: Any) -> Any:
    """A new state, with what the old one has in the places of `None`."""
    if isinstance(new, StepState | ModelStepState | TokenAccumulationState):
        return new._make(map(completed, new, old))
    return old if new is None else new


def key_array(state: AnyStepState) -> Any:
    """The array whose identity is the key to what the host knows about a state."""
    if has_sums(state.opt_state):
        return state.opt_state.mini_step
    return next(iter(jax.tree.leaves(state.params)), None)


def require_step_state(
    state: Any, *, accumulates: bool, has_model_state: bool | None = None
) -> None:
    """Raises if a step cannot take the state; `None` is a step of either kind."""
    kind, other = StepState, ModelStepState
    if has_model_state:
        kind, other = other, kind
    if has_model_state is not None and isinstance(state, other):
        raise TypeError(
            f"The state must be a {kind.__name__}, for this step was made with "
            f"has_model_state={has_model_state}: got a {other.__name__}."
        )
    if not isinstance(state, kind | other):
        raise TypeError(
            f"The state must be the {kind.__name__} that step.init or the last call "
            f"returned: got {type(state).__name__}. Restore a checkpoint with "
            "jax.eval_shape(step.init, params) as its target; take one that was "
            "restored without a target over with regroup_sums(state, "
            "step.init(params))."
        )
    opt_state = state.opt_state
    if accumulates:
        name = "The opt_state of a train step"
        trees.check_state(opt_state, TokenAccumulationState, name)
    elif not isinstance(opt_state, TokenAccumulationState):
        raise TypeError(
            "The opt_state of a window step must be the TokenAccumulationState that "
            f"step.init or the last call returned: got {type(opt_state).__name__}."
        )
    if has_sums(opt_state) != accumulates and jax.tree.leaves(state.params):
        own, other = ("train", "window") if accumulates else ("window", "train")
        raise ValueError(
            f"The state must be of a {own} step: got that of a {other} step. Between "
            "windows, take over what both keep: with new = step.init(params).opt_state "
            "and old = state.opt_state, write state._replace(opt_state="
            "new._replace(gradient_step=old.gradient_step, "
            "inner_opt_state=old.inner_opt_state))."
        )
    # A call donates all of these arrays, so checking one is enough.
    trees.check_alive(key_array(state))
