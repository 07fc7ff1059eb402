"""Sequences of many lengths, in micro-batches of few shapes."""

from collections.abc import Callable, Iterable, Sequence
from operator import mul
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._core.trees import Batch, Leaf
from optax_tokenaccum._split_batch import PadValues, fitted, fitted_pad, with_pads

__all__ = [
    "MicroBatchPlan",
    "choose_length_buckets",
    "pad_micro_batch",
    "plan_window",
]


class MicroBatchPlan(NamedTuple):
    """The sequences of a window that go into one micro-batch, and its shape.

    Attributes:
      indices: the indices of the sequences, int64 `[at most num_rows]`.
      num_rows: the number of rows; rows without a sequence carry no weight.
      length: the length that every row is padded to, in tokens.

    Example:
      >>> from optax_tokenaccum.ragged import plan_window
      >>> plan = plan_window([3, 60, 2], max_tokens=64)[0]
      >>> print(plan.indices, plan.num_rows, plan.length)
      [1] 1 64
    """

    indices: np.ndarray
    num_rows: int
    length: int


def plan_window(
    lengths: Iterable[int] | np.ndarray,
    *,
    max_tokens: int,
    length_buckets: Sequence[int] | None = None,
    batch_multiple: int = 1,
    cost: Callable[[int, int], float] | None = None,
) -> list[MicroBatchPlan]:
    """Cuts a window's sequences into micro-batches with the least padding.

    The update does not depend on how a window is cut, so sequences can be sorted by
    length. A bucket has one shape for the whole run, with `max_tokens // length` rows,
    so a step compiles once per bucket. A dynamic program over the sorted window finds
    the plan with the fewest padded tokens that these shapes allow: the longest sequence
    must go into some shape, and the next longest can fill its other rows.

    Plans are deterministic. With several processes, plan on the lengths of all
    processes: processes that disagree on shapes compute garbage or hang.

    Args:
      lengths: the number of tokens in each sequence.
      max_tokens: the upper limit of `num_rows * length`.
      length_buckets: lengths to pad to, in any order, see `choose_length_buckets`;
        by default the powers of two that fit.
      batch_multiple: `num_rows` is a multiple of this, the number of devices that share
        a batch.
      cost: `cost(num_rows, length)` of a micro-batch, to be minimized over the window.
        The default is `num_rows * length`, the padded tokens; where attention
        dominates, pass `num_rows * length**2`. The limit stays `max_tokens`.

    Returns:
      Plans that contain every sequence once, longest first.

    Raises:
      ValueError: there are no sequences; a sequence is empty or longer than every
        bucket (the error names its index); or a bucket has no room for `batch_multiple`
        rows.
      TypeError: an argument is not an integer.

    Example:
      >>> from optax_tokenaccum.ragged import plan_window
      >>> lengths = [5, 31, 4, 8, 30, 6]
      >>> for plan in plan_window(lengths, max_tokens=64, length_buckets=[8, 32]):
      ...     print(plan.indices, plan.num_rows, plan.length)
      [1 4] 2 32
      [3 5 0 2] 8 8
    """
    tokens = _as_lengths(lengths)
    shapes = _shapes_of(max_tokens, length_buckets, batch_multiple)
    if tokens.max() > shapes[-1][1]:
        raise ValueError(
            f"Every sequence must fit into a bucket: got {tokens.max()} tokens at "
            f"index {tokens.argmax()}, the longest bucket has {shapes[-1][1]}."
        )
    order = np.argsort(-tokens, kind="stable")
    choice = _cheapest(tokens[order].tolist(), shapes, cost or mul)
    plans, start = [], 0
    while start < len(order):
        num_rows, length = shapes[choice[start]]
        plans.append(MicroBatchPlan(order[start : start + num_rows], num_rows, length))
        start += num_rows
    return plans


def choose_length_buckets(
    lengths: Iterable[int] | np.ndarray,
    n: int,
    *,
    cost: Callable[[np.ndarray, int], ArrayLike] | None = None,
) -> tuple[int, ...]:
    r"""Finds the `n` lengths to pad to that waste the least on these sequences.

    The result is exact. It comes from a dynamic program over the distinct lengths
    :math:`u_j`, in which a bucket for the sequences longer than :math:`u_i` and up to
    :math:`u_j` costs the number of these sequences times :math:`u_j`. With :math:`d`
    distinct lengths, time grows with :math:`n d^2`, and memory with :math:`n d`.

    Args:
      lengths: the number of tokens in each sequence of a sample of the data.
      n: the most buckets to return; each bucket is a program to compile.
      cost: `cost(rows, length)` of `rows` rows (an array of integers) padded to
        `length`; see `plan_window`.

    Returns:
      At most `n` lengths in increasing order; the last is the longest of `lengths`.

    Raises:
      ValueError: there are no sequences, or one is empty (the error names its index).
      TypeError: an argument is not an integer.

    Example:
      >>> from optax_tokenaccum.ragged import choose_length_buckets
      >>> choose_length_buckets([3, 3, 4, 4, 30, 31, 32], 2)
      (4, 32)
    """
    n = as_count(n, "n")
    distinct, counts = np.unique(_as_lengths(lengths), return_counts=True)
    if len(distinct) <= n:
        return tuple(distinct.tolist())
    rows_up_to = np.concatenate([[0], np.cumsum(counts)])
    # best[b, j]: the lowest cost of the j shortest lengths in at most b buckets.
    best = np.full((n + 1, len(distinct) + 1), np.inf)
    best[:, 0] = 0
    previous = np.zeros(best.shape, np.int64)
    for j, length in enumerate(distinct.tolist(), start=1):
        rows = rows_up_to[j] - rows_up_to[:j]
        bucket = np.asarray((cost or mul)(rows, length), np.float64)
        totals = best[:-1, :j] + bucket
        previous[1:, j] = totals.argmin(1)
        best[1:, j] = totals.min(1)
    chosen, j = [], len(distinct)
    while j:
        chosen.append(int(distinct[j - 1]))
        j = previous[n - len(chosen) + 1, j]
    return tuple(reversed(chosen))


