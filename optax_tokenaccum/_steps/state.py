"""What every step carries from call to call, and what it reports."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.sums import kinds_of


class StepState(NamedTuple):
    """What a train step carries from call to call; save all of it.

    Attributes:
      params: the parameters.
      opt_state: the state of the accumulation, the inner optimizer's within.

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

    params: Any
    opt_state: TokenAccumulationState


class StepMetrics(NamedTuple):
    """What happened in one call; arrays of their own, alive after donation.

    Attributes:
      loss: token mean of the loss over the window so far; 0 where it has no token.
      num_tokens: tokens in the window so far, this micro-batch's included.
      grad_norm: global norm of the gradient given to the optimizer, 0 without update.
      updated: whether this call closed its window with an update.
      skipped: whether this micro-batch was rejected.
      mini_step: micro-batches in the open window after the call.
      gradient_step: updates after the call.
      aux: what `loss_fn` returned besides, for this micro-batch; `None` without.

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
    num_tokens: jax.Array  # shape=(), dtype=float32, or wider where a parameter is
    grad_norm: jax.Array  # shape=(), dtype=float32, or wider where a parameter is
    updated: jax.Array  # shape=(), dtype=bool
    skipped: jax.Array  # shape=(), dtype=bool
    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    aux: Any = None


def metrics_of(
    accumulation: Accumulation, opt_state: TokenAccumulationState
) -> StepMetrics:
    """The metrics of the open window that `opt_state` holds."""
    loss, num_tokens = accumulation.window_so_far(opt_state)
    return StepMetrics(
        loss=loss,
        num_tokens=num_tokens,
        grad_norm=jnp.zeros_like(loss),
        updated=jnp.zeros((), jnp.bool_),
        skipped=jnp.zeros((), jnp.bool_),
        mini_step=opt_state.mini_step,
        gradient_step=opt_state.gradient_step,
    )


def close_and_apply(
    accumulation: Accumulation,
    closes: jax.Array | bool,
    params: Any,
    opt_state: TokenAccumulationState,
) -> tuple[Any, TokenAccumulationState, StepMetrics]:
    """Ends the window where `closes` and applies its update to `params`."""
    checks.check_inner_state(accumulation.inner, opt_state.inner_opt_state, params)
    metrics = metrics_of(accumulation, opt_state)

    def finish(updates: Any, whole: TokenAccumulationState) -> tuple[Any, jax.Array]:
        norm = accumulation.gradient_norm(whole)
        applied = _apply(params, updates, whole.acc_grads)
        return accumulation.layout.settled(applied), norm

    try:
        (params, grad_norm), opt_state = accumulation.close(
            opt_state,
            closes,
            like=params,
            params=params,
            extra_args={"value": metrics.loss},
            finish=finish,
            otherwise=(params, metrics.grad_norm),
        )
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise TypeError(
            "The optimizer of a step must need nothing but gradients, parameters and "
            f"value, the window's loss: {error}. Give update what it needs in a loop "
            "of your own, with token_accumulation; or leave out the line search, "
            "optax.lbfgs(1.0, linesearch=None)."
        ) from error
    return (
        params,
        opt_state,
        metrics._replace(
            grad_norm=grad_norm,
            updated=opt_state.has_updated,
            mini_step=opt_state.mini_step,
            gradient_step=opt_state.gradient_step,
        ),
    )


def _apply(params: Any, updates: Any, sums: Any) -> Any:
    """`optax.apply_updates` to what is trained.

    Integers stay, which weight decay would truncate; what is to be overwritten takes
    the value that came in place of its gradient.
    """
    updates = jax.tree.map(
        lambda p, u: u if jnp.issubdtype(p.dtype, jnp.inexact) else jnp.zeros_like(p),
        params,
        updates,
    )
    return jax.tree.map(
        lambda p, new, kind: p if kind.is_gradient else new.astype(p.dtype),
        optax.apply_updates(params, updates),
        sums,
        kinds_of(params),
    )


def require_step_state(state: Any, *, accumulates: bool) -> None:
    if not isinstance(state, StepState):
        raise TypeError(
            "The state must be the StepState that step.init or the last call returned: "
            f"got {type(state).__name__}. A checkpoint is restored into one with "
            "jax.eval_shape(step.init, params) as its target."
        )
    if accumulates:
        name = "The opt_state of a train step"
        checks.check_state(state.opt_state, TokenAccumulationState, name)
    # Every call donates all of the state: one array tells.
    donated = state.opt_state.mini_step if accumulates else state.params
    checks.check_alive(jax.tree.leaves(donated)[:1])
