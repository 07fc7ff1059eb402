"""What one micro-batch adds to its window: checked, weighted, rejected or not."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_tokenaccum._core import sums, trees
from optax_tokenaccum._core.layout import Peers
from optax_tokenaccum._core.trees import DType, Gradients, T

# optax's protocol: (updates, gradient_step, params) -> (whether to skip, its state).
SkipFn = Callable[..., tuple[Any, Any]]


class Contribution(NamedTuple):
    """What one micro-batch adds to its window, on this device."""

    num_tokens: jax.Array  # shape=(); 0 if the given number is not usable
    value: jax.Array  # shape=(); the loss, a sum or a mean over tokens
    is_weighted: bool  # gradients and loss are means, which `num_tokens` has to weight
    skipped: jax.Array  # shape=(), dtype=bool; whether any device rejected it
    skip_state: Any

    def weighted(self, x: ArrayLike, dtype: DType) -> jax.Array:
        """A gradient or the loss as a sum over tokens, in `dtype` or float32."""
        x = jnp.asarray(x).astype(sums.at_least_float32(dtype))
        return x * self.num_tokens.astype(x.dtype) if self.is_weighted else x


def per_token(gradients: Gradients, num_tokens: jax.Array, peers: Peers) -> Gradients:
    """The mean gradients of the micro-batch, in the dtypes of its sums."""

    def divided(g: jax.Array) -> jax.Array:
        n = peers.tokens_of(peers.reduced(g), num_tokens)
        mean = sums.divide(g, jnp.where(n > 0, n, 1))
        return mean.astype(jnp.result_type(g))

    return jax.tree.map(divided, gradients)


def decision(
    should_skip: ArrayLike, skip_state: T, old_skip_state: T, is_usable: jax.Array
) -> tuple[jax.Array, T]:
    """What the skip function returned, checked; ignored without tokens."""
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
    should_skip = jnp.asarray(should_skip)
    if (should_skip.dtype, should_skip.shape) != (jnp.bool_, ()):
        raise ValueError(
            "should_skip_update_fn must return (a bool scalar, a tree): got "
            f"{should_skip.dtype} of shape {should_skip.shape} as the first."
        )
    return should_skip & is_usable, skip_state


def usable_tokens(num_tokens: ArrayLike | None, dtype: DType) -> jax.Array:
    """The number of tokens in `dtype`; 0 if it is negative or not finite."""
    num_tokens = as_num_tokens(num_tokens, dtype=dtype)
    is_usable = jnp.isfinite(num_tokens) & (num_tokens > 0)
    return jax.lax.select(is_usable, num_tokens, jnp.zeros_like(num_tokens))


def as_num_tokens(
    num_tokens: ArrayLike | None, name: str = "num_tokens", dtype: DType = jnp.float32
) -> jax.Array:
    """The weight of a micro-batch as a scalar of `dtype`; errors call it `name`."""
    if num_tokens is None:
        raise TypeError(
            "update() needs num_tokens, the number of loss tokens (or the sum of "
            "weights) behind these gradients: got None. Write optimizer.update(grads, "
            "state, params, num_tokens=n). If you did, something in between dropped "
            "it: a wrapper that is a plain optax.GradientTransformation (use "
            "GradientTransformationExtraArgs), optax.chain or the like around a "
            "MultiSteps (give it MultiSteps(...).gradient_transformation()), or flax's "
            "linen TrainState (use optax_tokenaccum.linen.TrainState)."
        )
    return as_real_scalar(num_tokens, name, dtype, non_negative=True)


def as_real_scalar(
    x: ArrayLike, name: str, dtype: DType, *, non_negative: bool = False
) -> jax.Array:
    try:
        given = jnp.result_type(x)
    except TypeError:
        given = None
    if given is None or not (
        jnp.issubdtype(given, jnp.integer) or jnp.issubdtype(given, jnp.floating)
    ):
        raise TypeError(
            f"{name} must be a real number: got {given or type(x).__name__}."
        )
    if jnp.shape(x) != ():
        raise ValueError(
            f"{name} must be a scalar, one number for the whole micro-batch: got shape "
            f"{jnp.shape(x)}. Sum it over the micro-batch first."
        )
    if non_negative and trees.is_concrete(x):
        # Use NumPy: inside a trace, jnp would trace the comparison of a known array.
        with np.errstate(over="ignore"):
            number = np.asarray(x).astype(dtype)
        if not (np.isfinite(number) and number >= 0):
            raise ValueError(
                f"{name} must be finite, in {jnp.dtype(dtype)}, and at least 0: got "
                f"{x}."
            )
    return jnp.asarray(x, dtype)
