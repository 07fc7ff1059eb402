"""Programs on 8 devices for `test_collectives.py`: steps, sums per device, rows."""

import functools
from typing import Any

import collective_operations  # noqa: F401, registers its programs
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from model_on_8_devices import (
    ROWS,
    SHAPES,
    K,
    array,
    compiled,
    gradient,
    loss_fn,
    mapped,
    mesh,
    parameters,
    placed,
    program,
    rows,
)

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    split_batch,
)

# What this library compiles under plain jit.


@program
def gradient_of_rows() -> Any:
    return compiled(gradient, parameters(), rows("data"))


def window_step() -> Any:
    step = make_window_step(loss_fn, optax.adamw(1e-3))
    return step, placed(jax.eval_shape(step.init, parameters()))


@program
def window_of_k() -> Any:
    step, state = window_step()
    return step.lower(state, rows(None, "data")).compile()


@program
def window_of_as_many_as_given() -> Any:
    step, state = window_step()
    return compiled(
        lambda state, micro_batches, n: step(state, micro_batches, num_micro_batches=n),
        state,
        rows(None, "data"),
        array((), dtype=jnp.int32),
    )


@program
def window_that_splits_its_batch() -> Any:
    step, state = window_step()
    return compiled(
        lambda state, batch: step(state, split_batch(batch, K)), state, rows("data")
    )


def train_step(*spec: Any, **schedule: Any) -> Any:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = make_train_step(loss_fn, optimizer, **schedule)
    return step, placed(jax.eval_shape(step.init, parameters()), *spec)


@program
def accumulate() -> Any:
    step, state = train_step()
    return step.accumulate.lower(state, rows("data")).compile()


@program
def close() -> Any:
    step, state = train_step()
    return step.close_window.lower(state).compile()


@program
def token_budget() -> Any:
    step, state = train_step(every_n_tokens=1000)
    return compiled(lambda *args: step(*args), state, rows("data"))


@program
def token_budget_of_sharded_parameters() -> Any:
    step, state = train_step("data", every_n_tokens=1000)
    return compiled(lambda *args: step(*args)[0], state, rows("data"), out=state)


# Micro-batches whose tokens are counted by the loss: a conditional skips the backward
# pass of one without tokens, whose forward pass still runs if the loss has `aux`.


def fsdp(has_aux: bool) -> Any:
    def masked_loss_fn(params: Any, batch: Any) -> Any:
        mask = batch["y"] != 0
        predicted = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        losses = jnp.where(mask, (predicted - batch["y"]) ** 2, 0)
        num_tokens = jnp.sum(mask)
        return jnp.sum(losses), (num_tokens, jnp.max(predicted)) if has_aux else (
            num_tokens
        )

    step = make_train_step(masked_loss_fn, optax.adamw(1e-3), has_aux=has_aux)
    state = placed(jax.eval_shape(step.init, parameters()), "data")
    return step.accumulate.lower(state, rows("data")).compile()


@program
def fsdp_of_counted_tokens() -> Any:
    return fsdp(has_aux=False)


@program
def fsdp_of_counted_tokens_with_aux() -> Any:
    return fsdp(has_aux=True)


# Sums per device, reduced when the window closes.


def sums_per_device() -> Any:
    return {name: array((8, *shape), "data") for name, shape in SHAPES.items()}


def add_gradient(sums: Any, params: Any, batch: Any) -> Any:
    return jax.tree.map(lambda s, g: s + g, sums, gradient(params, batch))


@program
def deferred_accumulate() -> Any:
    arguments = sums_per_device(), parameters(), rows("data")
    return compiled(mapped(add_gradient, *arguments, out=P("data")), *arguments)


@program
def deferred_close() -> Any:
    def add_up(sums: Any) -> Any:
        return jax.tree.map(lambda s: jnp.sum(s, 0), sums)

    return compiled(add_up, sums_per_device(), out=parameters())


@program
def deferred_token_budget() -> Any:
    of_each = sums_per_device(), parameters(), rows("data")
    add = mapped(add_gradient, *of_each, out=P("data"))

    def step(sums: Any, params: Any, num_tokens: Any, batch: Any) -> Any:
        sums, num_tokens = add(sums, params, batch), num_tokens + ROWS
        params = jax.lax.cond(
            num_tokens > 1000,
            lambda: jax.tree.map(lambda p, s: p - jnp.sum(s, 0), params, sums),
            lambda: params,
        )
        return sums, params, num_tokens

    arguments = sums_per_device(), parameters(), array((), dtype=jnp.int32)
    return compiled(step, *arguments, rows("data"), out=arguments)


@program
def deferred_no_more() -> Any:
    def add(sums: Any, params: Any, batch: Any) -> Any:
        reduced = jax.lax.psum(gradient(params, batch), "data")
        return jax.tree.map(lambda s, g: s + g / 8, sums, reduced)

    arguments = sums_per_device(), parameters(), rows("data")
    return compiled(mapped(add, *arguments, out=P("data")), *arguments)


# Rows.


@program
def rows_by_split_batch() -> Any:
    cut = functools.partial(split_batch, k=K)
    return compiled(cut, rows("data"), out=rows_of_micro_batches("data"))


@program
def rows_in_order() -> Any:
    def cut(batch: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), batch)

    return compiled(cut, rows("data"), out=rows_of_micro_batches("data"))


@program
def rows_by_split_batch_over_two_axes() -> Any:
    both, on = ("data", "model"), mesh(2)
    cut = functools.partial(split_batch, k=K)
    return compiled(cut, rows(both, on=on), out=rows_of_micro_batches(both, on=on))


def rows_of_micro_batches(axes: Any, on: Any = None) -> Any:
    return rows(None, axes, on=on)
