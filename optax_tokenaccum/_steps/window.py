"""A loop over the micro-batches of a window, from empty sums."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.accumulation import Added
from optax_tokenaccum._core.trees import Aux, Batch, ModelState, Params, Tree
from optax_tokenaccum._devices.batch import MicroBatch
from optax_tokenaccum._devices.mesh import Shardings
from optax_tokenaccum._steps.layer_axes import (
    LayerAxes,
    layer_axes_of,
    move_layers_back,
    move_layers_first,
    shardings_of_moved,
)
from optax_tokenaccum._steps.micro_batch import Setup, add_micro_batch

Bound = ArrayLike | None  # of the micro-batches that run


def run_window(
    setup: Setup,
    params: Params,
    model_state: ModelState,
    micro_batches: MicroBatch,
    num_micro_batches: Bound,
    gradient_step: jax.Array | None = None,
    shardings: Shardings = None,
) -> Added:
    """Runs the micro-batches, from an empty window to one that may be closed.

    Keys are folded with `gradient_step`, if it is known, and the micro-batch's index.
    """
    params, batches = jax.tree.map(jnp.asarray, params), micro_batches.batch
    accumulation = setup.accumulation

    def given(batch: Batch, i: ArrayLike) -> MicroBatch:
        own = dataclasses.replace(micro_batches, batch=batch, axis=0)
        position = (i,) if gradient_step is None else (gradient_step, i)
        return own.with_key_at(*position)

    layer_axes: LayerAxes = {}
    # Layers of matrices. A skip function is shown gradients with the axes of the user.
    has_layers = max(map(jnp.ndim, jax.tree.leaves(params)), default=0) > 2
    if has_layers and accumulation.should_skip_update_fn is None:
        with explained(batches):
            first = given(micro_batch_at(batches, 0), 0)
            layer_axes = layer_axes_of(setup, params, model_state, first)

    def of_moved(params: Params, *args: Tree, **kwargs: Tree) -> Any:
        params = move_layers_back(params, layer_axes)
        return setup.loss.loss_fn(params, *args, **kwargs)

    loss_of_moved = dataclasses.replace(setup.loss, loss_fn=of_moved)
    setup_of_moved = dataclasses.replace(setup, loss=loss_of_moved)
    params = move_layers_first(params, layer_axes)
    shardings = shardings_of_moved(shardings, layer_axes)
    sums = setup.devices.zeros(params, accumulation.dtypes(params))
    empty = accumulation.empty_window(params, sums)
    if gradient_step is not None:
        empty = empty._replace(gradient_step=gradient_step)

    def add(i: ArrayLike, batch: Batch, carry: Tree) -> tuple[Tree, Aux]:
        state, model_state, any_skipped = carry
        added = add_micro_batch(
            setup_of_moved, params, model_state, state, given(batch, i), shardings
        )
        carry = added.opt_state, added.model_state, any_skipped | added.skipped
        return carry, added.aux

    carry = empty, model_state, jnp.zeros((), jnp.bool_)
    (state, model_state, skipped), aux = for_each(
        add, carry, batches, num_micro_batches, setup.loss.has_aux
    )
    sums = move_layers_back(state.grad_sums, layer_axes)
    state = state._replace(grad_sums=sums)
    return Added(state, skipped, aux, model_state)


def micro_batch_at(micro_batches: Batch, i: ArrayLike) -> Batch:
    def take(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.tree.map(take, micro_batches)


def for_each(
    add: Callable[[ArrayLike, Batch, Tree], tuple[Tree, Aux]],
    carry: Tree,
    micro_batches: Batch,
    num_micro_batches: Bound,
    has_aux: bool,
    name: str = "loss_fn",
) -> tuple[Tree, Aux]:
    """Runs `add(i, batch, carry) -> (carry, aux)`; `aux` is stacked `[k, ...]`.

    Errors say what the function of this `name` was given.
    """
    batches = jax.tree.map(jnp.asarray, micro_batches)
    k = bound = jax.tree.leaves(batches)[0].shape[0]
    if num_micro_batches is not None:  # all numbers share one program
        bound = jnp.asarray(num_micro_batches)
        bound = bound.astype(trees.common_dtype(bound.dtype, jnp.int32))
        bound = jnp.clip(bound, 0, k)

    def run(i: ArrayLike, carry: Tree) -> tuple[Tree, Aux]:
        with explained(micro_batches, name):
            return add(i, micro_batch_at(batches, i), carry)

    def body(i: ArrayLike, so_far: Tree) -> Tree:
        def put(xs: jax.Array, x: jax.Array) -> jax.Array:
            return xs.at[i].set(x, mode="promise_in_bounds")

        carry, stacks = so_far
        carry, aux = run(i, carry)
        return carry, jax.tree.map(put, stacks, aux)

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.broadcast_to(jnp.zeros_like(x), (k, *x.shape))

    stacks = None
    if has_aux:  # otherwise, the loss need not be traced
        stacks = jax.tree.map(zeros, jax.eval_shape(run, 0, carry)[1])
    so_far = trees.as_returned(functools.partial(body, 0), (carry, stacks))
    return jax.lax.fori_loop(0, bound, body, so_far)


def check_micro_batches(micro_batches: Batch, num_micro_batches: Bound) -> None:
    with explained(micro_batches):
        k = trees.leading_axis(micro_batches, "micro_batches")
    if isinstance(num_micro_batches, int) and not 0 <= num_micro_batches <= k:
        raise ValueError(f"num_micro_batches must be from 0 to {k}.")


@contextlib.contextmanager
def explained(micro_batches: Batch, name: str = "loss_fn") -> Iterator[None]:
    """Adds a note to errors, with the shapes of one micro-batch of a window."""
    try:
        yield
    except Exception as error:
        shapes = ", ".join(
            f"{getattr(x, 'shape', ())[1:]} at {path}"
            for path, x in trees.named_leaves(micro_batches)
        )
        error.add_note(
            f"micro_batches must have leaves [k, micro, ...], and {name} is given "
            f"[micro, ...] of these: got shape {shapes}. split_batch(batch, k) makes "
            "them of a batch [k * micro, ...]. A list of micro-batches must be stacked "
            "into one tree: jax.tree.map(lambda *xs: jnp.stack(xs), *micro_batches). "
            "For different shapes use make_train_step, which takes one micro-batch per "
            "call."
        )
        raise
