"""Seven training loops for the same model on the same batches, one per function.

Each loop is written as in a user's project and can be copied unchanged. Two lines serve
only the comparison: `yield` shows it the parameters after every update, and `return`
gives it the programs, to measure their memory.

Every loop donates the arrays that it replaces, and none waits for the device.
Parameters that are not trained are in `frozen`, which is empty if all are trained.
Every program takes `frozen` as an argument, because an array that a program closes over
is copied into it as a constant.
"""

from collections.abc import Callable, Generator
from functools import partial

import jax
import optax
from batches import Batch, Window, largest_micro_batch, largest_window
from lora import merge
from transformer import Params, forward

import optax_tokenaccum
from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    softmax_cross_entropy_sum,
    token_accumulation,
)
from optax_tokenaccum.microbatching import token_mean

Programs = dict[str, jax.stages.Lowered]
Loop = Generator[Params, None, Programs]
Method = Callable[
    [Params, Params, list[Window], optax.GradientTransformation, int], Loop
]


def loss_fn(
    params: Params, batch: Batch, frozen: Params
) -> tuple[jax.Array, jax.Array]:
    """The summed loss of a batch, and the number of tokens in the sum."""
    logits = forward(merge(params, frozen), batch.inputs)
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


def mean_loss_fn(
    params: Params, batch: Batch, frozen: Params
) -> tuple[jax.Array, jax.Array]:
    """The mean loss of a batch, and the number of tokens in the mean."""
    loss_sum, num_tokens = loss_fn(params, batch, frozen)
    return loss_sum / num_tokens, num_tokens


def full_batch(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """The reference: the whole window as one batch, at the cost of its memory."""
    opt_state = inner.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch, frozen):
        grads, _ = jax.grad(mean_loss_fn, has_aux=True)(params, batch, frozen)
        updates, opt_state = inner.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        params, opt_state = train_step(params, opt_state, window.whole, frozen)
        yield params
    largest = largest_window(windows).whole
    return {"train_step": train_step.lower(params, opt_state, largest, frozen)}


def optax_multi_steps(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """The usual way: it averages the micro-batches' means, whatever their sizes."""
    optimizer = optax.MultiSteps(inner, every_k_schedule=k)
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch, frozen):
        grads, _ = jax.grad(mean_loss_fn, has_aux=True)(params, batch, frozen)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        for batch in window.micro_batches:
            params, opt_state = train_step(params, opt_state, batch, frozen)
        yield params
    largest = largest_micro_batch(windows)
    return {"train_step": train_step.lower(params, opt_state, largest, frozen)}


def multi_steps(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """The loop of `optax_multi_steps` with our class and one more argument."""
    optimizer = optax_tokenaccum.MultiSteps(inner, every_k_schedule=k)
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch, frozen):
        grads, n = jax.grad(mean_loss_fn, has_aux=True)(params, batch, frozen)
        updates, opt_state = optimizer.update(grads, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        for batch in window.micro_batches:
            params, opt_state = train_step(params, opt_state, batch, frozen)
        yield params
    largest = largest_micro_batch(windows)
    return {"train_step": train_step.lower(params, opt_state, largest, frozen)}


def transformation(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """The optax transformation, applied to gradients of the summed loss."""
    optimizer = token_accumulation(inner, every_k_schedule=k)
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch, frozen):
        grads, n = jax.grad(loss_fn, has_aux=True)(params, batch, frozen)
        updates, opt_state = optimizer.update(grads, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        for batch in window.micro_batches:
            params, opt_state = train_step(params, opt_state, batch, frozen)
        yield params
    largest = largest_micro_batch(windows)
    return {"train_step": train_step.lower(params, opt_state, largest, frozen)}


def library_train_step(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """The library's train step, which applies the updates and counts the tokens.

    `metrics` holds the values to log: the window's loss, its tokens, whether it closed.
    """
    step = make_train_step(loss_fn, inner, every_k_schedule=k)
    state = step.init(params)

    for window in windows:
        for batch in window.micro_batches:
            state, metrics = step(state, batch, frozen=frozen)
        yield state.params
    largest = largest_micro_batch(windows)
    return {
        "accumulate": step.accumulate.lower(state, largest, frozen=frozen),
        "close_window": step.close_window.lower(state),
    }


def library_window_step(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """The library's window step: one program, and one call per update.

    Micro-batches in one array have one length, so all are padded to the window's
    longest sequence. In return, no sums are kept between calls, only what the optimizer
    keeps anyway.
    """
    step = make_window_step(loss_fn, inner)
    state = step.init(params)

    for window in windows:
        state, metrics = step(state, window.stacked, frozen=frozen)
        yield state.params
    largest = largest_window(windows).stacked
    return {"window_step": step.lower(state, largest, frozen=frozen)}


def optax_microbatching(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """optax's loop over micro-batches, with an accumulator that divides once.

    optax cuts up the whole window, so the padding is the same as in the window step.
    """
    window_gradient = optax.microbatching.microbatch(
        jax.value_and_grad(loss_fn, has_aux=True),
        argnums=1,
        microbatch_size=len(windows[0].whole.inputs) // k,
        accumulator=token_mean(),
    )
    opt_state = inner.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch, frozen):
        _, grads = window_gradient(params, batch, frozen)
        updates, opt_state = inner.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        params, opt_state = train_step(params, opt_state, window.whole, frozen)
        yield params
    largest = largest_window(windows).whole
    return {"train_step": train_step.lower(params, opt_state, largest, frozen)}


REFERENCE = "full-batch"
NAIVE = "optax.MultiSteps"
METHODS: dict[str, Method] = {
    REFERENCE: full_batch,
    NAIVE: optax_multi_steps,
    "MultiSteps": multi_steps,
    "token_accumulation": transformation,
    "make_train_step": library_train_step,
    "make_window_step": library_window_step,
    "optax.microbatching": optax_microbatching,
}
