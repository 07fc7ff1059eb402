"""Flax NNX: steps for a model and an `nnx.Optimizer`, which they update in place.

A call splits the model and runs a step of the core: what the optimizer trains are its
parameters, and all other variables are its model state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from optax_tokenaccum import _window
from optax_tokenaccum._accumulation import SkipFn
from optax_tokenaccum._checks import check_function
from optax_tokenaccum._coupled import of_model_state
from optax_tokenaccum._devices import ReduceEvery, make_devices
from optax_tokenaccum._loss import Loss, LossFn
from optax_tokenaccum._nnx_model import loss_of_model, open_model, summary_of_model
from optax_tokenaccum._nnx_steps import TrainStep, WindowStep
from optax_tokenaccum._trees import Aux, Batch, DType, Tree
from optax_tokenaccum._window import WindowValues


def make_train_step(
    loss_fn: LossFn,
    *optimizer: Any,
    has_aux: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    reduce_every: ReduceEvery | None = None,
    donate: bool = True,
) -> TrainStep:
    """Builds a jitted NNX train step that takes one micro-batch per call.

    The step updates the model and the optimizer in place. Parameters change only when
    the window closes. Batch statistics and `nnx.Rngs` change in every call, so no two
    micro-batches share a dropout mask. They also change for a micro-batch without
    tokens, because its rows are real. If `should_skip_update_fn` rejects a micro-batch,
    all variables of the model keep the values they had before it.

    Over several devices, with `reduce_every="window"`, each device computes the
    statistics of its own rows, and after every micro-batch the model takes their mean:
    floating variables are averaged. The mean in `nnx.BatchNorm` is then that of all
    rows. The variance is the mean of the devices' variances, without the part between
    devices. Keys are folded with the index of the device, so that masks differ. A
    variable of whole numbers may not depend on the rows. With
    `reduce_every="micro_batch"`, `loss_fn` sees all rows, and statistics are of them.

    The model must keep its variables and their shapes, and `loss_fn` must not assign
    parameters: return values as `aux`, or take sown ones out with `nnx.pop`.

    Args:
      loss_fn: `loss_fn(model, batch, **kwargs) -> (loss_sum, num_tokens)`: the loss
        *summed* over the micro-batch's tokens, and the number of those tokens.
      *optimizer: none; the optimizer goes to the call.
      has_aux: whether `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      mesh: the mesh of devices, see `optax_tokenaccum.make_train_step`.
      data_axes: the axes of `mesh` over which rows are spread, see there.
      reduce_every: when gradients are reduced over devices, see there.
      donate: whether to update buffers in place. A call then deletes the arrays that
        the model and the optimizer held before it. `nnx.clone(model)` shares these
        arrays: to keep a model, copy its arrays or pass `False`.

    Returns:
      `step(model, optimizer, batch, *, rng=None, **loss_kwargs) -> StepMetrics`, where
      `optimizer` is `nnx.Optimizer(model, tx, wrt=...)` and `tx` is
      `token_accumulation(...)` or `MultiSteps(..., gradients="sum")`. `optimizer.step`
      counts calls; `metrics.gradient_step` counts updates.
      `step.accumulate(model, optimizer, batch)` never closes the window, and
      `step.close_window(model, optimizer)` closes it; both have a `.lower`.
      `step.init(model, optimizer)` places the model on the mesh and lays out the
      optimizer's sums, as the first call does: call it before a checkpoint is
      restored. `optax_tokenaccum.TrainStep` explains the arguments; the model's own
      `nnx.Rngs` need no `rng`.

    Raises:
      TypeError: `loss_fn` is not a function, or an optimizer is given.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum import token_accumulation
      >>> from optax_tokenaccum.nnx import make_train_step
      >>> def loss_fn(model, batch):
      ...     x, y, mask = batch
      ...     errors = (model(x)[:, 0] - y) ** 2
      ...     return jnp.sum(errors * mask), jnp.sum(mask)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = token_accumulation(optax.adamw(1e-2), every_k_schedule=2)
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> step = make_train_step(loss_fn)
      >>> for mask in ([1.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
      ...     batch = jnp.ones((3, 2)), jnp.ones(3), jnp.array(mask)
      ...     metrics = step(model, optimizer, batch)
      ...     print(metrics.updated, metrics.num_tokens)
      False 1.0
      True 4.0
    """
    if optimizer:
        raise TypeError(
            "The step of an NNX model is made from loss_fn alone: got another argument "
            f"of type {type(optimizer[0]).__name__}. Give the optimizer to the call, "
            "step(model, optimizer, batch)."
        )
    loss = _loss_of(loss_fn, has_aux)
    return TrainStep(loss, make_devices(mesh, data_axes, reduce_every), donate)


def make_window_step(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: DType | None = None,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    reduce_every: ReduceEvery | None = None,
    donate: bool = True,
) -> WindowStep:
    """Builds a jitted NNX train step that runs a whole window per call.

    It is `optax_tokenaccum.make_window_step` for a model and an optimizer that are
    updated in place. Statistics and `nnx.Rngs` move from micro-batch to micro-batch, as
    in `make_train_step`, which also says what they mean over several devices.

    Args:
      loss_fn: `loss_fn(model, batch, **kwargs) -> (loss_sum, num_tokens)`, the loss
        *summed* over the micro-batch's tokens.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      should_skip_update_fn: rejects micro-batches, see `token_accumulation`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.
      mesh: the mesh of devices, see `optax_tokenaccum.make_train_step`.
      data_axes: the axes of `mesh` over which rows are spread, see
        `optax_tokenaccum.make_window_step`.
      reduce_every: when gradients are reduced over devices, see there.
      donate: update buffers in place, see `make_train_step`.

    Returns:
      `step(model, optimizer, micro_batches, *, rng=None, num_micro_batches=None,
      **loss_kwargs) -> StepMetrics`, where `optimizer` is `nnx.Optimizer(model, tx,
      wrt=...)` around the plain optimizer. `optimizer.step` counts updates, as
      `metrics.gradient_step` does, and `rng` is folded with it. It has `init`, as in
      `make_train_step`, and a `.lower`.

    Raises:
      TypeError: an argument of the wrong type.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum import split_batch
      >>> from optax_tokenaccum.nnx import make_window_step
      >>> def loss_fn(model, batch):
      ...     errors = (model(batch["x"])[:, 0] - batch["y"]) ** 2
      ...     return jnp.sum(errors), len(errors)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
      >>> step = make_window_step(loss_fn)
      >>> batch = {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}
      >>> metrics = step(model, optimizer, split_batch(batch, 4))
      >>> print(metrics.updated, metrics.num_tokens)
      True 8.0
    """
    loss = _loss_of(loss_fn, has_aux)
    options = {
        "should_skip_update_fn": should_skip_update_fn,
        "accumulator_dtype": accumulator_dtype,
    }
    devices = make_devices(mesh, data_axes, reduce_every)
    return WindowStep(loss, options, devices, donate)


def window_value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    accumulator_dtype: DType | None = None,
    wrt: nnx.filterlib.Filter = nnx.Param,
) -> Callable[..., tuple[WindowValues, nnx.State]]:
    """`optax_tokenaccum.window_value_and_grad` for a model, in place of `nnx.grad`.

    Use it if your loop, or a trainer's, owns the optimizer. Statistics and `nnx.Rngs`
    move on in the model from micro-batch to micro-batch, as in `make_window_step`: no
    two micro-batches share a dropout mask. The parameters do not change. The model must
    keep its variables and their shapes.

    Args:
      loss_fn: `loss_fn(model, batch, **kwargs) -> (loss_sum, num_tokens)`, the loss
        *summed* over the micro-batch's tokens.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.
      wrt: which variables gradients are of, a filter as for `nnx.Optimizer`.

    Returns:
      `f(model, micro_batches, *, rng=None, num_micro_batches=None, **loss_kwargs) ->
      ((loss, (num_tokens, aux)), grads)`, where `grads` is an `nnx.State`. Arguments
      and results are those of the function that
      `optax_tokenaccum.window_value_and_grad` returns. Call it inside `nnx.jit`, or
      with a model that is merged inside `jax.jit`.

    Raises:
      ValueError: no variable matches `wrt`; `loss_fn` assigns a parameter, or changes
        which variables the model has; or as for that function.
      TypeError: as for that function.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum.nnx import window_value_and_grad
      >>> value_and_grad = window_value_and_grad(
      ...     lambda model, x: (jnp.sum(model(x)), len(x)))
      >>> @nnx.jit
      ... def train_step(model, optimizer, micro_batches):
      ...     (loss, (num_tokens, _)), grads = value_and_grad(model, micro_batches)
      ...     optimizer.update(model, grads)
      ...     return loss, num_tokens
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> loss, num_tokens = train_step(model, optimizer, jnp.ones((4, 3, 2)))
      >>> print(num_tokens)
      12.0
    """
    check_function(loss_fn, "loss_fn")
    of_parts = _window.window_value_and_grad(
        loss_of_model(loss_fn),
        has_aux=has_aux,
        has_model_state=True,
        accumulator_dtype=accumulator_dtype,
    )
    return _of_model(of_parts, wrt)


def coupled_value_and_grad(
    summary_fn: Callable[..., Tree],
    loss_fn: Callable[[Tree], Any],
    *,
    has_aux: bool = False,
    accumulator_dtype: DType | None = None,
    wrt: nnx.filterlib.Filter = nnx.Param,
) -> Callable[..., tuple[tuple[jax.Array, Aux], nnx.State]]:
    """`optax_tokenaccum.coupled_value_and_grad` for a model.

    Both runs of a micro-batch get the same `nnx.Rngs`, so the same dropout masks, which
    move on in the model from micro-batch to micro-batch. `summary_fn` may change no
    other variable, such as the statistics of `nnx.BatchNorm`.

    Args:
      summary_fn: `summary_fn(model, batch, **kwargs)` returns a tree of arrays.
      loss_fn: `loss_fn(summaries) -> loss`, where leaves are stacked `[k, ...]`.
      has_aux: `loss_fn` returns `(loss, aux)`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.
      wrt: which variables gradients are of, a filter as for `nnx.Optimizer`.

    Returns:
      `f(model, micro_batches, *, rng=None, num_micro_batches=None, **kwargs) -> ((loss,
      aux), grads)`, where `grads` is an `nnx.State`.

    Raises:
      ValueError: `summary_fn` changes variables of the model; or as for that function.
      TypeError: as for that function.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_tokenaccum.nnx import coupled_value_and_grad
      >>> f = coupled_value_and_grad(
      ...     lambda model, x: model(x), lambda y: jnp.var(y, axis=(0, 1)).sum())
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> (loss, _), grads = nnx.jit(f)(model, jnp.ones((4, 3, 2)))
      >>> print(loss)
      0.0
    """
    check_function(summary_fn, "summary_fn")
    of_parts = of_model_state(
        summary_of_model(summary_fn), loss_fn, has_aux, accumulator_dtype
    )
    return _of_model(of_parts, wrt)


def _of_model(
    of_parts: Callable[..., Any], wrt: nnx.filterlib.Filter
) -> Callable[..., Any]:
    """A function of parameters and a model state as one of a model."""

    def value_and_grad(
        model: nnx.Module, micro_batches: Batch, **kwargs: Any
    ) -> tuple[Any, nnx.State]:
        opened = open_model(model, wrt)
        (values, rest), grads = of_parts(
            opened.params.tree(),
            opened.rest.tree(),
            micro_batches,
            nnx_static=opened.static,
            **kwargs,
        )
        opened.write_rest(rest)
        return values, opened.static.state_of(grads)

    return value_and_grad


def _loss_of(loss_fn: LossFn, has_aux: bool) -> Loss:
    check_function(loss_fn, "loss_fn")
    return Loss(loss_of_model(loss_fn), has_aux, has_model_state=True)
