"""Training loops that apply the exact gradient, and one of Flax that does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from broken_loops import loss_fn, make_step, scale, sum_and_count
from data import Batch
from flax import nnx
from helpers import run_step, stack
from llama import VOCABULARY

import optax_tokenaccum
import optax_tokenaccum.nnx
from optax_tokenaccum import (
    close_window,
    make_train_step,
    make_window_step,
    softmax_cross_entropy_sum,
    token_accumulation,
    window_value_and_grad,
)
from optax_tokenaccum.linen import TrainState


def mean_loss_fn(params: Any, batch: Batch) -> Any:
    loss_sum, num_tokens = loss_fn(params, batch)
    return loss_sum / num_tokens, num_tokens


mean_and_count = jax.jit(jax.grad(mean_loss_fn, has_aux=True))


def full_batch(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *micro_batches)
    grads, _ = mean_and_count(params, rows)
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def scan_by_hand(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    @jax.jit
    def sums(params: Any, stacked: Any) -> Any:
        def body(carry: Any, batch: Batch) -> Any:
            grads, n = jax.grad(loss_fn, has_aux=True)(params, batch)
            return jax.tree.map(jnp.add, carry, (grads, n)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return jax.lax.scan(body, (zeros, jnp.float32(0)), stacked)[0]

    total, n = sums(params, stack(micro_batches))
    grads = scale(total, 1 / n)
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


def with_transformation(loss_fn: Any) -> Any:
    gradient = jax.jit(jax.grad(loss_fn, has_aux=True))

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        optimizer = token_accumulation(optimizer, len(micro_batches))
        state = optimizer.init(params)
        for batch in micro_batches:
            grads, n = gradient(params, batch)
            updates, state = optimizer.update(grads, state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        return params

    return run


def by_multi_steps(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    optimizer = optax_tokenaccum.MultiSteps(optimizer, 2 * len(micro_batches))
    state = optimizer.init(params)
    for batch in micro_batches:
        grads, n = mean_and_count(params, batch)
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        params = optax.apply_updates(params, updates)
    updates, _ = close_window(optimizer, state, params)
    return optax.apply_updates(params, updates)


def with_train_step(loss_fn: Any) -> Any:
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        step = make_train_step(loss_fn, optimizer, len(micro_batches))
        return run_step(step, step.init(params), micro_batches)[0].params

    return run


by_transformation = with_transformation(loss_fn)
by_train_step = with_train_step(loss_fn)


def by_window_step(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    window_step = make_window_step(loss_fn, optimizer)
    state, _ = window_step(window_step.init(params), stack(micro_batches))
    return state.params


def by_value_and_grad(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    f = jax.jit(window_value_and_grad(loss_fn))
    _, grads = f(params, stack(micro_batches))
    return make_step(optimizer)(params, optimizer.init(params), grads)[0]


RIGHT = {
    "full batch": full_batch,
    "scan by hand": scan_by_hand,
    "token_accumulation": by_transformation,
    "MultiSteps": by_multi_steps,
    "train step": by_train_step,
    "window step": by_window_step,
    "value and grad": by_value_and_grad,
}


# Loops of Flax.


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.head = nnx.Linear(8, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.head(jnp.tanh(self.embed(tokens)))


def nnx_loss_fn(model: NNXModel, batch: Batch) -> Any:
    logits = model(batch.inputs)
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


GRAPH, NNX_PARAMS = nnx.split(NNXModel(nnx.Rngs(0)))


def by_nnx(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    model = nnx.merge(GRAPH, params)
    tx = token_accumulation(optimizer, len(micro_batches))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_step = optax_tokenaccum.nnx.make_train_step(nnx_loss_fn)
    for batch in micro_batches:
        train_step(model, optimizer, batch)
    return nnx.state(model)


def by_nnx_without_counts(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    model = nnx.merge(GRAPH, params)
    tx = optax.MultiSteps(optimizer, len(micro_batches)).gradient_transformation()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for batch in micro_batches:

        def mean_loss(model: NNXModel, batch: Batch = batch) -> Any:
            loss_sum, n = nnx_loss_fn(model, batch)
            return loss_sum / n

        optimizer.update(model, nnx.grad(mean_loss)(model))
    return nnx.state(model)


def by_linen(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    tx = token_accumulation(optimizer, len(micro_batches))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    for batch in micro_batches:
        grads, n = sum_and_count(state.params, batch)
        state = state.apply_gradients(grads=grads, num_tokens=n)
    return state.params
