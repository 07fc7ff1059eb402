"""Losses that return a sum and a count from the same mask."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

Reduction = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]


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


def reduce_loss(
    losses: ArrayLike,
    mask: ArrayLike,
    reduction: Reduction = "token-mean",
    *,
    max_length: float | None = None,
    segment_ids: ArrayLike | None = None,
    count_empty: bool = False,
) -> tuple[jax.Array, jax.Array]:
    r"""Reduces losses of tokens to a sum and a count, as policy gradients need them.

    With :math:`s = \sum_t w_t \ell_t` and :math:`n = \sum_t w_t` over the tokens of
    one sequence, where :math:`w_t` is the mask:

    =========================== ======================== ==================
    reduction                   added to the sum         added to the count
    =========================== ======================== ==================
    `"token-mean"`              :math:`s`                :math:`n`
    `"seq-mean-token-mean"`     :math:`s / n`            1
    `"seq-mean-token-sum"`      :math:`s`                1
    `"seq-mean-token-sum-norm"` :math:`s /` `max_length` 1
    =========================== ======================== ==================

    The loss of a window is the sum of all sums over the sum of all counts. So it does
    not depend on how the sequences are cut into micro-batches, or how wide they are
    padded. A mean of each micro-batch does.

    Args:
      losses: `[rows, length]`, the loss of every token, for example minus the advantage
        times the ratio of probabilities. Where the mask is not positive, it may be NaN.
      mask: `[rows, length]` bools or non-negative weights.
      reduction: one of the four above.
      max_length: for `"seq-mean-token-sum-norm"`, the constant that sums are divided
        by, such as the most tokens of a completion. It must be the same in the whole
        run: with the padded length of a batch, the loss would depend on the cut.
      segment_ids: `[rows, length]` integers, if a row holds several sequences: equal
        numbers in a row are one sequence, and 0 is padding. By default a row is a
        sequence.
      count_empty: counts sequences without tokens too. They add nothing to the sum. It
        needs `segment_ids`, since rows of padding would be counted without.

    Returns:
      `(loss_sum, count)`, float32 scalars (wider if the losses are), in the form that
      `make_train_step` expects from a `loss_fn`.

    Raises:
      ValueError: the shapes do not match, or an argument is missing or has no meaning
        for this reduction.

    Source: the names are those of verl's `loss_agg_mode`. GRPO has a mean over
    sequences of means over tokens (arXiv 2402.03300), DAPO a mean over tokens (arXiv
    2503.14476), Dr. GRPO a sum over tokens divided by a constant (arXiv 2503.20783).

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum import reduce_loss
      >>> losses = jnp.array([[1.0, 3.0, 0.0], [5.0, 0.0, 0.0]])
      >>> mask = jnp.array([[True, True, False], [True, False, False]])
      >>> for reduction in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
      ...     loss_sum, count = reduce_loss(losses, mask, reduction)
      ...     print(loss_sum, count)
      9.0 3.0
      7.0 2.0
      9.0 2.0
    """
    _check_reduction(reduction, max_length, segment_ids, count_empty)
    losses, mask = jnp.asarray(losses), jnp.asarray(mask)
    if losses.ndim != 2 or mask.shape != losses.shape:
        raise ValueError(
            "losses and mask must both be [rows, length]: got losses "
            f"{losses.shape} and mask {mask.shape}."
        )
    dtype = jnp.promote_types(losses.dtype, jnp.float32)
    counts = mask > 0
    if segment_ids is not None:
        segment_ids = ids = jnp.asarray(segment_ids)
        if ids.shape != mask.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                "segment_ids must be integers of the shape of mask: got "
                f"{ids.dtype} {ids.shape} and mask {mask.shape}."
            )
        counts &= ids != 0
    weights = jnp.where(counts, mask, 0).astype(dtype)
    weighted = weights * jnp.where(counts, losses, 0).astype(dtype)
    if reduction == "token-mean":
        return jnp.sum(weighted), jnp.sum(weights)
    if segment_ids is None:
        sums, num_tokens = jnp.sum(weighted, -1), jnp.sum(weights, -1)
        is_counted = num_tokens > 0
    else:
        of_segments = jax.vmap(_of_segments)
        sums, num_tokens, begins = of_segments(weighted, weights, segment_ids)
        is_counted = begins if count_empty else num_tokens > 0
    if reduction == "seq-mean-token-mean":
        sums = sums / jnp.where(num_tokens > 0, num_tokens, 1)
    elif max_length is not None:
        sums = sums / max_length
    return jnp.sum(sums), jnp.sum(is_counted, dtype=dtype)


def _of_segments(
    weighted: jax.Array, weights: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over each segment of a row, and where segments begin, except padding."""
    order = jnp.argsort(ids)
    ids = ids[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    number = jnp.cumsum(is_first) - 1

    def add_up(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x[order], number, len(ids), indices_are_sorted=True)

    return add_up(weighted), add_up(weights), is_first & (ids != 0)


def _check_reduction(
    reduction: str, max_length: float | None, segment_ids: object, count_empty: bool
) -> None:
    names = get_args(Reduction)
    if reduction not in names:
        raise ValueError(
            f"reduction must be one of {', '.join(names)}: got {reduction!r}."
        )
    is_norm = reduction == "seq-mean-token-sum-norm"
    if is_norm != (max_length is not None):
        raise ValueError(
            "max_length goes with reduction='seq-mean-token-sum-norm', which divides "
            f"by it, and with no other: got max_length={max_length} and {reduction!r}. "
            "Take a constant of the run, such as the most tokens of a completion, "
            "never the padded length."
        )
    if max_length is not None and not max_length > 0:
        raise ValueError(f"max_length must be positive: got {max_length}.")
    if count_empty and (segment_ids is None or reduction == "token-mean"):
        raise ValueError(
            "count_empty needs segment_ids, to tell sequences without tokens from "
            "padding, and a mean over sequences: got "
            f"{'no' if segment_ids is None else 'these'} segment_ids and "
            f"{reduction!r}. Leave it out, or give both."
        )
