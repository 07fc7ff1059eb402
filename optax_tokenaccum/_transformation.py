"""The optax transformation `token_accumulation`, `has_updated` and `close_window`."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_tokenaccum import _trees as trees
from optax_tokenaccum._accumulation import Accumulation, SkipFn, make_accumulation
from optax_tokenaccum._checks import check_inner_state, check_num_tokens
from optax_tokenaccum._schedule import CountSchedule, make_schedule
from optax_tokenaccum._state import TokenAccumulationState
from optax_tokenaccum._trees import DType, Leaf, OptState, TracedBool, Tree


def token_accumulation(
    inner: optax.GradientTransformation,
    every_k_schedule: CountSchedule | None = None,
    *,
    every_n_tokens: CountSchedule | None = None,
    gradients: Literal["sum", "mean"] = "sum",
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: DType | None = None,
    **removed: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs `inner` once per window, on the exact token mean of the window's gradients.

    A window consists of micro-batches with token counts :math:`n_i` and gradients
    :math:`g_i` of summed losses. `inner` receives :math:`\sum_i g_i / \sum_i n_i`, the
    gradient of the whole batch, no matter how its tokens are split into micro-batches.
    `optax.MultiSteps` averages :math:`g_i / n_i`, which gives a different result when
    the :math:`n_i` differ (https://unsloth.ai/blog/gradient).

    Transformations that should see the window's gradient, such as clipping or weight
    decay, belong inside `inner`.

    In addition to optax's three arguments, `update` takes:

    * `num_tokens`: loss tokens behind this micro-batch's gradients, or any
      non-negative sum of weights; a scalar. A micro-batch with 0 tokens is counted in
      `mini_step` but adds nothing, even if its gradient is NaN. Negative or non-finite
      values raise if they are concrete; if they are traced, they add nothing.
    * `value`: the micro-batch's loss, a sum or a mean like its gradient. `inner`
      receives the window's token mean as `value`.
    * `grad`: the micro-batch's gradient, for line searches. `inner` receives the
      window's gradient as `grad`.
    * `close_window`: `True` closes the window now, with its tokens so far as the
      denominator.
    * any other argument is passed to `inner` unchanged.

    `inner` receives the window's tokens as `num_tokens`, too. Of `num_tokens` and
    `value` it receives what it accepts: a member of a chain may refuse a keyword, if no
    other member uses it.

    While the window is open, the updates are zeros and `inner` does not run. A window
    without tokens closes without an update.

    Args:
      inner: the optax optimizer to run once per window.
      every_k_schedule: micro-batches in a window, or a function from `gradient_step`
        to that number.
      every_n_tokens: used instead of `every_k_schedule`: the window closes once it
        holds at least this many tokens; or a function from `gradient_step` to that
        number. Without a schedule, every `update` needs `close_window`.
      gradients: `"sum"` if updates are gradients of a loss summed over tokens,
        `"mean"` if the loss is a mean over the micro-batch's tokens.
      should_skip_update_fn: `optax.skip_not_finite`, `optax.skip_large_updates` or
        another function with the same protocol. It receives the micro-batch's
        per-token mean gradient. A micro-batch that it rejects is not added to any sum
        and not counted.
      accumulator_dtype: dtype of the sums; by default float32, or the parameter's dtype
        if that is wider. Division and weighting use at least float32.
      **removed: not accepted. The error says what to write in place of `axis_name`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `TokenAccumulationState`.

    Raises:
      ValueError: a schedule is below 1; there are two schedules, or neither a schedule
        nor `close_window`; `num_tokens` is not a scalar, or is concrete and negative or
        not finite; in a `shard_map` with checked types, `num_tokens` differs by device
        while a gradient does not; or the gradients differ from the parameters in tree
        or shapes.
      TypeError: `num_tokens` is missing; an argument has the wrong type; a
        transformation of `inner` refuses `num_tokens` or `value` while another uses it;
        a parameter is not an array; or the parameters are an NNX model, and a variable
        is not an `nnx.Param` or is in two places.

    Example:
      Two micro-batches, of 1 and of 3 tokens:

      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation
      >>> optimizer = token_accumulation(optax.sgd(1.0), 2)
      >>> params = {"w": jnp.zeros(())}
      >>> state = optimizer.init(params)
      >>> for grad_of_sum, n in [(8.0, 1), (4.0, 3)]:
      ...     updates, state = optimizer.update(
      ...         {"w": jnp.asarray(grad_of_sum)}, state, params, num_tokens=n)
      ...     print(updates["w"])
      0.0
      -3.0
    """
    if removed:
        instead = (
            " In place of axis_name, sum gradients and num_tokens over the devices "
            "with jax.lax.psum before update; in a shard_map, the gradients with "
            "respect to jax.lax.pcast(params, axis, to='varying'), because JAX itself "
            "sums those of parameters that devices share. Or use a step with mesh and "
            "data_axes."
        )
        raise TypeError(
            f"token_accumulation() has no keywords {sorted(removed)}."
            + instead * ("axis_name" in removed)
        )
    schedule = make_schedule(every_k_schedule, every_n_tokens)
    accumulation = make_accumulation(
        inner, schedule, gradients, should_skip_update_fn, accumulator_dtype
    )
    tx = Transformation(accumulation)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


