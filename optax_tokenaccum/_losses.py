"""Losses that return a sum and a count from the same mask."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike


def softmax_cross_entropy_sum(
    logits: ArrayLike,
    labels: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    ignore_index: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Cross entropy summed over tokens, and the number of those tokens.

    :math:`\left(\sum_t w_t \cdot -\log \mathrm{softmax}(z_t)_{y_t},\; \sum_t w_t
    \right)`, where :math:`w_t` is the mask.

    In most published token-averaging regressions, the count came from a different mask
    than the sum; here one mask gives both. Where the mask is not positive, logits and
    labels are ignored: a NaN or a label outside the vocabulary adds nothing to the loss
    or its gradient. Where the mask *is* positive, a label outside the vocabulary makes
    the sum NaN instead of selecting another class.

    Args:
      logits: `[..., vocabulary]`, any floating dtype; computed in float32.
      labels: `[...]` integers, already shifted: `logits[t]` should predict
        `labels[t]`.
      mask: `[...]` bools or non-negative weights; by default every token counts.
      ignore_index: tokens with this label do not count, regardless of `mask`.

    Returns:
      `(loss_sum, num_tokens)`, float32 scalars, in the form that `make_train_step`
      expects from a `loss_fn`.

    Raises:
      ValueError: the shapes do not match.
      TypeError: the labels are not integers.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum import softmax_cross_entropy_sum
      >>> logits = jnp.zeros((2, 3, 8))
      >>> labels = jnp.asarray([[1, 2, -100], [3, -100, -100]])
      >>> loss_sum, n = softmax_cross_entropy_sum(logits, labels, ignore_index=-100)
      >>> print(n, round(float(loss_sum / n), 4))  # log 8
      3.0 2.0794
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, class ids: got {labels.dtype}.")
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            "labels must have the shape of logits without its last axis: got logits "
            f"{logits.shape} and labels {labels.shape}."
        )
    weights = jnp.ones(labels.shape) if mask is None else jnp.asarray(mask)
    if weights.shape != labels.shape:
        raise ValueError(
            "mask must have the shape of labels, one weight a token: got mask "
            f"{weights.shape} and labels {labels.shape}. Spread a weight per sequence "
            "with jnp.broadcast_to."
        )
    weights = weights.astype(jnp.float32)
    counts = weights > 0
    if ignore_index is not None:
        counts &= labels != ignore_index
    weights = jnp.where(counts, weights, 0)
    # The inner select also keeps NaNs at ignored tokens out of the gradient.
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        jnp.where(counts[..., None], logits.astype(jnp.float32), 0),
        jnp.where(counts, labels, 0),
    )
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(counts & ~is_class, jnp.nan, losses)
    return jnp.sum(jnp.where(counts, weights * losses, 0)), jnp.sum(weights)
