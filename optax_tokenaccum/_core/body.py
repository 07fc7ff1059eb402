"""What every way into the library that is given a loss does with a micro-batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from optax import Params

from optax_tokenaccum._core import overwritten
from optax_tokenaccum._core.accumulation import Accumulation, Added
from optax_tokenaccum._core.layout import Computed, Peers
from optax_tokenaccum._core.loss import Loss, MicroBatch, Output, unpack
from optax_tokenaccum._core.model_state import (
    Changes,
    changes,
    integers_of,
    updated,
    with_own_keys,
)
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Batch, Gradients, M, T


def add_micro_batch(
    loss: Loss,
    accumulation: Accumulation,
    opt_state: TokenAccumulationState,
    micro_batch: MicroBatch,
    params: Params,
    model_state: M,
) -> Output:
    """Differentiates the loss of a micro-batch, and adds it to the open window.

    A skipped micro-batch leaves no trace, neither in the sums nor in the model state.

    Returns:
      `Output(opt_state, (model_state, skipped), aux)`.
    """
    peers = accumulation.peers
    of_params = checked(loss, params, model_state, micro_batch, peers)
    trained, values = overwritten.split(params)
    sums, _ = overwritten.split(opt_state.acc_grads)
    added = _of_trained(accumulation, params).add_loss(
        lambda trained, values: of_params(overwritten.join(trained, values, params)),
        opt_state._replace(acc_grads=sums),
        trained,
        values,
    )
    aux, changed = added.aux
    model_state = updated(model_state, changed, added.skipped, peers.unify)
    opt_state = _with_maxima(accumulation, opt_state, added, added.gradients, params)
    return Output(opt_state, (model_state, added.skipped), aux)


def add_gradients(
    accumulation: Accumulation,
    opt_state: TokenAccumulationState,
    gradients: Gradients,
    num_tokens: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
) -> TokenAccumulationState:
    """Adds gradients that were computed elsewhere."""
    trained, values = overwritten.split(gradients)
    sums, _ = overwritten.split(opt_state.acc_grads)
    added = _of_trained(accumulation, gradients).add(
        trained, opt_state._replace(acc_grads=sums), None, num_tokens, value
    )
    return _with_maxima(accumulation, opt_state, added, values, gradients)


def window_gradient(
    accumulation: Accumulation,
    opt_state: TokenAccumulationState,
    like: Gradients,
    *,
    may_loop: bool = False,
) -> Gradients:
    """The mean gradient of a window; zeros without tokens.

    Where parameters are overwritten, it is their next value; without tokens, the value
    in `like`, or 0 if that has shapes alone.
    """
    sums, maxima = overwritten.split(opt_state.acc_grads)
    trained, values = overwritten.split(like)
    gradient = accumulation.window_gradient_in_place(
        opt_state._replace(acc_grads=sums), trained, may_loop=may_loop
    )
    has_tokens = opt_state.acc_tokens > 0
    maxima = [
        jnp.where(has_tokens, x, y if hasattr(y, "__array__") else 0).astype(y.dtype)
        for x, y in zip(maxima, values, strict=True)
    ]
    return overwritten.join(gradient, maxima, like)


def _of_trained(accumulation: Accumulation, params: Params) -> Accumulation:
    """An accumulation of what is trained; its skip function is shown whole trees."""
    layout, _ = accumulation.layout.split(params)
    accumulation = accumulation.on(layout, accumulation.peers)
    skip_fn = accumulation.should_skip_update_fn
    if skip_fn is None:
        return accumulation

    def shown(mean: Gradients, gradient_step: jax.Array, _: Params) -> Any:
        return skip_fn(overwritten.with_zeros(mean, params), gradient_step, params)

    return replace(accumulation, should_skip_update_fn=shown)


def _with_maxima(
    accumulation: Accumulation,
    opt_state: TokenAccumulationState,
    added: Added[T],
    values: list[jax.Array],
    params: Params,
) -> TokenAccumulationState:
    """The state to which a micro-batch was added, with new maxima too."""
    _, maxima = overwritten.split(opt_state.acc_grads)
    _, layout = accumulation.layout.split(params)
    maxima = overwritten.add(
        layout.read(maxima), values, opt_state.mini_step == 0, added.counts
    )
    sums = overwritten.join(added.state.acc_grads, layout.write(maxima), params)
    return added.state._replace(acc_grads=sums)


def call(
    loss: Loss, params: Params, model_state: M, micro_batch: MicroBatch
) -> tuple[Any, M]:
    rows, rng, loss_kwargs = micro_batch
    key = {} if rng is None else {"rng": rng}
    return loss.call(params, model_state, rows, **loss_kwargs, **key)


def checked(
    loss: Loss, params: Params, model_state: M, micro_batch: MicroBatch, peers: Peers
) -> Callable[[Params], tuple[jax.Array, tuple[Any, tuple[Any, Changes]]]]:
    """The loss as a function of the parameters; its count can be added up.

    The function returns `(loss_sum, (num_tokens, (aux, changes of the model state)))`.
    """
    if micro_batch.rng is not None:
        micro_batch = micro_batch._replace(rng=peers.own_key(micro_batch.rng))
    model_state = with_own_keys(model_state, peers.own_key)

    def of_rows(params: Params, rows: Batch, rng: jax.Array | None) -> Computed:
        given = micro_batch._replace(rows=rows, rng=rng)
        returned, new = call(loss, params, model_state, given)
        loss_sum, (num_tokens, aux) = unpack(returned, loss.has_aux)
        changed = changes(model_state, new)
        return Computed(
            {"num_tokens": num_tokens},
            integers_of(model_state, changed),
            loss_sum,
            (num_tokens, (aux, changed)),
        )

    peers.check_counts(of_rows, params, micro_batch.rows, micro_batch.rng)

    def of_params(params: Params) -> Any:
        computed = of_rows(params, micro_batch.rows, micro_batch.rng)
        return computed.loss_sum, computed.rest

    return of_params
