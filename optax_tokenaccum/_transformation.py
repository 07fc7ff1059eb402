"""The optax transformation `token_accumulation`, `has_updated` and `close_window`."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.accumulation import (
    Accumulation,
    SkipFn,
    in_conditional,
    make_accumulation,
)
from optax_tokenaccum._core.backward import at_most_once
from optax_tokenaccum._core.schedule import CountSchedule
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import T


def token_accumulation(
    inner: optax.GradientTransformation,
    every_k_schedule: CountSchedule | None = None,
    *,
    every_n_tokens: CountSchedule | None = None,
    gradients: Literal["sum", "mean"] = "sum",
    should_skip_update_fn: SkipFn | None = None,
    accumulator_dtype: trees.DType | None = None,
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
      `mini_step`, and adds what is finite of its gradient and `value`: nothing of 0/0,
      and all of a loss that is real. Negative or non-finite counts raise if they are
      concrete; if they are traced, the micro-batch adds nothing.
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
        per-token mean gradient, unless there are no tokens. A micro-batch that it
        rejects is not added to any sum and not counted.
      accumulator_dtype: dtype of the sums; by default float32, or the parameter's dtype
        if that is wider. Division and weighting use at least float32.

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
    accumulation = make_accumulation(
        inner,
        every_k_schedule,
        every_n_tokens,
        gradients,
        should_skip_update_fn,
        accumulator_dtype,
    )
    update = functools.partial(update_window, accumulation)
    return as_transformation(accumulation, accumulation.init, update)


class Transformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that carries its accumulation."""

    accumulation: Accumulation


def as_transformation(
    accumulation: Accumulation, init: Any, update: Any
) -> Transformation:
    tx = Transformation(init, update)
    tx.accumulation = accumulation
    return tx


def update_window(
    accumulation: Accumulation,
    updates: optax.Updates,
    state: trees.Tree,
    params: optax.Params | None = None,
    *,
    num_tokens: ArrayLike | None = None,
    value: ArrayLike | None = None,
    close_window: trees.TracedBool | None = None,
    **extra_args: Any,
) -> tuple[optax.Updates, TokenAccumulationState]:
    checks.check_num_tokens(num_tokens, updates, extra_args)
    added = accumulation.add(updates, state, params, num_tokens, value)
    state = added.opt_state
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
    # In an `nnx.Optimizer`, it is a variable.
    [flag] = jax.tree.leaves(_accumulation_in(state, "has_updated").has_updated)
    return flag


def window_gradient(state: trees.Tree, params: trees.Params = None) -> trees.Gradients:
    """The token mean of the open window's gradients so far, `sum g / sum n`.

    It is what the inner optimizer would receive if the window closed now (with
    `use_grad_mean=False`, that is `state.grad_sums`); zeros without tokens. To log its
    norm, or in place of `acc_grads` of `optax.MultiSteps`.

    Args:
      state: the state of a train step or a `TrainState`; or, next to `params`, any
        optimizer state that holds exactly one accumulation, at any depth.
      params: the parameters, if `state` does not hold them. They may be left out unless
        the optimizer state is that of a step with a `mesh`, whose sums may be of each
        device.

    Returns:
      A tree like the parameters, in the dtypes of the sums: float32 or wider.

    Raises:
      ValueError: `state` holds no accumulation, or several, or that of a window step,
        which has no open window between calls, or has an axis of `vmap` or `pmap`; or
        `params` are needed.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation, window_gradient
      >>> optimizer = token_accumulation(optax.sgd(1.0), 3)
      >>> state = optimizer.init(jnp.zeros(()))
      >>> for grad_of_sum, n in [(8.0, 1), (4.0, 3)]:
      ...     _, state = optimizer.update(jnp.asarray(grad_of_sum), state, num_tokens=n)
      >>> print(window_gradient(state))
      3.0
    """
    found = _accumulation_in(state, "window_gradient")
    # In an `nnx.Optimizer`, each is a variable.
    [counter], [tokens] = map(jax.tree.leaves, (found.mini_step, found.acc_tokens))
    _check_is_one(counter, "window_gradient")
    sums, structure = jax.tree.flatten(found.grad_sums)
    leaves = jax.tree.leaves(getattr(state, "params", params))
    shardings = map(trees.sharding_of, sums)  # own sums of devices are spread over them
    if len(leaves) == len(sums):  # else some are masked, as in no state of a step
        ranks = map(jnp.ndim, leaves)
        sums = [x.sum(0) if x.ndim > n else x for x, n in zip(sums, ranks, strict=True)]
    elif not leaves and all(x and x.spec and x.spec[0] for x in shardings):
        raise ValueError(
            "These sums may be of each device: give the state of the step, or "
            "window_gradient(state, params)."
        )
    return structure.unflatten([trees.token_mean(x, tokens) for x in sums])


