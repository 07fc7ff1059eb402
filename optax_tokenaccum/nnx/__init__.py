"""Flax NNX: steps for a model and an `nnx.Optimizer`, which they update in place.

A call runs a step of the core on the values of the variables: what the optimizer trains
are its parameters, and all other variables are its model state. The model is split in
the first call, and again when its graph changed: a layer, a variable or its metadata,
the optimizer, `train()` or `eval()`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from optax_tokenaccum._core.accumulation import SkipFn, make_accumulation
from optax_tokenaccum._core.trees import Aux, Batch, DType, Tree
from optax_tokenaccum._devices.mesh import ReduceEvery, make_devices
from optax_tokenaccum._steps import value_and_grad as _value_and_grad
from optax_tokenaccum._steps.coupled import of_model_state
from optax_tokenaccum._steps.loss_fn import Loss, LossFn
from optax_tokenaccum._steps.value_and_grad import Reduce, WindowValues
from optax_tokenaccum.nnx._model import of_parts, split_model
from optax_tokenaccum.nnx._steps import TrainStep, WindowStep


def make_train_step(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    reduce_every: ReduceEvery | None = None,
    donate: bool = True,
) -> TrainStep:
    """`optax_tokenaccum.make_train_step` for a model, which it updates in place.

    Parameters change only when the window closes. Batch statistics and `nnx.Rngs`
    change in every call, so no two micro-batches share a dropout mask. They also change
    for a micro-batch without tokens, because its rows are real. A micro-batch that
    `should_skip_update_fn` rejects changes no variable.

    Over several devices, variables are those of `has_model_state` in the step of the
    core: with `reduce_every="window"`, `nnx.BatchNorm` has the mean of all rows, and a
    variance without the part between devices, and masks differ by device.

    Args:
      loss_fn: `loss_fn(model, batch, **kwargs) -> (loss_sum, num_tokens)`: the loss
        *summed* over the micro-batch's tokens, and the number of those tokens. The
        model must keep its variables and their shapes, and `loss_fn` must not assign
        parameters: return values as `aux`, or take sown ones out with `nnx.pop`.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      mesh: as for the step of the core, like the next two arguments.
      data_axes: the axes of `mesh` over which rows are spread.
      reduce_every: when gradients are reduced over devices.
      donate: update buffers in place. A call deletes the arrays that the model and the
        optimizer held before it, which `nnx.clone(model)` shares: to keep a model, copy
        its arrays or pass `False`.

    Returns:
      `step(model, optimizer, batch, *, rng=None, **loss_kwargs) -> StepMetrics`, where
      `optimizer` is `nnx.Optimizer(model, tx, wrt=...)` and `tx` is
      `token_accumulation(...)` or `MultiSteps(..., gradients="sum")`. `optimizer.step`
      counts updates, as `metrics.gradient_step` does. `optax_tokenaccum.TrainStep`
      explains the arguments; the model's own `nnx.Rngs` need no `rng`.
      `step.accumulate(model, optimizer, batch)` never closes the window, and
      `step.close_window(model, optimizer)` closes it; both have a `.lower`.
      `step.init(model, optimizer)` does what the first call does before it runs: it
      places the model on the mesh, and lays out the optimizer's sums. Call it before a
      checkpoint is restored.

    Raises:
      TypeError: `loss_fn` is not a function.

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
    loss = Loss(of_parts(loss_fn), has_aux, has_model_state=True)
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
    """`optax_tokenaccum.make_window_step` for a model, which it updates in place.

    Statistics and `nnx.Rngs` change from micro-batch to micro-batch, and mean over
    several devices what they mean in `make_train_step`.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      has_aux: as for `make_train_step`.
      should_skip_update_fn: as for the step of the core, like the next four arguments.
      accumulator_dtype: dtype of the sums.
      mesh: the mesh of devices.
      data_axes: the axes of `mesh` over which rows are spread.
      reduce_every: when gradients are reduced over devices.
      donate: as for `make_train_step`.

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
      >>> step = make_window_step(lambda model, x: (jnp.sum(model(x)), len(x)))
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
      >>> metrics = step(model, optimizer, split_batch(jnp.ones((8, 2)), 4))
      >>> print(metrics.updated, metrics.num_tokens)
      True 8.0
    """
    loss = Loss(of_parts(loss_fn), has_aux, has_model_state=True)
    devices = make_devices(mesh, data_axes, reduce_every)
    accumulation = make_accumulation(
        optax.identity(),
        should_skip_update_fn=should_skip_update_fn,
        accumulator_dtype=accumulator_dtype,
    )
    return WindowStep(loss, accumulation, devices, donate)


def window_value_and_grad(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    reduction: Reduce = "mean",
    accumulator_dtype: DType | None = None,
    wrt: nnx.filterlib.Filter = nnx.Param,
) -> Callable[..., tuple[WindowValues, nnx.State]]:
    """`optax_tokenaccum.window_value_and_grad` for a model, in place of `nnx.grad`.

    Use it if your loop, or a trainer's, owns the optimizer. Statistics and `nnx.Rngs`
    change in the model, as in `make_window_step`; the parameters do not.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      has_aux: as for `make_train_step`.
      reduction: `"mean"` or `"sum"`, as for the function of the core.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.
      wrt: which variables gradients are of, a filter as for `nnx.Optimizer`.

    Returns:
      `f(model, micro_batches, *, rng=None, num_micro_batches=None, **loss_kwargs) ->
      ((loss, (num_tokens, aux)), grads)`, as the function of the core, where `grads` is
      an `nnx.State`. Call it inside `nnx.jit`, or with a model that is merged inside
      `jax.jit`.

    Raises:
      ValueError: no variable matches `wrt`; `loss_fn` assigns a parameter, or changes
        which variables the model has; or as for that function.
      TypeError: as for that function.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum.nnx import window_value_and_grad
      >>> f = nnx.jit(window_value_and_grad(lambda model, x: (model(x).sum(), len(x))))
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> (loss, (num_tokens, _)), grads = f(model, jnp.ones((4, 3, 2)))
      >>> _ = optimizer.update(model, grads)
      >>> print(num_tokens)
      12.0
    """
    value_and_grad = _value_and_grad.window_value_and_grad(
        of_parts(loss_fn),
        has_aux=has_aux,
        has_model_state=True,
        reduction=reduction,
        accumulator_dtype=accumulator_dtype,
    )
    return _of_model(value_and_grad, wrt)


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
    summary_of_parts = of_parts(summary_fn, "summary_fn", runs_twice=True)
    value_and_grad = of_model_state(
        summary_of_parts, loss_fn, has_aux, accumulator_dtype
    )
    return _of_model(value_and_grad, wrt)


def _of_model(f: Callable[..., Any], wrt: nnx.filterlib.Filter) -> Callable[..., Any]:
    """A function of parameters and a model state as one of a model."""

    def value_and_grad(
        model: nnx.Module, micro_batches: Batch, **kwargs: Any
    ) -> tuple[Any, nnx.State]:
        split = split_model(model, wrt)
        params, _, rest = split.state()
        (values, rest), grads = f(params, rest, micro_batches, **kwargs)
        split.write(model, split.state()._replace(model_state=rest))
        return values, split.static.states_of(grads, rest)[0]

    return value_and_grad