@dataclass(frozen=True)
class Transformation:
    """An accumulation in the form of an optax transformation."""

    accumulation: Accumulation

    def init(self, params: optax.Params) -> TokenAccumulationState:
        return self.accumulation.init(params)

    def update(
        self,
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None = None,
        *,
        num_tokens: ArrayLike | None = None,
        value: ArrayLike | None = None,
        close_window: TracedBool | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, TokenAccumulationState]:
        """See `token_accumulation`."""
        accumulation = self.accumulation
        num_tokens = check_num_tokens(num_tokens, updates, extra_args)
        state = accumulation.add(updates, state, params, num_tokens, value).state
        mean_value, extra_args["num_tokens"] = accumulation.window_so_far(state)
        if value is not None:
            if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating):
                mean_value = mean_value.astype(value.dtype)
            extra_args["value"] = mean_value
        closes = accumulation.schedule.closes(
            state.mini_step, state.acc_tokens, state.gradient_step, close_window
        )
        return _close(accumulation, state, closes, updates, params, extra_args)


def has_updated(state: optax.OptState) -> jax.Array:
    """Whether the last call closed its window with an update; a bool scalar.

    Args:
      state: any optimizer state that holds exactly one accumulation, at any depth.

    Raises:
      ValueError: `state` holds no accumulation, or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import has_updated, token_accumulation
      >>> optimizer = optax.chain(token_accumulation(optax.sgd(1.0), 2))
      >>> params = jnp.zeros(())
      >>> state = optimizer.init(params)
      >>> for n in (1, 3):
      ...     _, state = optimizer.update(params, state, params, num_tokens=n)
      ...     print(has_updated(state))
      False
      True
    """
    found = trees.nodes_of(TokenAccumulationState, state)
    if len(found) != 1:
        raise ValueError(
            "has_updated needs a state that holds exactly one TokenAccumulationState: "
            f"got {len(found)} in a {type(state).__name__}."
        )
    return found[0].has_updated


def close_window(
    tx: optax.GradientTransformationExtraArgs,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Closes a partial window, for example at the end of an epoch.

    The window's tokens so far are the denominator. This function calls `tx.update` with
    a micro-batch without tokens and `close_window=True`. On an empty window the updates
    are zeros, and the parameters, the inner state and `gradient_step` do not change.

    Args:
      tx: `token_accumulation(...)`, a `MultiSteps`, or a `chain` that holds one.
      state: the state of `tx`.
      params: the parameters, as for `tx.update`.
      **extra_args: further arguments for the inner optimizer; `value` comes from the
        micro-batches.

    Returns:
      The updates to apply, and the new state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import close_window, token_accumulation
      >>> optimizer = token_accumulation(optax.sgd(1.0), 8)
      >>> params = jnp.zeros(())
      >>> state = optimizer.init(params)
      >>> _, state = optimizer.update(jnp.asarray(6.0), state, params, num_tokens=3)
      >>> updates, state = close_window(optimizer, state, params)
      >>> print(updates)
      -2.0
    """
    if not trees.nodes_of(TokenAccumulationState, state):
        raise ValueError(
            "close_window needs an optimizer that accumulates, and its state: got a "
            f"{type(state).__name__} without a TokenAccumulationState. Any other "
            "optimizer would take a step on a gradient of zeros."
        )
    extra_args = {"value": 0.0} | extra_args
    no_gradients = jax.tree.map(jnp.zeros_like, params)
    return tx.update(
        no_gradients, state, params, num_tokens=0, close_window=True, **extra_args
    )


def _close(
    accumulation: Accumulation,
    state: TokenAccumulationState,
    closes: TracedBool,
    like: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, TokenAccumulationState]:
    """Ends the window if `closes`; otherwise the updates are zeros.

    A conditional stores its outputs in buffers. It therefore returns the updates in the
    buffers of the sums, which are no longer needed once the window is closed. The zeros
    are created outside the conditional, where they fuse into the operations that read
    them: in it, a step of a model with six square layers took 2.5 times as long.
    """
    inner, sums = accumulation.inner, state.acc_grads
    check_inner_state(inner, state.inner_opt_state, sums)

    def run(gradient: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
        own = {"grad": gradient} if "grad" in extra_args else {}
        return inner.update(
            gradient, state.inner_opt_state, params, **(extra_args | own)
        )

    shapes, _ = jax.eval_shape(lambda: run(accumulation.window_gradient(state, like)))
    trees.check_same_tree(
        shapes, sums, "The inner optimizer must return updates like the parameters"
    )
    in_place = jax.tree.map(_holds, sums, shapes)
    empty = jax.tree.map(
        lambda fits, acc, u: acc if fits else trees.zeros_of(u), in_place, sums, shapes
    )

    def cast(update: Leaf, like: Leaf) -> Leaf:
        return update if trees.is_float0(like) else trees.cast_like(update, like)

    def update(gradient: optax.Updates, *_: Any) -> tuple[optax.Updates, OptState]:
        updates, inner_opt_state = run(gradient)
        return jax.tree.map(cast, updates, empty), inner_opt_state

    held, state = accumulation.close(state, closes, like, update, otherwise=empty)

    def update_of(fits: bool, x: jax.Array, u: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.where(state.has_updated, x, 0).astype(u.dtype) if fits else x

    updates = jax.tree.map(update_of, in_place, held, shapes)
    sums = jax.tree.map(lambda fits, x, acc: x if fits else acc, in_place, held, sums)
    return updates, state._replace(acc_grads=sums)


def _holds(acc: jax.Array, update: jax.ShapeDtypeStruct) -> bool:
    """Whether the buffer of a sum can hold an update without loss of precision."""
    if acc.dtype == update.dtype:
        return True
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (acc, update)):
        return False
    return acc.dtype.itemsize >= max(update.dtype.itemsize, 4)