def _check_is_one(mini_step: jax.Array, name: str) -> None:
    if jnp.ndim(mini_step):
        raise ValueError(
            f"{name} takes the state of one accumulation: got {jnp.size(mini_step)}. "
            "Call it in the function that is mapped over them."
        )


def _accumulation_in(state: trees.Tree, name: str) -> TokenAccumulationState:
    found = trees.nodes_of(TokenAccumulationState, state)
    if len(found) != 1:
        raise ValueError(
            f"{name} takes a state that holds one TokenAccumulationState: got "
            f"{len(found)} in a {type(state).__name__}."
        )
    return found[0]


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
    found = trees.nodes_of(TokenAccumulationState, state)
    if not found:
        raise ValueError(
            "close_window takes an optimizer that accumulates, and its state: got a "
            f"{type(state).__name__} without a TokenAccumulationState."
        )
    for x in found:
        _check_is_one(x.mini_step, "close_window")
    extra_args = {"value": 0.0, "num_tokens": 0, "close_window": True} | extra_args
    no_gradients = jax.tree.map(jnp.zeros_like, params)
    try:
        return tx.update(no_gradients, state, params, **extra_args)
    except Exception as error:
        error.add_note(
            "close_window takes the optimizer that made the state. That of a step is "
            "closed by step.close_window(state); that of an nnx.Optimizer by "
            "optimizer.update(model, zeros, num_tokens=0, close_window=True)."
        )
        raise


def with_num_tokens(
    tx: optax.GradientTransformation, num_tokens: ArrayLike, **extra_args: Any
) -> optax.GradientTransformation:
    """Returns a plain transformation whose `update` is given the number of tokens.

    Some trainers call `optimizer.update(grads, state, params)` themselves, without
    keywords, so the count that `token_accumulation` needs cannot reach the optimizer.
    Build this transformation where the count is known, and give it to the trainer in
    place of `tx`. The state is that of `tx`. Under `jit`, build it inside of the traced
    function: a count from outside would be a constant of the program.

    Args:
      tx: `token_accumulation(...)`, or a transformation around it that passes extra
        arguments on.
      num_tokens: the number of tokens behind the gradients of the next `update`, a
        scalar.
      **extra_args: other arguments for `tx.update`, such as `value`.

    Raises:
      TypeError: `tx` takes no extra arguments, so it would drop the count.
      ValueError: `update` is given a state without an accumulation.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation, with_num_tokens
      >>> tx = token_accumulation(optax.sgd(1.0), every_k_schedule=2)
      >>> @jax.jit
      ... def train_step(params, opt_state, x):
      ...     counted = with_num_tokens(tx, jnp.size(x))
      ...     updates, opt_state = counted.update(jnp.sum(x), opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> params, opt_state = jnp.zeros(()), tx.init(jnp.zeros(()))
      >>> for x in (jnp.array([8.0]), jnp.array([1.0, 2.0, 1.0])):
      ...     params, opt_state = train_step(params, opt_state, x)
      >>> print(params)
      -3.0
    """
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        raise TypeError(
            f"tx takes no num_tokens: got a {type(tx).__name__}. Give "
            "token_accumulation(...) or MultiSteps(...).gradient_transformation()."
        )

    def update(
        updates: trees.Gradients,
        state: trees.OptState,
        params: trees.Params | None = None,
    ) -> tuple[trees.Gradients, trees.OptState]:
        if not trees.nodes_of(TokenAccumulationState, state):
            raise ValueError("tx must accumulate, or num_tokens would be dropped.")
        return tx.update(updates, state, params, num_tokens=num_tokens, **extra_args)

    return optax.GradientTransformation(tx.init, update)


