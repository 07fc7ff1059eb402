"""What every way into the library that is given a loss does with a micro-batch."""

from collections.abc import Callable
from typing import Any

import jax
from optax import Params

from optax_tokenaccum._core.accumulation import Accumulation
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
from optax_tokenaccum._core.trees import Batch, M


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
    added = accumulation.add_loss(of_params, opt_state, params)
    aux, changed = added.aux
    model_state = updated(model_state, changed, added.skipped, peers.unify)
    return Output(added.state, (model_state, added.skipped), aux)


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
