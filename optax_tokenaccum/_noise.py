"""The gradient noise of a window: what more tokens in it would be good for."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._core import checks, overwritten, sums, trees
from optax_tokenaccum._core.accumulation import make_accumulation
from optax_tokenaccum._core.body import add_micro_batch
from optax_tokenaccum._core.loss import LossFn, MicroBatch, make_loss
from optax_tokenaccum._core.schedule import make_schedule
from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._steps.micro_batches import (
    GroupedWindow,
    Index,
    Pick,
    explained,
    groups_of,
    loop,
)


class GradientNoise(NamedTuple):
    r"""Estimates, from one window, of how much the gradient of a token varies.

    Let :math:`g` be the expected gradient of one token's loss, and :math:`\Sigma` the
    covariance of that gradient. The mean over :math:`n` tokens then has the expected
    squared norm :math:`|g|^2 + \operatorname{tr} \Sigma / n`.

    One window's estimates are very noisy, and either may be negative. Average each of
    them over many windows before you divide.

    Attributes:
      trace: the estimate of :math:`\operatorname{tr} \Sigma`, for one token.
      squared_norm: the estimate of :math:`|g|^2`.

    Example:
      >>> from optax_tokenaccum import GradientNoise
      >>> noise = GradientNoise(trace=18.0, squared_norm=2.0)
      >>> print(noise.scale)  # tokens
      9.0
    """

    trace: jax.Array | float  # shape=(), dtype=float32, or wider where a parameter is
    squared_norm: jax.Array | float  # shape=(), of the same dtype

    @property
    def scale(self) -> jax.Array | float:
        """`trace / squared_norm`, in tokens: the noise scale, or critical batch.

        A window of this many tokens has as much noise as signal in its gradient.
        """
        return self.trace / self.squared_norm


def gradient_noise(
    loss_fn: LossFn,
    params: optax.Params,
    micro_batches: Batch,
    *,
    has_aux: bool = False,
    rng: jax.Array | None = None,
    **loss_kwargs: Any,
) -> GradientNoise:
    r"""Measures the noise of one window, from the norms of all its micro-batches.

    With :math:`G_i, n_i` the gradient of the summed loss and the tokens of each of
    :math:`k` micro-batches, and :math:`G, N` those of the window:

    .. math::
      \operatorname{tr} \Sigma \approx
      \frac{\sum_i |G_i|^2 / n_i - |G|^2 / N}{k - 1}, \qquad
      |g|^2 \approx \frac{|G|^2 - N \operatorname{tr} \Sigma}{N^2}

    Both are unbiased if rows are cut into micro-batches at random, and if mean
    gradients do not depend on :math:`n_i`. Micro-batches without tokens do not count;
    both are NaN if fewer than two have tokens.

    It costs the backward passes of a window, and the memory of two gradients: measure,
    for example, every hundredth window. Wrap it in `jax.jit`, with parameters and
    batches placed as in training.

    Args:
      loss_fn: as for `make_train_step`, a *sum* over the micro-batch's tokens.
      params: the parameters. For an NNX model, split it, and merge it in `loss_fn`.
      micro_batches: leaves `[k, micro, ...]`, `k` at least 2, see `split_batch`.
      has_aux: as for `make_train_step`.
      rng: one key; `loss_fn` receives it as `rng`, folded with the micro-batch's index.
      **loss_kwargs: passed to `loss_fn` unchanged, not differentiated.

    Raises:
      ValueError: there is one micro-batch; or `micro_batches` is a `PlannedWindow`,
        whose micro-batches are sorted by length; or the call is in a `shard_map`, where
        parameters or batches are those of one device.
      TypeError: as for `window_value_and_grad`.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018),
    arXiv 1812.06162, appendix A.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from optax_tokenaccum import GradientNoise, gradient_noise
      >>> def loss_fn(w, x):
      ...     return jnp.sum((w - x) ** 2) / 2, len(x)
      >>> measure = jax.jit(lambda w, xs: gradient_noise(loss_fn, w, xs))
      >>> rng = np.random.default_rng(0)
      >>> windows = [measure(0.0, rng.normal(1, 3, (8, 16))) for _ in range(400)]
      >>> noise = GradientNoise(*np.mean(windows, axis=0))
      >>> print(f"{noise.scale:.0f} tokens")
      9 tokens
    """
    checks.check_function(loss_fn, "loss_fn")
    checks.check_nnx_variables(params)
    if isinstance(micro_batches, GroupedWindow):
        raise ValueError(
            "gradient_noise needs micro-batches that are cut at random: got a "
            "PlannedWindow, whose micro-batches are sorted by length. Use split_batch."
        )
    k, (group,) = groups_of(micro_batches, None)
    if k == 1:
        raise ValueError(
            "gradient_noise compares the micro-batches of a window: got one "
            "micro-batch. Give at least two, of fewer rows."
        )
    leaves = jax.tree.leaves((params, micro_batches))
    mapped = frozenset().union(*map(trees.varying_axes, leaves))
    if mapped:
        raise ValueError(
            "gradient_noise must see the parameters and rows of all devices: got some "
            f"that differ along {sorted(mapped)}, in a shard_map. Call it outside."
        )
    accumulation = make_accumulation(optax.identity(), make_schedule())
    loss, empty = make_loss(loss_fn, has_aux), accumulation.empty_window(params)
    trained, _ = overwritten.split(params)

    def add(pick: Pick, i: Index, carry: Any) -> Any:
        window, of_parts, num_parts = carry
        micro_batch = MicroBatch(pick(i), rng, loss_kwargs).at(i)
        with explained(micro_batches, micro_batch.rows):
            part, *_ = add_micro_batch(
                loss, accumulation, empty, micro_batch, params, None
            )
        tokens, has_tokens = part.acc_tokens, part.acc_tokens > 0
        gradients, _ = overwritten.split(part.acc_grads)
        squared_norm = sums.norm(gradients, tokens.dtype) ** 2
        window = accumulation.add(gradients, window, None, tokens).state
        of_part = squared_norm / jnp.where(has_tokens, tokens, 1)
        return window, of_parts + of_part, num_parts + has_tokens

    zero = jnp.zeros_like(empty.acc_tokens)
    carry = accumulation.empty_window(trained), zero, zero
    window, of_parts, num_parts = loop([group], add, carry)
    # NaN, and never an error, where there are too few parts.
    num_parts = jnp.where(num_parts > 1, num_parts, jnp.nan)
    tokens = window.acc_tokens
    squared_norm = sums.norm(window.acc_grads, tokens.dtype) ** 2
    trace = (of_parts - squared_norm / tokens) / (num_parts - 1)
    return GradientNoise(trace, (squared_norm - tokens * trace) / tokens**2)
