"""Five training loops for the same model on the same batches, one a function.

Each is written as in a project of your own and can be copied as it stands. Two lines
serve the comparison alone: `yield` lets it look at the parameters after every update,
and `return` hands it the programs, to be asked for their memory.

All of them donate what they replace, and none waits for the device.
"""

from collections.abc import Callable, Generator
from functools import partial

import jax
import optax
from batches import Batch, Window, largest_micro_batch, largest_whole
from transformer import Params, forward

import optax_tokenaccum
from optax_tokenaccum import (
    make_train_step,
    softmax_cross_entropy_sum,
    token_accumulation,
)

Programs = dict[str, jax.stages.Lowered]
Loop = Generator[Params, None, Programs]
Method = Callable[[Params, list[Window], optax.GradientTransformation, int], Loop]


def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The summed loss of a batch, and the number of tokens that it is a sum over."""
    logits = forward(params, batch.inputs)
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


def mean_loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The mean loss of a batch, and the number of tokens that it is a mean over."""
    loss_sum, num_tokens = loss_fn(params, batch)
    return loss_sum / num_tokens, num_tokens


def full_batch(
    params: Params, windows: list[Window], inner: optax.GradientTransformation, k: int
) -> Loop:
    """The reference: the whole window at once, with the memory that it takes."""
    opt_state = inner.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        grads, _ = jax.grad(mean_loss_fn, has_aux=True)(params, batch)
        updates, opt_state = inner.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        params, opt_state = train_step(params, opt_state, window.whole)
        yield params
    return {"train_step": train_step.lower(params, opt_state, largest_whole(windows))}


def optax_multi_steps(
    params: Params, windows: list[Window], inner: optax.GradientTransformation, k: int
) -> Loop:
    """What people have: it averages the micro-batches' means, whatever their sizes."""
    optimizer = optax.MultiSteps(inner, every_k_schedule=k)
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        grads, _ = jax.grad(mean_loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        for batch in window.micro_batches:
            params, opt_state = train_step(params, opt_state, batch)
        yield params
    return {
        "train_step": train_step.lower(params, opt_state, largest_micro_batch(windows))
    }


def multi_steps(
    params: Params, windows: list[Window], inner: optax.GradientTransformation, k: int
) -> Loop:
    """The loop of `optax_multi_steps` with the other class and one argument more."""
    optimizer = optax_tokenaccum.MultiSteps(inner, every_k_schedule=k)
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        grads, n = jax.grad(mean_loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        for batch in window.micro_batches:
            params, opt_state = train_step(params, opt_state, batch)
        yield params
    return {
        "train_step": train_step.lower(params, opt_state, largest_micro_batch(windows))
    }


def transformation(
    params: Params, windows: list[Window], inner: optax.GradientTransformation, k: int
) -> Loop:
    """The optax transformation, fed with gradients of the summed loss."""
    optimizer = token_accumulation(inner, every_k_schedule=k)
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        grads, n = jax.grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, num_tokens=n)
        return optax.apply_updates(params, updates), opt_state

    for window in windows:
        for batch in window.micro_batches:
            params, opt_state = train_step(params, opt_state, batch)
        yield params
    return {
        "train_step": train_step.lower(params, opt_state, largest_micro_batch(windows))
    }


def library_train_step(
    params: Params, windows: list[Window], inner: optax.GradientTransformation, k: int
) -> Loop:
    """The library's own step: there are no updates to apply, nor anything to count.

    `metrics` say what a log wants: the window's loss, its tokens, whether it closed.
    """
    step = make_train_step(loss_fn, inner, every_k_schedule=k)
    state = step.init(params)

    for window in windows:
        for batch in window.micro_batches:
            state, metrics = step(state, batch)
        yield state.params
    return {
        "accumulate": step.accumulate.lower(state, largest_micro_batch(windows)),
        "close_window": step.close_window.lower(state),
    }


REFERENCE = "full-batch"
NAIVE = "optax.MultiSteps"
METHODS: dict[str, Method] = {
    REFERENCE: full_batch,
    NAIVE: optax_multi_steps,
    "MultiSteps": multi_steps,
    "token_accumulation": transformation,
    "make_train_step": library_train_step,
}
