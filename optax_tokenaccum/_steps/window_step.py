"""A train step that runs one window per call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core.accumulation import SkipFn, make_accumulation
from optax_tokenaccum._core.checks import check_function
from optax_tokenaccum._core.donation import canonicalize_state
from optax_tokenaccum._core.trees import Batch, DType, Params, Tree
from optax_tokenaccum._devices.batch import MicroBatch, as_micro_batch
from optax_tokenaccum._devices.mesh import ReduceEvery, Shardings, make_devices
from optax_tokenaccum._steps import window
from optax_tokenaccum._steps.keywords import as_keywords
from optax_tokenaccum._steps.loss_fn import Loss, LossFn
from optax_tokenaccum._steps.micro_batch import Setup
from optax_tokenaccum._steps.program import HostInfo, Program
from optax_tokenaccum._steps.state import StepMetrics, StepState, WindowOptState
from optax_tokenaccum._steps.step import Step


class RunWindow(Program["WindowStep"]):
    """The program of a window and its update."""

    row_axis = 1

    def arguments(
        self,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: window.Bound = None,
        **loss_kwargs: Tree,
    ) -> tuple[MicroBatch, window.Bound]:
        window.check_micro_batches(micro_batches, num_micro_batches)
        keywords, devices = as_keywords(loss_kwargs), self.step.setup.devices
        with window.explained(micro_batches):
            given = as_micro_batch(micro_batches, rng, keywords, devices, axis=1)
        return given, num_micro_batches

    def body(
        self,
        shardings: Shardings,
        donated: Tree,
        kept: Tree,
        micro_batches: MicroBatch,
        num_micro_batches: window.Bound,
    ) -> tuple[Tree, StepMetrics]:
        step, (params, old, model_state) = self.step, donated
        opt_state, skipped, aux, model_state = window.run_window(
            step.setup,
            params,
            model_state,
            micro_batches,
            num_micro_batches,
            old.gradient_step.astype("int32"),
            shardings,
        )
        opt_state = opt_state._replace(inner_opt_state=old.inner_opt_state)
        params, new, metrics = step._update(params, opt_state, True, shardings)
        opt_state = WindowOptState(
            new.gradient_step.astype(old.gradient_step.dtype), new.inner_opt_state
        )
        metrics = metrics._replace(skipped=skipped, aux=aux)
        return (params, opt_state, model_state), metrics

    def next_info(self, known: HostInfo) -> HostInfo:
        return known


class WindowStep(Step):
    """The step that `make_window_step` returns: `step(state, micro_batches)`.

    `lower` takes the same arguments, where arrays may be `jax.ShapeDtypeStruct`; what
    its `compile()` returns is called with them, too.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_window_step
      >>> step = make_window_step(lambda p, x: (jnp.sum(p * x), x.size), optax.sgd(1.0))
      >>> state = step.init(jnp.zeros(()))
      >>> micro_batches = jnp.array([[2.0, 4.0], [6.0, 8.0], [0.0, 0.0]])
      >>> state, metrics = step(state, micro_batches, num_micro_batches=2)
      >>> print(state.params, metrics.num_tokens)
      -5.0 4.0
    """

    opt_state_type = WindowOptState

    def __post_init__(self) -> None:
        self._run = RunWindow(self)
        self.lower = self._run.lower

    def _init(self, params: Params) -> WindowOptState:
        gradient_step = jnp.zeros((), jnp.int32)
        opt_state = WindowOptState(
            gradient_step, self.setup.accumulation.init_inner(params)
        )
        return canonicalize_state(params, opt_state)

    def __call__(
        self,
        state: StepState,
        micro_batches: Batch,
        *,
        rng: jax.Array | None = None,
        num_micro_batches: window.Bound = None,
        **loss_kwargs: Tree,
    ) -> tuple[StepState, StepMetrics]:
        """Runs a window and applies its update, unless the window has no tokens.

        Args:
          state: as for `TrainStep`.
          micro_batches: leaves `[k, micro, ...]`, see `split_batch`. An error in
            `loss_fn` has a note with the shapes that `loss_fn` received.
          rng: as for `TrainStep`.
          num_micro_batches: runs only the first `num_micro_batches`. All numbers share
            one additional program.
          **loss_kwargs: as for `TrainStep`.
        """
        return self._run(
            state,
            micro_batches,
            rng=rng,
            num_micro_batches=num_micro_batches,
            **loss_kwargs,
        )


def make_window_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    has_model_state: bool = False,
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: DType | None = None,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    reduce_every: ReduceEvery | None = None,
    donate: bool = True,
) -> WindowStep:
    """Builds a jitted train step that runs a whole window per call, in one program.

    The step is `window_value_and_grad` followed by one update of `optimizer`. Between
    windows it keeps only the parameters, the optimizer's own state, which is
    `state.opt_state.inner_opt_state`, and the number of updates; no sums of gradients.

    The window closes after its last micro-batch. The `StepMetrics` describe the window:
    `skipped` tells whether any micro-batch was rejected, `aux` is stacked `[k, ...]`,
    and `mini_step` is 0.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      optimizer: as for `make_train_step`.
      has_aux: as for `make_train_step`.
      has_model_state: as for `make_train_step`.
      should_skip_update_fn: rejects micro-batches, see `token_accumulation`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.
      mesh: as for `make_train_step`.
      data_axes: as for `make_train_step`. Rows are the second axis of the
        micro-batches' leaves.
      reduce_every: as for `make_train_step`.
      donate: as for `make_train_step`.

    Raises:
      TypeError: an argument of the wrong type.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_window_step, split_batch
      >>> def loss_fn(params, batch):
      ...     errors = (params["w"] * batch["x"] - batch["y"]) ** 2
      ...     return jnp.sum(errors), batch["x"].size
      >>> step = make_window_step(loss_fn, optax.sgd(0.1))
      >>> state = step.init({"w": jnp.zeros(())})
      >>> batch = {"x": jnp.ones(8), "y": jnp.ones(8)}
      >>> state, metrics = step(state, split_batch(batch, 4))
      >>> print(state.params["w"], metrics.loss, metrics.num_tokens)
      0.2 1.0 8.0
    """
    check_function(loss_fn, "loss_fn")
    accumulation = make_accumulation(
        optimizer,
        should_skip_update_fn=should_skip_update_fn,
        accumulator_dtype=accumulator_dtype,
    )
    devices = make_devices(mesh, data_axes, reduce_every)
    loss = Loss(loss_fn, has_aux, has_model_state)
    return WindowStep(Setup(loss, accumulation, devices), donate)
