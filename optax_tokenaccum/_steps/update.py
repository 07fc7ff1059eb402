"""Closes a window and applies its update to the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.sums import kinds_of
from optax_tokenaccum._core.trees import Gradients, Params
from optax_tokenaccum._steps.state import StepMetrics, metrics_of


def close_and_apply(
    accumulation: Accumulation,
    closes: jax.Array | bool,
    params: Params,
    opt_state: TokenAccumulationState,
) -> tuple[Any, TokenAccumulationState, StepMetrics]:
    """If `closes`, closes the window and applies its update to `params`."""
    checks.check_inner_state(accumulation.inner, opt_state.inner_opt_state, params)
    metrics = metrics_of(opt_state, *accumulation.window_so_far(opt_state))

    def finish(
        updates: Gradients, whole: TokenAccumulationState
    ) -> tuple[Any, jax.Array]:
        norm = accumulation.gradient_norm(whole)
        applied = _apply(params, updates, whole.acc_grads)
        return accumulation.layout.settled(applied), norm

    try:
        (params, grad_norm), closed = accumulation.close(
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
    metrics = metrics._replace(
        grad_norm=grad_norm,
        updated=closed.has_updated,
        mini_step=closed.mini_step,
        gradient_step=closed.gradient_step,
    )
    return params, closed, metrics


def _apply(params: Params, updates: Gradients, sums: Any) -> Any:
    """Applies `optax.apply_updates` to the parameters that are trained.

    Integer parameters do not change: an update from weight decay would be truncated. A
    parameter to be overwritten takes the value in `sums`, which is not a gradient.
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
