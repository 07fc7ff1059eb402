"""Flax NNX: steps for a model and an `nnx.Optimizer`, which they update in place."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from optax_tokenaccum._core import checks
from optax_tokenaccum._core.accumulation import Accumulation, make_accumulation
from optax_tokenaccum._core.contribution import SkipFn
from optax_tokenaccum._core.loss import Loss, LossFn
from optax_tokenaccum._core.schedule import make_schedule
from optax_tokenaccum._core.state import TokenAccumulationState, nodes_of
from optax_tokenaccum._core.trees import Batch, DType
from optax_tokenaccum._devices.mode import Mode, ReduceEvery, make_mode
from optax_tokenaccum._multi_steps import transformation_of
from optax_tokenaccum._nnx.model_loss import ModelLoss, Models
from optax_tokenaccum._nnx.nodes import read
from optax_tokenaccum._nnx.step import ModelStep, Part
from optax_tokenaccum._steps import train_step, window_step
from optax_tokenaccum._steps.state import StepMetrics
from optax_tokenaccum._steps.window import Window, WindowValues, make_window


class TrainStep(ModelStep):
    """A train step, called as `step(model, optimizer, batch) -> StepMetrics`.

    Use `make_train_step` to build one.

    Attributes:
      accumulate: `accumulate(model, optimizer, batch, *, rng=None, **loss_kwargs)` adds
        a micro-batch and never closes the window.
      close_window: `close_window(model, optimizer)` closes the window, for example at
        the end of an epoch, and divides by the tokens it holds so far. A window without
        tokens applies no update.

    Both return `StepMetrics`, and have a `.lower` with the same arguments.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum import token_accumulation
      >>> from optax_tokenaccum.nnx import make_train_step
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = token_accumulation(optax.sgd(0.1), every_k_schedule=8)
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> step = make_train_step(lambda model, x: (jnp.sum(model(x)), len(x)))
      >>> print(step(model, optimizer, jnp.ones((3, 2))).updated)
      False
      >>> print(step.close_window(model, optimizer).updated)
      True
    """

    def __init__(
        self,
        loss_fn: LossFn,
        has_aux: bool,
        mode: Mode,
        donate: bool,
    ):
        super().__init__(mode, donate)
        self._loss_fn = loss_fn
        self._has_aux = has_aux
        self.accumulate = Part(self, "accumulate")
        self.close_window = Part(self, "close_window")

    def __call__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batch: Batch,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> StepMetrics:
        """Adds a micro-batch; if this closes the window, applies the update.

        The model and the optimizer are updated in place.
        `optax_tokenaccum.TrainStep.__call__` explains the other arguments; the model's
        own `nnx.Rngs` need no `rng`.

        Raises:
          TypeError: `optimizer` is not an `nnx.Optimizer` around an accumulation, or
            `loss_fn` did not return `(loss_sum, num_tokens)`.
          ValueError: the accumulation has no schedule, or was built with
            `gradients="mean"`.
        """
        if not _accumulation_of(optimizer).schedule.is_set:
            raise ValueError(
                "A window needs a rule that closes it: got an accumulation with "
                "neither every_k_schedule nor every_n_tokens. Give one to "
                "token_accumulation, or call step.accumulate(model, optimizer, batch) "
                "for each micro-batch and step.close_window(model, optimizer) at the "
                "end of the window."
            )
        return self._run("__call__", model, optimizer, batch, rng=rng, **loss_kwargs)

    def _build(self, optimizer: nnx.Optimizer) -> train_step.TrainStep:
        accumulation = _accumulation_of(optimizer)
        may_restructure = (
            accumulation.should_skip_update_fn is None and not self._mode.data_axes
        )
        call = ModelLoss(self._loss_fn, self._has_aux, may_restructure)
        loss = Loss(call, self._has_aux or may_restructure, has_model_state=True)
        return train_step.TrainStep(loss, accumulation, self._mode, self._donate)


class WindowStep(ModelStep):
    """A window step, called as `step(model, optimizer, micro_batches)`.

    Use `make_window_step` to build one.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum.nnx import make_window_step
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> step = make_window_step(lambda model, x: (jnp.sum(model(x)), len(x)))
      >>> print(step(model, optimizer, jnp.ones((4, 3, 2))).num_tokens)
      12.0
    """

    _counts_calls = False

    def __init__(
        self,
        loss: Loss,
        options: dict[str, Any],
        mode: Mode,
        donate: bool,
    ):
        super().__init__(mode, donate)
        self._loss = loss
        self._options = options

    def __call__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: jax.typing.ArrayLike | None = None,
        **loss_kwargs: Any,
    ) -> StepMetrics:
        """Runs a window and applies its update, unless the window has no tokens.

        The model and the optimizer are updated in place.
        `optax_tokenaccum.WindowStep.__call__` explains the other arguments; the model's
        own `nnx.Rngs` need no `rng`.
        """
        kwargs = {"rng": rng, "num_micro_batches": num_micro_batches, **loss_kwargs}
        return self._run("__call__", model, optimizer, micro_batches, **kwargs)

    def lower(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        micro_batches: Batch,
        **kwargs: Any,
    ) -> jax.stages.Lowered:
        """Lowers the program of a call with these arguments."""
        return self._lowered("lower", model, optimizer, micro_batches, **kwargs)

    def _build(self, optimizer: nnx.Optimizer) -> window_step.WindowStep:
        kinds = TokenAccumulationState, optax.MultiStepsState
        if transformation_of(optimizer.tx) or nodes_of(kinds, optimizer.opt_state):
            raise ValueError(
                "The optimizer of a window step must not accumulate, since a call is a "
                "whole window: got an accumulation in it. Give nnx.Optimizer the plain "
                "optimizer, or use make_train_step."
            )
        accumulation = make_accumulation(optimizer.tx, make_schedule(), **self._options)
        window = Window(self._loss, accumulation)
        return window_step.WindowStep(window, self._mode, self._donate)

    def _opt_state(self, optimizer: nnx.Optimizer) -> TokenAccumulationState:
        """With the only number that the optimizer keeps, that of its updates."""
        step: Any = optimizer.step
        no: Any = None
        return TokenAccumulationState(no, step, optimizer.opt_state, (), no, no, no)


def make_train_step(
    loss_fn: LossFn,
    *,
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

    Args:
      loss_fn: `loss_fn(model, batch, **kwargs) -> (loss_sum, num_tokens)`: the loss
        *summed* over the micro-batch's tokens, and the number of those tokens. On one
        device, and without a skip function, it may add variables to the model.
      has_aux: whether `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      mesh: the mesh of devices, see `optax_tokenaccum.make_train_step`.
      data_axes: the axes of `mesh` over which rows are spread, see there. The first
        call places the model on the mesh and lays out the optimizer's sums; so does
        `step.init(model, optimizer)`, which comes before a checkpoint is restored.
      reduce_every: when gradients are reduced over devices, see there.
      donate: whether to update buffers in place. A call then deletes the arrays that
        the model and the optimizer held before it. `nnx.clone(model)` shares these
        arrays: to keep a model, copy its arrays or pass `False`.

    Returns:
      `step(model, optimizer, batch) -> StepMetrics`, where `optimizer` is
      `nnx.Optimizer(model, tx, wrt=...)` and `tx` is `token_accumulation(...)` or
      `MultiSteps(..., gradients="sum")`. `optimizer.step` counts calls;
      `metrics.gradient_step` counts updates.

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
    checks.check_function(loss_fn, "loss_fn")
    mode = make_mode(mesh, data_axes, reduce_every)
    return TrainStep(loss_fn, has_aux, mode, donate)


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
    in `make_train_step`, which also says what they mean over several devices. The model
    must keep its variables: take sown values out in `loss_fn` with `nnx.pop`.

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
      `step(model, optimizer, micro_batches) -> StepMetrics`, where `optimizer` is
      `nnx.Optimizer(model, tx, wrt=...)` around the plain optimizer.
      `optimizer.step` counts updates, as `metrics.gradient_step` does, and `rng` is
      folded with it.

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
    checks.check_function(loss_fn, "loss_fn")
    options = {
        "should_skip_update_fn": should_skip_update_fn,
        "accumulator_dtype": accumulator_dtype,
    }
    call = ModelLoss(loss_fn, has_aux, may_restructure=False)
    loss = Loss(call, has_aux, has_model_state=True)
    mode = make_mode(mesh, data_axes, reduce_every)
    return WindowStep(loss, options, mode, donate)


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
    checks.check_function(loss_fn, "loss_fn")
    call = ModelLoss(loss_fn, has_aux, may_restructure=False)
    loss = Loss(call, has_aux, has_model_state=True)
    window, models = make_window(loss, accumulator_dtype), Models()

    def value_and_grad(
        model: nnx.Module, micro_batches: Batch, **kwargs: Any
    ) -> tuple[WindowValues, nnx.State]:
        nodes = read(models, model, wrt)
        (values, variables), grads = window.value_and_grad(
            nodes.params.tree(), nodes.variables(), micro_batches, **kwargs
        )
        nodes.write_variables(variables)
        return values, nodes.static.state_of(grads)

    return value_and_grad


def _accumulation_of(optimizer: nnx.Optimizer) -> Accumulation:
    given = getattr(optimizer, "tx", optimizer)
    transformation = transformation_of(given)
    if not isinstance(optimizer, nnx.Optimizer) or transformation is None:
        raise TypeError(
            "The optimizer must be an nnx.Optimizer around token_accumulation(...) "
            "itself, or around MultiSteps(..., gradients='sum'): got "
            f"{given!r}. A chain goes inside: token_accumulation(optax.chain(...), k)."
        )
    gradients = transformation.accumulation.gradients
    if gradients != "sum":
        raise ValueError(
            "loss_fn returns a sum over tokens, so the optimizer must be told "
            f"gradients='sum': got {gradients!r}. Write token_accumulation(inner, k), "
            "or MultiSteps(inner, k, gradients='sum')."
        )
    return transformation.accumulation
