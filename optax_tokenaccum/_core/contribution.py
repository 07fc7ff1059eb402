"""What one micro-batch adds to its window: checked, weighted, rejected or not."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import arrays, checks, trees
from optax_tokenaccum._core.layout import Layout
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.sums import only_gradients
from optax_tokenaccum._core.trees import Gradients, Params

# optax's protocol: (updates, gradient_step, params) -> (whether to skip, its state).
SkipFn = Callable[..., tuple[Any, Any]]


class Contribution(NamedTuple):
    """What one micro-batch adds to its window.

    Attributes:
      gradients: the gradients of this device's rows.
      num_tokens: the tokens of this device's rows; 0 if the given number is not usable.
      value: the loss, a sum or a mean like the gradients.
      is_weighted: whether gradients and loss are means that `num_tokens` has to weight.
      skipped: whether any device rejected the micro-batch.
      skip_state: what the skip function returned.
    """

    gradients: Gradients
    num_tokens: jax.Array  # shape=()
    value: jax.Array  # shape=()
    is_weighted: bool
    skipped: jax.Array  # shape=(), dtype=bool
    skip_state: Any

    def weighted(self, x: Any, dtype: Any) -> jax.Array:
        """A gradient or the loss as a sum over tokens, in `dtype` or float32."""
        x = jnp.asarray(x).astype(arrays.at_least_float32(dtype))
        return x * self.num_tokens.astype(x.dtype) if self.is_weighted else x


def make_contribution(
    gradients: Gradients,
    state: TokenAccumulationState,
    params: Params,
    num_tokens: Any,
    value: Any,
    *,
    layout: Layout,
    of: Literal["sum", "mean"],
    token_mean: bool,
    should_skip_update_fn: SkipFn | None,
) -> Contribution:
    """Checks a micro-batch, and asks `should_skip_update_fn` about it.

    Args:
      gradients: a tree like the parameters.
      state: the open window.
      params: what the skip function is given.
      num_tokens: a real scalar.
      value: a real scalar, or `None`.
      layout: of the sums.
      of: whether `gradients` and `value` are of a sum or of a mean over tokens.
      token_mean: whether the window is divided by its tokens.
      should_skip_update_fn: a function of optax's protocol, or `None`.
    """
    dtype = state.acc_tokens.dtype
    is_weighted = token_mean and of == "mean"
    num_tokens = checks.as_num_tokens(num_tokens, dtype=dtype)
    if not trees.is_zero(num_tokens):
        layout.check_tokens(gradients, num_tokens, is_mean=is_weighted)
    value = checks.as_value(0.0 if value is None else value, dtype)
    is_usable = jnp.isfinite(num_tokens) & (num_tokens > 0)
    num_tokens = jax.lax.select(is_usable, num_tokens, jnp.zeros_like(num_tokens))
    skipped, skip_state = jnp.zeros((), jnp.bool_), state.skip_state
    if should_skip_update_fn is not None:
        mean = gradients if of == "mean" else _per_token(gradients, num_tokens, layout)
        asked = should_skip_update_fn(only_gradients(mean), state.gradient_step, params)
        skipped, skip_state = _decision(*asked, state.skip_state, num_tokens > 0)
        skipped, skip_state = layout.agree(skipped, skip_state)
    return Contribution(gradients, num_tokens, value, is_weighted, skipped, skip_state)


def _per_token(gradients: Gradients, num_tokens: jax.Array, layout: Layout) -> Any:
    """The mean gradients of the micro-batch, in the dtypes of its sums."""

    def divided(g: jax.Array) -> jax.Array:
        n = layout.tokens_of(layout.reduced(g), num_tokens)
        mean = arrays.divide(g, jnp.where(n > 0, n, 1))
        return mean.astype(jnp.result_type(g))

    return jax.tree.map(divided, gradients)


def _decision(
    should_skip: Any, skip_state: Any, old_skip_state: Any, is_usable: jax.Array
) -> tuple[jax.Array, Any]:
    """What the skip function returned, checked; without tokens it does not count."""
    trees.check_same_tree(
        old_skip_state,
        skip_state,
        "skip_state must come from this should_skip_update_fn (keep the function "
        "that the run began with, or take skip_state from a new init)",
    )
    skip_state = jax.tree.map(
        lambda old, new: jnp.where(is_usable, new, old).astype(old.dtype),
        old_skip_state,
        skip_state,
    )
    return checks.as_skip_decision(should_skip) & is_usable, skip_state
