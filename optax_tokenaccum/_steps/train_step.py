"""A train step for one micro-batch per call, which applies updates by itself."""

from collections.abc import Sequence

import jax
import optax

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.accumulation import Added, SkipFn, make_accumulation
from optax_tokenaccum._core.schedule import CountSchedule
from optax_tokenaccum._core.state import SkipState, TokenAccumulationState
from optax_tokenaccum._core.trees import Batch, DType, ModelState, Params, Tree
from optax_tokenaccum._devices.batch import MicroBatch, as_micro_batch
from optax_tokenaccum._devices.mesh import ReduceEvery, Shardings, make_devices
from optax_tokenaccum._steps.keywords import as_keywords
from optax_tokenaccum._steps.loss_fn import Loss, LossFn
from optax_tokenaccum._steps.micro_batch import Setup, add_micro_batch
from optax_tokenaccum._steps.program import HostInfo, Partition, Program
from optax_tokenaccum._steps.state import StepMetrics, StepState
from optax_tokenaccum._steps.step import Step


class Accumulate(Program["TrainStep"]):
    """The program for every micro-batch: it reads the parameters, and adds to the sums.

    It is not given the inner optimizer's state.
    """

    def arguments(
        self, batch: Batch, *, rng: jax.Array | None = None, **loss_kwargs: Tree
    ) -> tuple[MicroBatch]:
        devices = self.step.setup.devices
        return (as_micro_batch(batch, rng, as_keywords(loss_kwargs), devices),)

    def partition(self, state: StepState) -> Partition:
        inner = state.opt_state.inner_opt_state

        def combine(donated: Tree) -> StepState:
            opt_state, model_state = donated
            opt_state = opt_state._replace(inner_opt_state=inner)
            return state._replace(opt_state=opt_state, model_state=model_state)

        opt_state = state.opt_state._replace(inner_opt_state=())
        return (opt_state, state.model_state), state.params, combine

    def body(
        self, shardings: Shardings, donated: Tree, kept: Params, micro_batch: MicroBatch
    ) -> tuple[Tree, StepMetrics]:
        opt_state, model_state = donated
        added = self.step._add(kept, model_state, opt_state, micro_batch, shardings)
        metrics = self.step._metrics(added.opt_state)
        metrics = metrics._replace(skipped=added.skipped, aux=added.aux)
        return (added.opt_state, added.model_state), metrics

    def next_info(self, known: HostInfo) -> HostInfo:
        keeps_count = self.step.setup.accumulation.should_skip_update_fn is None
        if known.count is None or not keeps_count:
            return known._replace(count=None)
        return known._replace(count=known.count + 1)


class Close(Program["TrainStep"]):
    """The program for the end of a window."""

    def arguments(self) -> tuple[()]:
        return ()

    def partition(self, state: StepState) -> Partition:
        def combine(donated: Tree) -> StepState:
            params, opt_state = donated
            return state._replace(params=params, opt_state=opt_state)

        return (state.params, state.opt_state), (), combine

    def body(
        self, shardings: Shardings, donated: Tree, kept: Tree
    ) -> tuple[Tree, StepMetrics]:
        params, opt_state = donated
        self.step._check_sums(opt_state.grad_sums, params)
        params, opt_state, metrics = self.step._update(
            params, opt_state, True, shardings
        )
        return (params, opt_state), metrics

    def next_info(self, known: HostInfo) -> HostInfo:
        return known._replace(count=0)


class AccumulateAndClose(Program["TrainStep"]):
    """Both programs in one, if the host does not know when a window closes."""

    arguments = Accumulate.arguments

    def body(
        self, shardings: Shardings, donated: Tree, kept: Tree, micro_batch: MicroBatch
    ) -> tuple[Tree, StepMetrics]:
        step, (params, opt_state, model_state) = self.step, donated
        added = step._add(params, model_state, opt_state, micro_batch, shardings)
        opt_state = added.opt_state
        closes = step.setup.accumulation.schedule.closes(
            opt_state.mini_step, opt_state.acc_tokens, opt_state.gradient_step
        )
        params, opt_state, metrics = step._update(params, opt_state, closes, shardings)
        metrics = metrics._replace(skipped=added.skipped, aux=added.aux)
        return (params, opt_state, added.model_state), metrics

    def next_info(self, known: HostInfo) -> HostInfo:
        return known._replace(count=None)