def _close(
    accumulation: Accumulation,
    state: TokenAccumulationState,
    closes: trees.TracedBool,
    like: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, TokenAccumulationState]:
    """Ends the window if `closes`; otherwise the updates are zeros."""

    def update(
        sums: trees.Gradients, inner_opt_state: trees.OptState
    ) -> tuple[trees.Gradients, trees.OptState]:
        gradient = accumulation.window_gradient(state._replace(grad_sums=sums), like)
        own = {"grad": gradient} if "grad" in extra_args else {}
        return accumulation.inner.update(
            gradient, inner_opt_state, params, **(extra_args | own)
        )

    # Traced once, since the shapes of the updates are needed before the loop.
    trace = jax.make_jaxpr(update, return_shape=True)
    sums = state.grad_sums
    traced, returned = trace(sums, state.inner_opt_state)
    shapes, structure = returned[0], jax.tree.structure(returned)
    trees.check_same_tree(
        shapes, sums, "The inner optimizer must return updates like the parameters"
    )
    # A loop or a conditional stores its outputs in buffers. The updates therefore reuse
    # the buffers of the sums, which are no longer needed once the window is closed.
    fits = jax.tree.map(_holds, sums, shapes)
    # Updates that no sum can hold.
    others = jax.tree.map(
        lambda fits, u: [] if fits else trees.zeros_of(u), fits, shapes
    )

    def run(
        state: TokenAccumulationState, _: trees.Tree
    ) -> tuple[trees.Gradients, trees.Tree, trees.OptState]:
        given = jax.tree.leaves((state.grad_sums, state.inner_opt_state))
        outputs = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
        updates, inner_opt_state = structure.unflatten(outputs)

        def stored(fits: bool, u: trees.Leaf, acc: jax.Array) -> jax.Array:
            return u.astype(acc.dtype) if fits else acc

        kept = jax.tree.map(stored, fits, updates, state.grad_sums)
        others = jax.tree.map(lambda fits, u: [] if fits else u, fits, updates)
        return kept, others, inner_opt_state

    state, others = accumulation.close(state, closes, run, others, _at_most_once)
    due, is_open = state.has_updated, jnp.logical_not(closes)

    # The zeros are created here, where they fuse into the operations that read them.
    # Created inside the conditional, they made a step of a model with six square layers
    # 2.5 times slower.
    def update_of(
        fits: bool, x: jax.Array, u: jax.ShapeDtypeStruct, other: trees.Leaf
    ) -> trees.Leaf:
        return trees.zero_unless(due, x).astype(u.dtype) if fits else other

    updates = jax.tree.map(update_of, fits, state.grad_sums, shapes, others)
    zero = functools.partial(trees.zero_unless, is_open)
    return updates, state._replace(grad_sums=jax.tree.map(zero, state.grad_sums))


def _at_most_once(runs: trees.TracedBool, body: Callable[[T], T], carry: T) -> T:
    """`at_most_once`, with the derivatives of a conditional."""
    if trees.is_concrete(runs):
        return in_conditional(runs, body, carry)
    converted, consts = jax.closure_convert(body, carry)

    @jax.custom_jvp
    def loop(runs: trees.TracedBool, carry: T, *consts: jax.Array) -> T:
        return at_most_once(runs, lambda x: converted(x, *consts), carry)

    @loop.defjvp
    def _(primals: Any, tangents: Any) -> tuple[T, T]:
        def conditional(runs: trees.TracedBool, carry: T, *consts: jax.Array) -> T:
            return in_conditional(runs, lambda x: converted(x, *consts), carry)

        return jax.jvp(conditional, primals, tangents)

    return loop(runs, carry, *consts)


def _holds(acc: jax.Array, update: jax.ShapeDtypeStruct) -> bool:
    """Whether the buffer of a sum can hold an update without loss of precision."""
    if acc.dtype == update.dtype:
        return True
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (acc, update)):
        return False
    return acc.dtype.itemsize >= max(update.dtype.itemsize, 4)
