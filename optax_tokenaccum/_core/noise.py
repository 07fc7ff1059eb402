"""The gradient noise of a window: what more tokens in it would be good for."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class GradientNoise(NamedTuple):
    r"""Estimates, from one window, of how much the gradient of a token varies.

    Let :math:`g` be the expected gradient of one token's loss, and :math:`\Sigma` the
    covariance of that gradient. The mean over :math:`n` tokens then has the expected
    squared norm :math:`|g|^2 + \operatorname{tr} \Sigma / n`. Norms of the sums at two
    different :math:`n` give both unknowns, for any numbers of tokens.

    Both estimates are unbiased if the window's micro-batches are cut at random, and if
    their mean gradients do not depend on their numbers of tokens. One window's are very
    noisy, and may be negative. Average each of them over many windows, with `nanmean`,
    before you divide. Both are NaN while a window is open, and for a window that has
    tokens in only one micro-batch (on a mesh with `reduce_every="window"`: on only one
    device).

    Attributes:
      trace: the estimate of :math:`\operatorname{tr} \Sigma`, for one token.
      squared_norm: the estimate of :math:`|g|^2`.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018),
    arXiv 1812.06162, appendix A.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> from optax_tokenaccum import GradientNoise, make_train_step
      >>> def loss_fn(w, x):
      ...     return jnp.sum((w - x) ** 2) / 2, len(x)
      >>> step = make_train_step(loss_fn, optax.sgd(0.0), 8, gradient_noise=True)
      >>> state, windows = step.init(jnp.zeros(())), []
      >>> rng = np.random.default_rng(0)
      >>> for _ in range(8 * 200):
      ...     state, metrics = step(state, rng.normal(1.0, 3.0, 16))
      ...     windows.append(jax.device_get(metrics.gradient_noise))
      >>> noise = GradientNoise(*np.nanmean(windows, axis=0))
      >>> print(f"{noise.scale:.0f} tokens")
      9 tokens
    """

    trace: Any  # shape=(), dtype=float32, or wider where a parameter is
    squared_norm: Any  # shape=(), dtype=float32, or wider where a parameter is

    @property
    def scale(self) -> Any:
        """`trace / squared_norm`, in tokens: the noise scale, or critical batch.

        A window of this many tokens has as much noise as signal in its gradient.
        """
        return self.trace / self.squared_norm


class FirstMicroBatch(NamedTuple):
    """The first micro-batch of a window that has tokens and was not rejected."""

    norm: jax.Array  # shape=(); of its mean gradient
    num_tokens: jax.Array  # shape=()


def unknown(dtype: Any) -> GradientNoise:
    # Two arrays: states are donated, and one cannot be donated twice.
    return GradientNoise(*(jnp.full((), jnp.nan, dtype) for _ in range(2)))


def from_first(
    first: FirstMicroBatch, mean_norm: jax.Array, num_tokens: jax.Array
) -> GradientNoise:
    """From the norms of the mean gradients of the first micro-batch and the window."""
    # E n |mean|^2 = n |g|^2 + tr S, at two different n.
    others = num_tokens - first.num_tokens
    of_first = first.num_tokens * first.norm**2
    squared_norm = (num_tokens * mean_norm**2 - of_first) / others
    squared_norm = jnp.where(others > 0, squared_norm, jnp.nan)
    return GradientNoise(of_first - first.num_tokens * squared_norm, squared_norm)


def from_parts(
    norms: jax.Array, counts: jax.Array, mean_norm: jax.Array
) -> GradientNoise:
    """From the norms of the *summed* gradients of the window's parts, `[parts]`.

    `counts` are their tokens; `mean_norm` is that of the window's mean gradient.
    """
    has_tokens, num_tokens = counts > 0, counts.sum()
    of_parts = jnp.where(has_tokens, norms**2 / jnp.where(has_tokens, counts, 1), 0)
    trace = (of_parts.sum() - num_tokens * mean_norm**2) / (has_tokens.sum() - 1)
    trace = jnp.where(has_tokens.sum() > 1, trace, jnp.nan)
    return GradientNoise(trace, mean_norm**2 - trace / num_tokens)
