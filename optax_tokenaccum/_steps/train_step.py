"""A train step for one micro-batch per call, which applies updates by itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from optax_tokenaccum._core import arrays, checks
from optax_tokenaccum._core.accumulation import Accumulation, make_accumulation
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.loss_fn import (
    Loss,
    LossFn,
    function_loss,
    key_at,
    loss_of,
)
from optax_tokenaccum._core.schedule import CountSchedule, make_schedule
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import Batch, Gradients, Params, is_concrete
from optax_tokenaccum._core.variables import Variables
from optax_tokenaccum._devices.modes import ReduceEvery, make_mode
from optax_tokenaccum._devices.one_device import OneDevice
from optax_tokenaccum._steps import program
from optax_tokenaccum._steps.compile_ahead import Programs, Progress, compile_all
from optax_tokenaccum._steps.micro_batches import GroupedWindow
from optax_tokenaccum._steps.program import Arguments, Program
from optax_tokenaccum._steps.state import (
    StepMetrics,
    StepState,
    metrics_of,
    require_step_state,
    variables_of,
    with_variables,
)
from optax_tokenaccum._steps.update import close_and_apply


class TrainStep:
    """The step that `make_train_step` returns: `step(state, batch)`.

    Attributes:
      accumulate: `accumulate(state, batch, *, rng=None, **loss_kwargs)` adds a
        micro-batch and never closes the window.
      close_window: `close_window(state)` closes the window and divides by the tokens
        it holds so far. A window without tokens applies no update.

    The step and both attributes return `(state, StepMetrics)`. Both attributes have a
    `.lower` with the same arguments; arrays may be `jax.ShapeDtypeStruct`.

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

    def __init__(
        self,
        loss: Loss,
        accumulation: Accumulation,
        mode: OneDevice,
        donate: bool,
    ):
        self._loss = loss
        self._accumulation = accumulation
        self._mode = mode
        # The values of `mini_step` arrays, so that no call waits for the device.
        self._counts: program.ArrayMemo[int] = program.ArrayMemo()
        common: Any = dict(mode=mode, shardings=program.ShardingCache(), donate=donate)
        self.accumulate = Program(
            self._accumulate,
            self._micro_batch_arguments,
            _window_and_variables,
            self._join_accumulated,
            shared=_batch_alone,
            **common,
        )
        self.close_window = Program(
            self._close,
            _no_arguments,
            _all_but_sums,
            self._join_closed,
            **common,
        )
        self._accumulate_and_close = Program(
            self._whole, self._micro_batch_arguments, shared=_batch_alone, **common
        )

    def init(self, params: Params) -> StepState:
        """Returns a state with a copy of `params`: the caller's are never donated.

        To restore a checkpoint, use `jax.eval_shape(step.init, params)` as the target;
        over several devices, use the state itself, which has shardings.

        Args:
          params: a pytree of arrays; integer arrays are never updated. If the step has
            a mesh, arrays on that mesh stay where they are, and other arrays are copied
            to all its devices.

        Raises:
          TypeError: a leaf of `params` is not an array; or `params` is an NNX model,
            and a variable is not an `nnx.Param` or is in two places.
          ValueError: an array of `params` is on a mesh other than the step's.
        """
        checks.check_nnx_variables(params)
        params = arrays.owned(params)  # lets go of the caller's
        init = self._accumulation.with_layout(self._mode.layout()).init
        params, opt_state = self._mode.init(params, init)
        # An optimizer may return an array that it keeps: optax.add_noise, its key.
        state = StepState(params, arrays.owned(opt_state))
        self._counts.remember(state.opt_state.mini_step, 0)
        return state

    def __call__(
        self,
        state: StepState,
        batch: Batch,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> tuple[StepState, StepMetrics]:
        """Adds a micro-batch; if this closes the window, applies the update.

        Args:
          state: from `init` or the previous call. It is donated: use the new state
            afterwards.
          batch: any pytree of arrays, passed to `loss_fn`. A batch of another shape
            compiles once more and continues the same window.
          rng: one key for the whole run. `loss_fn` receives it as `rng`, folded with
            `gradient_step` and `mini_step`.
          **loss_kwargs: passed to `loss_fn` unchanged, not differentiated. Arrays and
            numbers are traced; bools, strings and functions are static.

        Raises:
          ValueError: the step has no schedule; or, with a mesh, the arrays of the batch
            have different numbers of rows, or `num_tokens` does not depend on the rows.
          TypeError: `state` is not a `StepState`, or `loss_fn` returned anything other
            than `(loss_sum, num_tokens)`.
        """
        require_step_state(state, accumulates=True)
        if not self._accumulation.schedule.is_set:
            raise ValueError(
                "This step has no schedule, so nothing says when its window closes: "
                "got neither every_k_schedule nor every_n_tokens. Give one to "
                "make_train_step, or call step.accumulate(state, batch) for each "
                "micro-batch and step.close_window(state) at the end of the window."
            )
        k = self._host_known_k(state)
        if k is None:
            return self._accumulate_and_close(state, batch, rng=rng, **loss_kwargs)
        # Compile the close before `accumulate` donates the sums: after an error in the
        # optimizer, or Ctrl-C while it compiles, the caller's state is still usable.
        self.close_window.make_ready(state)
        counter = state.opt_state.mini_step
        count = self._counts.get(counter)
        if count is None:  # after a restore: the device is read once
            count = int(counter)
            self._counts.remember(counter, count)
        state, added = self.accumulate(state, batch, rng=rng, **loss_kwargs)
        metrics = added
        if count + 1 >= k:
            state, closed = self.close_window(state)
            metrics = closed._replace(skipped=added.skipped, aux=added.aux)
        self.close_window.stay_ready(state)
        return state, metrics

    def compile(
        self,
        state: StepState,
        batches: Iterable[Any],
        *,
        rng: jax.Array | None = None,
        progress: Progress = iter,
        **loss_kwargs: Any,
    ) -> None:
        """Compiles the programs for all shapes of batches, so that no call has to.

        The programs are `accumulate` for each shape, and `close_window`. If the step is
        a single program, they are that program for each shape, and `close_window` for a
        partial window.

        Args:
          state: as for a call, or its shapes, `jax.eval_shape(step.init, params)`. Pass
            the state itself if parameters were placed on devices: programs depend on
            their placement.
          batches: a list of batches, or of their shapes. Batches of the same shapes
            share a program.
          rng: as for a call.
          progress: wraps the list of programs to show progress, for example
            `tqdm.tqdm` or `rich.progress.track`.
          **loss_kwargs: as for a call.

        Raises:
          TypeError: `batches` is not a list. A call's own errors are raised too.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> from optax_tokenaccum import make_train_step
          >>> def loss_fn(params, x):
          ...     return jnp.sum(params * x), x.size
          >>> step = make_train_step(loss_fn, optax.sgd(1.0))
          >>> shapes = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (1, 9)]
          >>> step.compile(jax.eval_shape(step.init, jnp.zeros(())), shapes)
        """
        programs = self._programs(state, rng=rng, **loss_kwargs)
        compile_all(programs, batches, "batches", progress)

    def _programs(self, state: StepState, **kwargs: Any) -> Programs:
        """The programs of a run whose calls have these keywords."""
        require_step_state(state, accumulates=True)
        has_schedule = self._accumulation.schedule.is_set
        is_whole = has_schedule and self._host_known_k(state) is None
        first = self._accumulate_and_close if is_whole else self.accumulate
        return Programs(
            state,
            lambda batch: first.lowering(state, batch, **kwargs),
            (lambda: self.close_window.lowering(state),),
            in_one_call=has_schedule and not is_whole,
        )

    def _micro_batch_arguments(
        self,
        state: StepState,
        batch: Batch,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> Arguments:
        require_step_state(state, accumulates=True)
        if isinstance(batch, GroupedWindow):
            raise TypeError(
                "A train step takes one micro-batch: got a PlannedWindow, a whole "
                "window. Use make_window_step; or plan_window and pad_micro_batch, and "
                "step.accumulate for each micro-batch."
            )
        return Arguments((self._mode.spread(batch), rng), loss_kwargs)

    def _accumulate(
        self,
        shardings: Any,
        window: tuple[TokenAccumulationState, Variables],
        params: Params,
        rows: Batch,
        rng: jax.Array | None,
        traced: list[Any],
        static: program.StaticPart,
    ) -> tuple[tuple[TokenAccumulationState, Variables], StepMetrics, Any]:
        """The program for every micro-batch.

        It only reads the parameters, and is not given the inner optimizer's state. It
        donates the sums, and adds each gradient to them as soon as that is computed.
        """
        opt_state, variables = window
        self._mode.check_layout(opt_state.acc_grads, params)

        def add(
            layout: Layout,
            opt_state: TokenAccumulationState,
            batch: Batch,
            params: Params,
            variables: Variables,
            rng: jax.Array | None,
            traced: list[Any],
        ) -> tuple[TokenAccumulationState, tuple[StepMetrics, Variables], Any]:
            accumulation = self._accumulation.with_layout(layout)
            loss_kwargs = program.join_arrays(traced, static) | key_at(
                rng, layout, opt_state.gradient_step, opt_state.mini_step
            )
            loss = loss_of(self._loss, params, variables, batch, loss_kwargs, layout)
            opt_state, skipped, (aux, changed) = accumulation.add_loss(
                loss, opt_state, params
            )
            variables = variables.updated(changed, skipped, layout.shared)
            metrics = metrics_of(opt_state, *accumulation.window_so_far(opt_state))
            metrics = metrics._replace(skipped=skipped)
            return opt_state, (metrics, variables), layout.stacked(aux)

        shared = params, variables, rng, traced
        opt_state, (metrics, variables), aux = self._mode.map_rows(
            add, shardings, opt_state, rows, *shared
        )
        return (opt_state, variables), metrics, aux

    def _join_accumulated(
        self, window: tuple[TokenAccumulationState, Variables], old: StepState
    ) -> StepState:
        opt_state, variables = window
        count = self._counts.get(old.opt_state.mini_step)
        if count is not None and self._accumulation.should_skip_update_fn is None:
            self._counts.remember(opt_state.mini_step, count + 1)
        inner = old.opt_state.inner_opt_state
        return with_variables(
            old._replace(opt_state=opt_state._replace(inner_opt_state=inner)), variables
        )

    def _close(
        self, shardings: Any, state: StepState, acc_grads: Gradients
    ) -> tuple[StepState, StepMetrics, None]:
        """The program for every update; it only reads the sums."""
        params, opt_state = _with_sums(state, acc_grads)
        self._mode.check_layout(acc_grads, params)
        closes = opt_state.mini_step > 0
        state, metrics = self._update(shardings, closes, params, opt_state)
        return _with_sums(state, None), metrics, None

    def _join_closed(self, state: StepState, old: StepState) -> StepState:
        self._counts.remember(state.opt_state.mini_step, 0)
        state = _with_sums(state, old.opt_state.acc_grads)
        return old._replace(params=state.params, opt_state=state.opt_state)

    def _whole(
        self, shardings: Any, state: StepState, _: Any, *micro_batch: Batch, static: Any
    ) -> tuple[StepState, StepMetrics, Any]:
        """Both programs in one, if the host does not know when a window closes."""
        (opt_state, variables), added, aux = self._accumulate(
            shardings,
            (state.opt_state, variables_of(state)),
            state.params,
            *micro_batch,
            static=static,
        )
        closes = self._accumulation.schedule.closes(
            opt_state.mini_step, opt_state.acc_tokens, opt_state.gradient_step
        )
        updated, closed = self._update(shardings, closes, state.params, opt_state)
        state = with_variables(state._replace(**updated._asdict()), variables)
        return state, closed._replace(skipped=added.skipped), aux

    def _update(
        self,
        shardings: Any,
        closes: jax.Array | bool,
        params: Params,
        opt_state: TokenAccumulationState,
    ) -> tuple[StepState, StepMetrics]:
        accumulation = self._accumulation.with_layout(self._mode.layout(shardings))
        *state, metrics = close_and_apply(accumulation, closes, params, opt_state)
        return StepState(*state), metrics

    def _host_known_k(self, state: StepState) -> int | None:
        """The number of micro-batches in a window, if the host can count them."""
        k = self._accumulation.schedule.every_k
        keeps_count = self._accumulation.should_skip_update_fn is None
        is_known = keeps_count and is_concrete(state.opt_state.mini_step)
        return k if isinstance(k, int) and is_known else None


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    every_k_schedule: CountSchedule | None = None,
    *,
    every_n_tokens: CountSchedule | None = None,
    has_aux: bool = False,
    should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
    accumulator_dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    reduce_every: ReduceEvery = "window",
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

    With an int `every_k_schedule` and no skip function, the host knows when a window
    closes, and the step runs two programs, "accumulate" and "close". Otherwise, and
    inside an outer `jit` or `scan`, it is a single program. Calls never block, except
    the first after a restore, which reads one counter.

    Args:
      loss_fn: `loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`: the loss
        *summed* over the micro-batch's tokens, not averaged, and the number of tokens;
        for example from `softmax_cross_entropy_sum`. Add an auxiliary loss that is a
        mean as `loss_sum + c * aux_loss * num_tokens`. The most likely mistake is a
        loss that is not a sum, or a count from another mask: `check_loss_fn` finds it.
      optimizer: the plain inner optimizer, run once per window. Put clipping inside it.
      every_k_schedule: the number of micro-batches in a window, or a function from
        `gradient_step` to that number.
      every_n_tokens: closes the window, instead, once it holds at least this number of
        tokens; or a function from `gradient_step` to that number. With neither, call
        `accumulate` and `close_window`.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
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
      reduce_every: when gradients are reduced over devices. `"window"`: once, as above;
        parameters that are spread over the data axes are gathered for every
        micro-batch, and every device needs room for a whole gradient. `"micro_batch"`:
        in every micro-batch, over all rows; the sums are spread over the data axes,
        like such parameters (FSDP), or even if the parameters are not (ZeRO-2).
        `loss_fn` then sees all rows.
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
    loss = function_loss(loss_fn, has_aux)
    accumulation = make_accumulation(
        optimizer,
        make_schedule(every_k_schedule, every_n_tokens),
        should_skip_update_fn=should_skip_update_fn,
        accumulator_dtype=accumulator_dtype,
    )
    mode = make_mode(mesh, data_axes, reduce_every)
    return TrainStep(loss, accumulation, mode, donate)


def _batch_alone(batch: Batch, **_: Any) -> tuple[Batch]:
    return (batch,)


def _no_arguments(state: StepState) -> Arguments:
    require_step_state(state, accumulates=True)
    return Arguments()


def _window_and_variables(
    state: StepState,
) -> tuple[tuple[TokenAccumulationState, Variables], Params]:
    window = state.opt_state._replace(inner_opt_state=None)
    return (window, variables_of(state)), state.params


def _all_but_sums(state: StepState) -> tuple[StepState, Gradients]:
    rest = StepState(state.params, state.opt_state)
    return _with_sums(rest, None), state.opt_state.acc_grads


def _with_sums(state: StepState, acc_grads: Gradients) -> StepState:
    return state._replace(opt_state=state.opt_state._replace(acc_grads=acc_grads))
