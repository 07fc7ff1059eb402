"""Turns pairs of texts into token arrays, and these into windows of micro-batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from dialogue import Pair

from optax_tokenaccum import choose_length_buckets

PAD, BOS, SEP, EOS = 256, 257, 258, 259  # a byte is its own token
VOCABULARY = 260


class Batch(NamedTuple):
    """Rows of tokens. An encoded pair is one row without the leading axis.

    Attributes:
      inputs: int32 `[rows, length]`: BOS, prompt, SEP, completion, then PAD.
      labels: int32 `[rows, length]`: the inputs one step ahead, with an EOS at the end.
      mask: bool `[rows, length]`: True where the label is in the completion or its EOS.
    """

    inputs: np.ndarray
    labels: np.ndarray
    mask: np.ndarray


# Fills positions without a token; the mask excludes them from the loss.
PADDING = Batch(*map(np.asarray, (PAD, PAD, False)))


class Window(NamedTuple):
    """The rows behind one optimizer update, in micro-batches and as one batch.

    Attributes:
      micro_batches: the `k` micro-batches, all with the same number of rows.
      whole: the same rows as one batch.
      sequences: the same rows as sequences without padding.
    """

    micro_batches: list[Batch]
    whole: Batch
    sequences: list[Batch]

    @property
    def stacked(self) -> Batch:
        """The micro-batches as arrays `[k, rows, length]`, padded to one length."""
        k = len(self.micro_batches)
        return Batch(*(part.reshape(k, -1, part.shape[-1]) for part in self.whole))


def encode(pair: Pair) -> Batch:
    """Encodes one pair as arrays `[length]`; `length` is its bytes plus two."""
    prompt, completion = pair.prompt.encode(), pair.completion.encode()
    tokens = np.array([BOS, *prompt, SEP, *completion, EOS], np.int32)
    # At SEP, the label is the first byte of the completion.
    mask = np.arange(len(tokens) - 1) >= len(prompt) + 1
    return Batch(tokens[:-1], tokens[1:], mask)


def padded_lengths(max_length: int) -> list[int]:
    """The lengths to pad to: few, because each one costs a compilation."""
    return sorted({-(-max_length // 4), -(-max_length // 2), max_length})


def pad(
    sequences: Sequence[Batch], lengths: list[int], rows: int | None = None
) -> Batch:
    """Stacks sequences, padded to the first of `lengths` that fits the longest.

    Args:
      sequences: encoded pairs.
      lengths: the allowed lengths, ascending.
      rows: the number of rows; rows without a sequence are masked. By default,
        one row per sequence.

    Returns:
      A batch `[rows, length]`.
    """
    longest = max(len(sequence.inputs) for sequence in sequences)
    shape = rows or len(sequences), next(n for n in lengths if n >= longest)
    batch = Batch(
        np.full(shape, PAD, np.int32),
        np.full(shape, PAD, np.int32),
        np.zeros(shape, bool),
    )
    for row, sequence in enumerate(sequences):
        for padded, values in zip(batch, sequence, strict=True):
            padded[row, : len(values)] = values
    return batch


def fill_rows(batch: Batch, multiple: int) -> Batch:
    """Adds rows without tokens until `multiple` divides the number of rows."""
    missing = -len(batch.inputs) % multiple
    return Batch(
        *(
            np.pad(part, [(0, missing), (0, 0)], constant_values=nothing)
            for part, nothing in zip(batch, PADDING, strict=True)
        )
    )


def make_windows(
    sequences: Sequence[Batch],
    *,
    updates: int,
    accumulation_steps: int,
    micro_batch_size: int,
    lengths: list[int],
    seed: int,
) -> list[Window]:
    """Cuts a shuffled stream of sequences into windows, epoch after epoch.

    Args:
      sequences: encoded pairs; each is used once before any is used again.
      updates: the number of windows.
      accumulation_steps: micro-batches in a window.
      micro_batch_size: rows in a micro-batch.
      lengths: the lengths to pad to.
      seed: the seed of the shuffle.

    Returns:
      The windows.
    """
    shuffle = np.random.default_rng(seed)
    needed = updates * accumulation_steps * micro_batch_size
    epochs = -(-needed // len(sequences))
    order = np.concatenate([shuffle.permutation(len(sequences)) for _ in range(epochs)])
    cut = order[:needed].reshape(updates, accumulation_steps, micro_batch_size)
    windows = []
    for window in cut.tolist():
        micro_batches = [[sequences[i] for i in rows] for rows in window]
        whole = [sequence for rows in micro_batches for sequence in rows]
        padded = [pad(rows, lengths) for rows in micro_batches]
        windows.append(Window(padded, pad(whole, lengths), whole))
    return windows


def plan_settings(windows: list[Window]) -> dict[str, Any]:
    """Returns arguments of `plan_window` for a whole run, so that shapes are few.

    No planned micro-batch is larger than the largest one with a fixed number of rows,
    so none needs more memory.
    """
    lengths = [len(sequence.inputs) for w in windows for sequence in w.sequences]
    return {
        "max_tokens": largest_micro_batch(windows).inputs.size,
        "length_buckets": choose_length_buckets(lengths, 6),
    }


def largest_micro_batch(windows: list[Window]) -> Batch:
    """The micro-batch with the most positions, including padding."""
    micro_batches = (batch for window in windows for batch in window.micro_batches)
    return max(micro_batches, key=lambda batch: batch.inputs.size)


def largest_window(windows: list[Window]) -> Window:
    """The window whose `whole` batch has the most positions, including padding."""
    return max(windows, key=lambda window: window.whole.inputs.size)


def batches_in_order(
    sequences: Sequence[Batch], rows: int, lengths: list[int]
) -> list[Batch]:
    """Batches for evaluation: every sequence once, sorted by length to pad less."""
    by_length = sorted(sequences, key=lambda sequence: len(sequence.inputs))
    return [
        pad(by_length[start : start + rows], lengths, rows)
        for start in range(0, len(by_length), rows)
    ]
