"""The code of docs/trainers.md#maxtext."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.utils.sharding import maybe_shard_with_name

from optax_tokenaccum import split_batch
from optax_tokenaccum.nnx import window_value_and_grad

MEANS = "moe_lb_loss", "indexer_loss", "mtp_loss"
REFUSED = "use_tunix_gradient_accumulation", "routed_bias", "te_moe_block"


def bfloat16(x):
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x


def gradient_accumulation_loss_and_grad(
    loss_fn, config, model, params, params_shardings, data, dropout_rng
):
    used = [name for name in REFUSED if getattr(config, name)]
    if used:
        raise ValueError(f"These options must be off in this accumulation: got {used}.")

    # The backward pass may clip to a fixed range ("fixed,..." in
    # bwd_quantization_calibration_method, for example), which is for the gradient of a
    # mean. So loss and count are divided by one power of two near the window's tokens.
    capacity = config.global_batch_size_to_train_on * config.max_target_length
    scale = 2.0 ** -round(math.log2(capacity))

    def sum_fn(model, batch):
        loss_sum, aux = loss_fn(model, config, batch, None, None, is_train=True)
        return loss_sum * scale, (aux["total_weights"] * scale, aux)

    # With ZeRO-1, gather the parameters once, in bfloat16, and not in every layer.
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    if config.shard_optimizer_over_data:
        params = jax.tree.map(bfloat16, params)
    shard = functools.partial(maybe_shard_with_name, shard_mode=config.shard_mode)
    params = jax.tree.map(shard, params, params_shardings)
    copy = nnx.merge(graphdef, params, others, copy=True)

    micro_batches = split_batch(data, config.gradient_accumulation_steps)
    value_and_grad = window_value_and_grad(sum_fn, has_aux=True)
    (loss, (_, aux)), grads = value_and_grad(copy, micro_batches)
    nnx.update(model, nnx.state(copy, nnx.Not(nnx.Param)))
    aux = jax.tree.map(lambda x: jnp.sum(x, 0), aux)
    for name in MEANS:
        aux[name] /= config.gradient_accumulation_steps
    return loss, aux, grads