class TrainStep(Step):
    """The step that `make_train_step` returns: `step(state, batch)`.

    Attributes:
      accumulate: `accumulate(state, batch, *, rng=None, **loss_kwargs)` adds a
        micro-batch and never closes the window.
      close_window: `close_window(state)` closes the window and divides by the tokens
        it holds so far. A window without tokens applies no update.

    The step and both attributes return `(state, StepMetrics)`. All three have a `lower`
    with the same arguments, where arrays may be `jax.ShapeDtypeStruct`; what its
    `compile()` returns is called with these arguments, too. `step.lower` is the one
    program that also runs within an outer `jit`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> step = make_train_step(lambda p, x: (jnp.sum(p * x), x.size), optax.sgd(1.0))
      >>> state = step.init(jnp.zeros(()))
      >>> for x in (jnp.full(1, 2.0), jnp.full(9, 10.0)):  # the data says how many
      ...     state, metrics = step.accumulate(state, x)
      >>> state, metrics = step.close_window(state)
      >>> print(state.params)
      -9.2
    """

    opt_state_type = TokenAccumulationState

    def __post_init__(self) -> None:
        self.accumulate = Accumulate(self)
        self.close_window = Close(self)
        self._accumulate_and_close = AccumulateAndClose(self)
        self.lower = self._accumulate_and_close.lower

    def _init(self, params: Params) -> TokenAccumulationState:
        sums = self.setup.devices.zeros(params, self.setup.accumulation.dtypes(params))
        return self.setup.accumulation.init(params, sums)

    def _add(
        self,
        params: Params,
        model_state: ModelState,
        opt_state: TokenAccumulationState,
        micro_batch: MicroBatch,
        shardings: Shardings,
    ) -> Added:
        self._check_sums(opt_state.grad_sums, params)
        seen, skip_state = opt_state.mini_step, opt_state.skip_state
        if isinstance(skip_state, SkipState):
            # The noise of a rejected micro-batch is not drawn again.
            seen = seen + skip_state.rejected
        micro_batch = micro_batch.with_key_at(opt_state.gradient_step, seen)
        return add_micro_batch(
            self.setup, params, model_state, opt_state, micro_batch, shardings
        )

    def __call__(
        self,
        state: StepState,
        batch: Batch,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Tree,
    ) -> tuple[StepState, StepMetrics]:
        """Adds a micro-batch; if this closes the window, applies the update.

        Args:
          state: from `init` or the previous call. It is donated: use the new state
            afterwards.
          batch: any pytree of arrays, passed to `loss_fn`. A batch of a new shape
            compiles once more and continues the same window.
          rng: one key for the whole run. `loss_fn` receives it as `rng`, folded with
            `gradient_step` and the number of the micro-batch in its window, where
            rejected ones count: their noise is not drawn again.
          **loss_kwargs: passed to `loss_fn` unchanged, not differentiated. Their arrays
            and Python numbers are traced; every other leaf, such as a bool, a string or
            a function, is static and must be hashable.

        Raises:
          ValueError: the step has no schedule; or, with a mesh, the arrays of the batch
            have different numbers of rows, or `num_tokens` does not depend on the rows.
          TypeError: `state` is not from `init`; a keyword is an NNX object, or has a
            leaf that is static and not hashable; or `loss_fn` returned anything other
            than `(loss_sum, num_tokens)`.
        """
        self.require(state)
        schedule = self.setup.accumulation.schedule
        if not schedule.is_set:
            raise ValueError(
                "This step has no schedule that closes its windows. Give one to "
                "make_train_step (with NNX, to token_accumulation), or call "
                "step.accumulate(state, batch) and step.close_window(state)."
            )
        counter = state.opt_state.mini_step
        keeps_count = self.setup.accumulation.should_skip_update_fn is None
        k = schedule.every_k  # each micro-batch closes its window, if it is 1
        is_known = isinstance(k, int) and k > 1 and keeps_count
        if not (is_known and trees.is_concrete(counter)):
            return self._accumulate_and_close(state, batch, rng=rng, **loss_kwargs)
        traced = self.accumulate.arguments(batch, rng=rng, **loss_kwargs)
        known = self.lookup(state)
        if known.count is None:  # the device is read once
            known = known._replace(count=int(jax.device_get(counter)))
        # Compile the close before `accumulate` donates the sums: after an error in the
        # optimizer, or Ctrl-C while it compiles, the caller's state is still usable.
        self.close_window.make_ready(state, known.layout)
        state, metrics, known = self.accumulate.run(state, known, traced)
        if known.count is not None and known.count >= k:
            state, closed, _ = self.close_window.run(state, known, ())
            metrics = closed._replace(skipped=metrics.skipped, aux=metrics.aux)
        return state, metrics


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    every_k_schedule: CountSchedule | None = None,
    *,
    every_n_tokens: CountSchedule | None = None,
    has_aux: bool = False,
    has_model_state: bool = False,
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: DType | None = None,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    reduce_every: ReduceEvery | None = None,
    donate: bool = True,
) -> TrainStep:
    r"""Builds a jitted train step that takes one micro-batch per call.

    The parameters change only when a window closes, by the inner optimizer's update for
    :math:`\sum_i g_i / \sum_i n_i`. The step returns no `updates`, so callers cannot
    discard them or apply them twice, the mistake behind
    https://github.com/google-deepmind/optax/issues/1567.

    On jax 0.11 and newer, the backward pass adds to the sums as it runs, so that no
    second buffer of the gradient's size is needed; the page on performance has the
    exceptions. Reverse-mode derivatives through the step raise an error there.

    With an int `every_k_schedule` above 1 and no skip function, the host knows when a
    window closes, and the step runs two programs, "accumulate" and "close". Otherwise,
    and inside an outer `jit` or `scan`, it is a single program. Calls never block,
    except the first after a restore, which reads one counter.

    Args:
      loss_fn: `loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`: the loss
        *summed* over the micro-batch's tokens, not averaged, and the number of tokens;
        for example from `softmax_cross_entropy_sum`. Add an auxiliary loss that is a
        mean as `loss_sum + c * aux_loss * num_tokens`. The most likely mistake is a
        loss that is not a sum, or a count from another mask: `check_loss_fn` finds it.
      optimizer: the plain inner optimizer, run once per window. Put clipping inside it.
      every_k_schedule: micro-batches in a window, as in `token_accumulation`.
      every_n_tokens: used instead, as in `token_accumulation`. With neither, call
        `accumulate` and `close_window`.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      has_model_state: for batch normalization and everything else that the forward pass
        updates: `loss_fn(params, model_state, batch, **kwargs) -> ((loss_sum,
        num_tokens), model_state)`, with `has_aux` `((loss_sum, (num_tokens, aux)),
        model_state)`. The tree, shapes and dtypes stay. Every micro-batch sees what the
        one before it left; of a rejected one only keys move on. Over devices, floating
        values are averaged, and typed keys (`jax.random.key`) folded; integers must not
        depend on the rows, and no value may have an axis of rows, unless `loss_fn` sees
        all of them.
      should_skip_update_fn: rejects micro-batches, see `token_accumulation`.
      accumulator_dtype: dtype of the sums, see `token_accumulation`.
      mesh: the mesh of devices, see `data_axes`.
      data_axes: the axis, or axes, of `mesh` over which the rows of a batch are spread.
        `loss_fn` then sees and counts the rows of one device, and must not name these
        axes. Each device keeps its own sum, and the devices' sums are reduced once,
        when the window closes. All arrays of a batch must have the same number of rows,
        except arrays placed on every device; pass other arrays to `loss_fn` as
        keywords. Other axes of the mesh are left to the compiler. Without a mesh,
        arrays that are spread over devices give correct results too, but gradients are
        reduced in every micro-batch.
      reduce_every: when gradients are reduced over devices. `"window"`, the default:
        once, as above; parameters that are spread over the data axes are gathered for
        every micro-batch, and every device needs room for a whole gradient, so `init`
        warns about them once unless `"window"` is given. `"micro_batch"`: in every
        micro-batch, over all rows; the sums are spread over the data axes, like such
        parameters (FSDP), or even if the parameters are not (ZeRO-2). `loss_fn` then
        sees all rows.
      donate: update buffers in place. The state passed to a call is deleted.

    Returns:
      A `TrainStep`, with `init` and the two halves of the step, `accumulate` and
      `close_window`.

    Raises:
      ValueError: as for `token_accumulation`.
      TypeError: as for `token_accumulation`, or `loss_fn` is not a function.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> def loss_fn(params, batch):
      ...     errors = (params["w"] * batch["x"] - batch["y"]) ** 2
      ...     return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> step = make_train_step(loss_fn, optax.sgd(0.1), every_k_schedule=2)
      >>> state = step.init({"w": jnp.zeros(())})
      >>> for mask in ([1.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
      ...     batch = {"x": jnp.ones(3), "y": jnp.ones(3), "mask": jnp.asarray(mask)}
      ...     state, metrics = step(state, batch)
      ...     print(metrics.updated, metrics.num_tokens, state.params["w"])
      False 1.0 0.0
      True 4.0 0.2
    """
    checks.check_function(loss_fn, "loss_fn")
    accumulation = make_accumulation(
        optimizer,
        every_k_schedule,
        every_n_tokens,
        should_skip_update_fn=should_skip_update_fn,
        accumulator_dtype=accumulator_dtype,
    )
    devices = make_devices(mesh, data_axes, reduce_every)
    loss = Loss(loss_fn, has_aux, has_model_state)
    return TrainStep(Setup(loss, accumulation, devices), donate)
