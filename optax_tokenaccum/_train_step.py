"""A train step for one micro-batch per call, which applies updates by itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._accumulation import SkipFn, make_accumulation
from optax_tokenaccum._backward import emptied
from optax_tokenaccum._checks import check_function
from optax_tokenaccum._devices import ReduceEvery, Shardings, make_devices
from optax_tokenaccum._loss import Keywords, Loss, LossFn, MicroBatch, add_micro_batch
from optax_tokenaccum._rows import spread
from optax_tokenaccum._schedule import CountSchedule, make_schedule
from optax_tokenaccum._state import (
    AnyStepState,
    ArrayMemo,
    S,
    StepMetrics,
    model_state_of,
    with_parts,
)
from optax_tokenaccum._step import Program, Step
from optax_tokenaccum._trees import (
    Aux,
    Batch,
    DType,
    ModelState,
    Params,
    Tree,
    is_concrete,
)


class Seen(NamedTuple):
    """What the host knows of a state that this step returned."""

    count: int | None = None  # the value of `mini_step`, so that no call waits for it
    is_ready: bool = False  # whether the program that closes the window is compiled


class Accumulate(Program["TrainStep"]):
    """The program for every micro-batch.

    It only reads the parameters, and is not given the inner optimizer's state. It
    donates the sums, and adds each gradient to them as soon as that is computed.
    """

    def arguments(
        self, batch: Batch, *, rng: jax.Array | None = None, **loss_kwargs: Any
    ) -> tuple[MicroBatch]:
        rows = spread(batch, self.step.devices)
        return (MicroBatch(rows, rng, Keywords(loss_kwargs)),)

    def split(self, state: AnyStepState) -> tuple[Tree, Tree]:
        opt_state = state.opt_state._replace(inner_opt_state=None)
        return state._replace(params=None, opt_state=opt_state), state.params

    def body(
        self, shardings: Shardings, state: S, params: Params, micro_batch: MicroBatch
    ) -> tuple[S, StepMetrics, Aux]:
        step, opt_state = self.step, state.opt_state
        step._check_sums(opt_state.grad_sums, params)
        opt_state, model_state, skipped, aux = add_micro_batch(
            step.loss,
            step.accumulation,
            step.devices,
            opt_state,
            micro_batch.at(opt_state.gradient_step, opt_state.mini_step),
            params,
            model_state_of(state),
            shardings,
        )
        metrics = step._metrics(opt_state)._replace(skipped=skipped)
        return with_parts(state, opt_state, model_state), metrics, aux

    def after(self, old: AnyStepState, new: AnyStepState) -> None:
        count = self.step.seen.get(old.opt_state.mini_step, Seen()).count
        keeps_count = self.step.accumulation.should_skip_update_fn is None
        count = count + 1 if count is not None and keeps_count else None
        self.step.seen.remember(new.opt_state.mini_step, Seen(count))


class Close(Program["TrainStep"]):
    """The program for the end of a window."""

    def arguments(self) -> tuple[()]:
        return ()

    def split(self, state: AnyStepState) -> tuple[Tree, Tree]:
        return with_parts(state, state.opt_state, None), ()

    def body(
        self, shardings: Shardings, state: S, _: tuple[()]
    ) -> tuple[S, StepMetrics, None]:
        self.step._check_sums(state.opt_state.grad_sums, state.params)
        state, metrics = self.step._update(shardings, True, state)
        return state, metrics, None

    def after(self, old: AnyStepState, new: AnyStepState) -> None:
        self.step.seen.remember(new.opt_state.mini_step, Seen(count=0))


class Whole(Accumulate):
    """Both programs in one, if the host does not know when a window closes."""

    def split(self, state: AnyStepState) -> tuple[Tree, Tree]:
        return state, ()

    def body(
        self, shardings: Shardings, state: S, params: Params, micro_batch: MicroBatch
    ) -> tuple[S, StepMetrics, Aux]:
        state, added, aux = super().body(shardings, state, state.params, micro_batch)
        closes = self.step.accumulation.schedule.closes(
            added.mini_step, state.opt_state.acc_tokens, added.gradient_step
        )
        state, metrics = self.step._update(shardings, closes, state)
        return state, metrics._replace(skipped=added.skipped), aux

    def after(self, old: AnyStepState, new: AnyStepState) -> None:
        self.step.seen.remember(new.opt_state.mini_step, Seen())


class TrainStep(Step):
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

    accumulates = True

    def __post_init__(self) -> None:
        self.seen: ArrayMemo[Seen] = ArrayMemo()
        self.accumulate = Accumulate(self)
        self.close_window = Close(self)
        self._accumulate_and_close = Whole(self)

    def init(self, params: Params, model_state: ModelState = None) -> Any:
        state = super().init(params, model_state)
        self.seen.remember(state.opt_state.mini_step, Seen(count=0))
        return state

    def prepared(self, state: S) -> S:
        """The state of a call, with sums of zeros if no window is open.

        Before 0.5, sums were not emptied at the end of a window, so that those of a
        restored state may hold anything. One that is traced is emptied in the program.
        """
        opt_state, counter = state.opt_state, state.opt_state.mini_step
        sums = opt_state.grad_sums, opt_state.acc_tokens, opt_state.acc_value
        if not is_concrete(counter):
            sums = emptied(counter == 0, sums)
        elif self.seen.get(counter) is not None:
            return state
        elif count := int(counter):  # the device is read once
            self.seen.remember(counter, Seen(count))
            return state
        else:
            for x in jax.tree.leaves(sums):
                if self.donate and isinstance(x, jax.Array):
                    x.delete()
            sums = jax.tree.map(jnp.zeros_like, sums)
            counter = jnp.zeros_like(counter)
            self.seen.remember(counter, Seen(0))
        grad_sums, tokens, value = sums
        opt_state = opt_state._replace(
            mini_step=counter, grad_sums=grad_sums, acc_tokens=tokens, acc_value=value
        )
        return state._replace(opt_state=opt_state)

    def __call__(
        self,
        state: S,
        batch: Batch,
        *,
        rng: jax.Array | None = None,
        **loss_kwargs: Any,
    ) -> tuple[S, StepMetrics]:
        """Adds a micro-batch; if this closes the window, applies the update.

        Args:
          state: from `init` or the previous call. It is donated: use the new state
            afterwards.
          batch: any pytree of arrays, passed to `loss_fn`. A batch of a new shape
            compiles once more and continues the same window.
          rng: one key for the whole run. `loss_fn` receives it as `rng`, folded with
            `gradient_step` and `mini_step`.
          **loss_kwargs: passed to `loss_fn` unchanged, not differentiated. Arrays and
            numbers are traced; bools, strings, dtypes and functions are static.

        Raises:
          ValueError: the step has no schedule; or, with a mesh, the arrays of the batch
            have different numbers of rows, or `num_tokens` does not depend on the rows.
          TypeError: `state` is not from `init`, or `loss_fn` returned anything other
            than `(loss_sum, num_tokens)`.
        """
        self._require(state)
        schedule = self.accumulation.schedule
        if not schedule.is_set:
            raise ValueError(
                "This step has no schedule, so nothing says when its window closes: "
                "got neither every_k_schedule nor every_n_tokens. Give one to "
                "make_train_step (with NNX, to token_accumulation), or call "
                "step.accumulate(state, batch) for each micro-batch and "
                "step.close_window(state) at the end of the window."
            )
        counter = state.opt_state.mini_step
        keeps_count = self.accumulation.should_skip_update_fn is None
        if not (
            isinstance(schedule.every_k, int) and keeps_count and is_concrete(counter)
        ):
            return self._accumulate_and_close(state, batch, rng=rng, **loss_kwargs)
        state = self.prepared(state)
        counter = state.opt_state.mini_step
        # Compile the close before `accumulate` donates the sums: after an error in the
        # optimizer, or Ctrl-C while it compiles, the caller's state is still usable.
        count, is_ready = self.seen.get(counter, Seen())
        if not is_ready:
            self.close_window.make_ready(state)
        if count is None:  # after a call of the other program
            count = int(counter)
        state, metrics = self.accumulate(state, batch, rng=rng, **loss_kwargs)
        count += 1
        if count >= schedule.every_k:
            state, closed = self.close_window(state)
            metrics = closed._replace(skipped=metrics.skipped, aux=metrics.aux)
            count = 0
        self.seen.remember(state.opt_state.mini_step, Seen(count, True))
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
      has_model_state: for batch normalization and everything else that the forward pass
        updates: `loss_fn(params, model_state, batch, **kwargs) -> ((loss_sum,
        num_tokens), model_state)`, with `has_aux` `((loss_sum, (num_tokens, aux)),
        model_state)`. The tree, shapes and dtypes stay. Every micro-batch sees what the
        one before it left; a rejected one leaves no trace. Over devices, floating
        values are averaged, and typed keys (`jax.random.key`) folded; integers must not
        depend on the rows, and no value may have an axis of rows, unless `loss_fn` sees
        all of them. `init` and the step take and return a `ModelStepState`.
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
    check_function(loss_fn, "loss_fn")
    accumulation = make_accumulation(
        optimizer,
        make_schedule(every_k_schedule, every_n_tokens),
        should_skip_update_fn=should_skip_update_fn,
        accumulator_dtype=accumulator_dtype,
    )
    devices = make_devices(mesh, data_axes, reduce_every)
    return TrainStep(
        Loss(loss_fn, has_aux, has_model_state), accumulation, devices, donate
    )
