"""A class that replaces `optax.MultiSteps`."""

import functools
from typing import Any, Literal

import jax
import optax

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.accumulation import Accumulation, SkipFn, make_accumulation
from optax_tokenaccum._core.schedule import CountSchedule
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import DType, OptState, Params
from optax_tokenaccum._transformation import (
    Transformation,
    as_transformation,
    has_updated,
    update_window,
)


class MultiSteps:
    r"""`optax.MultiSteps` with one more argument, `num_tokens`, and the right mean.

    The constructor, methods and semantics are the same, except that `update` weights
    each micro-batch by its tokens. The inner optimizer receives
    :math:`\sum_i n_i \bar g_i / \sum_i n_i`; with optax's class it receives
    :math:`\frac1k \sum_i \bar g_i`. `num_tokens=1` gives the same result as optax. The
    inner optimizer runs when a window closes, not on every micro-batch.

    Example:
      Passing `num_tokens=n` fixes a loop with a mean loss:

      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import MultiSteps
      >>> optimizer = MultiSteps(optax.sgd(1.0), every_k_schedule=2)
      >>> params = jnp.zeros(())
      >>> state = optimizer.init(params)
      >>> for mean_grad, n in [(2.0, 1), (90 / 9, 9)]:
      ...     updates, state = optimizer.update(
      ...         jnp.asarray(mean_grad), state, params, num_tokens=n)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params)  # not -6, the mean of the means
      -9.2
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: CountSchedule,
        use_grad_mean: bool = True,
        should_skip_update_fn: SkipFn | None = None,
        accumulator_dtype: DType | None = None,
        *,
        gradients: Literal["sum", "mean"] = "mean",
    ):
        """Initializer.

        Args:
          opt: the inner optimizer.
          every_k_schedule: as in `token_accumulation`.
          use_grad_mean: if `False`, the inner optimizer receives the plain sum of the
            given gradients, neither weighted nor divided, as in optax.
          should_skip_update_fn: as in `token_accumulation`.
          accumulator_dtype: as in `token_accumulation`.
          gradients: `"mean"` if the loss is a mean over the micro-batch's tokens, as in
            a loop written for optax's class; `"sum"` if the loss is a sum.

        Raises:
          ValueError: as for `token_accumulation`.
          TypeError: as for `token_accumulation`, or `every_k_schedule` is `None`.
        """
        if every_k_schedule is None:
            raise TypeError("MultiSteps needs every_k_schedule: got None.")
        self.accumulation = make_accumulation(
            opt,
            every_k_schedule,
            None,
            gradients,
            should_skip_update_fn,
            accumulator_dtype,
            token_mean=use_grad_mean,
        )
        self.inner_opt = optax.with_extra_args_support(opt)

    def init(self, params: Params) -> TokenAccumulationState:
        """The state before the first micro-batch."""
        return self.accumulation.init(params)

    def update(
        self,
        updates: Params,
        state: OptState,
        params: Params | None = None,
        **extra_args: Any,
    ) -> tuple[Params, TokenAccumulationState]:
        """Adds a micro-batch; `num_tokens` is required. See `token_accumulation`."""
        return update_window(self.accumulation, updates, state, params, **extra_args)

    def has_updated(self, state: OptState) -> jax.Array:
        """Whether the last call closed its window with an update."""
        return has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """This optimizer as an optax transformation, for `optax.chain` and similar.

        A chain around the class itself would drop `num_tokens`.
        """
        return as_transformation(self.accumulation, self.init, self.update)


def accumulation_of(tx: Any) -> Accumulation | None:
    """That of what `token_accumulation(...)` or `MultiSteps` made, else `None`."""
    is_ours = isinstance(tx, Transformation | MultiSteps)
    return getattr(tx, "accumulation", None) if is_ours else None


def from_multi_steps_state(
    tx: optax.GradientTransformation | MultiSteps, state: OptState, params: Params
) -> OptState:
    """Converts a state of `optax.MultiSteps`, at a window boundary, to a state of `tx`.

    Args:
      tx: the optimizer that continues the run: `token_accumulation(...)`, a
        `MultiSteps`, or a `chain` that holds one, around the same inner optimizer as
        before.
      state: the state of the same optimizer with `optax.MultiSteps` in place of the
        accumulation: a `MultiStepsState`, or the state of a chain that holds one.
      params: the parameters.

    Returns:
      A state of `tx` with the old inner state and `gradient_step`.

    Raises:
      ValueError: the old state is in the middle of a window, or does not fit `tx`; or
        `tx` does not accumulate.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import MultiSteps, from_multi_steps_state
      >>> params, inner = jnp.zeros(3), optax.adam(1e-3)
      >>> old_state = optax.MultiSteps(inner, 4).init(params)
      >>> optimizer = MultiSteps(inner, 4)
      >>> state = from_multi_steps_state(optimizer, old_state, params)
    """
    kind = TokenAccumulationState | optax.MultiStepsState
    flatten = functools.partial(jax.tree.flatten, is_leaf=lambda x: isinstance(x, kind))
    ours, structure = flatten(tx.init(params))
    if not any(isinstance(x, TokenAccumulationState) for x in ours):
        raise ValueError("tx must accumulate, with an optimizer of optax_tokenaccum.")
    theirs, old_structure = flatten(state)
    is_theirs = any(isinstance(x, optax.MultiStepsState) for x in theirs)
    if structure != old_structure or not is_theirs:
        raise ValueError(
            "The old state must be that of the same optimizer with optax.MultiSteps "
            f"where tx accumulates: expected {structure}, got {old_structure}. Restore "
            "a checkpoint into optax.MultiSteps(...).init(params); of an "
            "nnx.Optimizer, give nnx.pure(optimizer.opt_state)."
        )
    return jax.tree.unflatten(structure, map(_taken_over, ours, theirs))


def _taken_over(new: OptState, old: OptState) -> OptState:
    if not isinstance(new, TokenAccumulationState):
        return old
    if old.mini_step != 0:
        raise ValueError(
            "A state of optax.MultiSteps can be taken over between two windows: got "
            f"mini_step {int(old.mini_step)}, of a mean of means without counts. To "
            "give it up, write state._replace(mini_step=0)."
        )
    trees.check_same_tree(
        old.inner_opt_state,
        new.inner_opt_state,
        "The old inner state must be one of tx's inner optimizer and parameters",
    )
    return new._replace(
        gradient_step=trees.cast_like(old.gradient_step, new.gradient_step),
        inner_opt_state=trees.cast_like(old.inner_opt_state, new.inner_opt_state),
    )
