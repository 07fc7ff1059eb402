"""Closes a window and applies its update to the parameters."""

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import checks, overwritten
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Gradients, OptState, Params, TracedBool
from optax_tokenaccum._steps.state import StepMetrics, metrics_of


def close_and_apply(
    accumulation: Accumulation,
    closes: TracedBool,
    params: Params,
    opt_state: TokenAccumulationState,
) -> tuple[Params, TokenAccumulationState, StepMetrics]:
    """If `closes`, closes the window and applies its update to `params`."""
    inner, layout = accumulation.inner, accumulation.layout
    of_trained, of_values = layout.split(params)
    checks.check_inner_state(inner, opt_state.inner_opt_state, params)
    metrics = metrics_of(opt_state, *accumulation.window_so_far(opt_state))
    trained, _ = overwritten.split(params)
    sums, maxima = overwritten.split(opt_state.acc_grads)

    def update(
        gradient: Gradients, total: TokenAccumulationState
    ) -> tuple[tuple[Params, jax.Array], OptState]:
        updates, inner_opt_state = inner.update(
            overwritten.with_zeros(gradient, params),
            opt_state.inner_opt_state,
            params,
            value=metrics.loss,
        )
        norm = accumulation.gradient_norm(total)
        applied = _applied(params, updates)
        if maxima:
            moved, values = overwritten.split(applied)
            largest = [
                x.astype(p.dtype)
                for x, p in zip(of_values.largest(maxima), values, strict=True)
            ]
            applied = overwritten.join(moved, largest, params)
        return (layout.place(applied), norm), inner_opt_state

    try:
        (params, grad_norm), closed = accumulation.on(of_trained).close(
            opt_state._replace(acc_grads=sums),
            closes,
            trained,
            update,
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
    return params, closed._replace(acc_grads=opt_state.acc_grads), metrics


def _applied(params: Params, updates: Gradients) -> Params:
    """`optax.apply_updates` for the parameters that are trained.

    Integer parameters do not change: an update from weight decay would be truncated.
    """
    updates = jax.tree.map(
        lambda p, u: u if jnp.issubdtype(p.dtype, jnp.inexact) else jnp.zeros_like(p),
        params,
        updates,
    )
    return optax.apply_updates(params, updates)