def _as_lengths(lengths: Iterable[int] | np.ndarray) -> np.ndarray:
    tokens = np.asarray(lengths if hasattr(lengths, "__getitem__") else list(lengths))
    if tokens.ndim != 1 or not tokens.size or tokens.min() < 1:
        least = f"{tokens.min()} at index {tokens.argmin()}" if tokens.size else "none"
        raise ValueError(
            f"lengths must be a list of numbers of tokens, at least 1: got {least}."
        )
    return tokens.astype(np.int64)


def _shapes_of(
    max_tokens: int, length_buckets: Sequence[int] | None, batch_multiple: int
) -> list[tuple[int, int]]:
    """`(num_rows, length)` of every bucket, shortest first."""
    max_tokens = as_count(max_tokens, "max_tokens")
    batch_multiple = as_count(batch_multiple, "batch_multiple")
    if length_buckets is None:
        limit = max_tokens // batch_multiple
        length_buckets = [2**i for i in range(limit.bit_length())]
    lengths = sorted({as_count(length, "A length bucket") for length in length_buckets})
    rows = [max_tokens // n // batch_multiple * batch_multiple for n in lengths]
    shapes = list(zip(rows, lengths, strict=True))
    if not shapes or shapes[-1][0] == 0:
        longest = lengths[-1] if lengths else None
        raise ValueError(
            f"A bucket must leave room for {batch_multiple} rows: got max_tokens "
            f"{max_tokens} and a longest bucket of {longest}."
        )
    return shapes


def _cheapest(
    lengths: list[int],
    shapes: list[tuple[int, int]],
    cost_of: Callable[[int, int], float],
) -> list[int]:
    """The shape to fill next at each of the decreasing lengths, for the least cost."""
    count, costs = len(lengths), [float(cost_of(*shape)) for shape in shapes]
    best, choice = [0.0] * (count + 1), [0] * count
    for start in reversed(range(count)):
        best[start], choice[start] = min(
            (costs[i] + best[min(start + num_rows, count)], i)
            for i, (num_rows, length) in enumerate(shapes)
            if length >= lengths[start]
        )
    return choice


def pad_micro_batch(
    sequences: Sequence[Batch], plan: MicroBatchPlan, *, pad_values: PadValues
) -> Batch:
    """Pads the sequences of one planned micro-batch to arrays of its shape.

    Padding must carry no weight in the loss, and which values carry none depends on the
    loss: a mask of zeros, or labels that the loss ignores. So `pad_values` has no
    default: zeros would count as tokens if the loss ignores another label.

    Args:
      sequences: all sequences of the window, each a pytree of the same structure whose
        leaves are `[length, ...]`, or scalars for the sequence as a whole.
      plan: one of the plans that `plan_window` made from the lengths of `sequences`.
      pad_values: the values of missing tokens and rows: a number for all leaves, or a
        tree prefix, for example `{"inputs": 0, "labels": -100}`.

    Returns:
      The tree of a sequence with NumPy arrays as leaves: `[num_rows, length, ...]`, or
      `[num_rows]` for a scalar. Their dtypes are the ones that jax keeps (int32 for
      int64, unless x64 is enabled).

    Raises:
      ValueError: sequences differ in structure or shape, or do not match the plan; the
        leaves of one have different lengths; or a dtype cannot hold a value (the error
        names index and leaf).

    Example:
      >>> import numpy as np
      >>> from optax_tokenaccum.ragged import pad_micro_batch, plan_window
      >>> sequences = [{"labels": np.arange(1, n + 1)} for n in (2, 7, 3)]
      >>> long, short = plan_window([2, 7, 3], max_tokens=12, length_buckets=[4, 8])
      >>> print(pad_micro_batch(sequences, short, pad_values=-100)["labels"])
      [[   1    2    3 -100]
       [   1    2 -100 -100]
       [-100 -100 -100 -100]]
    """
    structure = jax.tree.structure(sequences[0])
    leaves = with_pads(sequences[0], pad_values)
    if not any(map(np.ndim, jax.tree.leaves(sequences[0]))):
        raise ValueError(
            "A sequence must have a leaf with an axis, its tokens. A list is a "
            "container: give np.asarray(tokens)."
        )
    arrays = [_padding(plan, *leaf) for leaf in leaves]
    for row, index in enumerate(plan.indices.tolist()):
        values = structure.flatten_up_to(sequences[index])
        for (path, *_), array, x in zip(leaves, arrays, values, strict=True):
            name = f"The leaf {path} of sequence {index}"
            advice = "Its dtype is that of the first sequence, as jax keeps it."
            array[row, *map(slice, np.shape(x)[:1])] = fitted(
                x, array.dtype, name, advice
            )
        lengths = {len(x) for x in values if np.ndim(x)}
        if len(lengths) > 1:
            raise ValueError(
                "The leaves of a sequence must have one length: got "
                f"{sorted(lengths)} at index {index}. Cut inputs and labels alike."
            )
    return jax.tree.unflatten(structure, arrays)


def _padding(plan: MicroBatchPlan, path: str, x: Leaf, pad: ArrayLike) -> np.ndarray:
    """The array of a leaf of every sequence, `x` of the first, with only padding."""
    given = np.asarray(x)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(given.dtype))
    shape = (plan.num_rows, plan.length, *given.shape[1:])[: 1 + given.ndim]
    return np.full(shape, fitted_pad(pad, dtype, path))
