"""From pairs of texts to token arrays, and from those to windows of micro-batches."""

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
      mask: bool `[rows, length]`: whether the label is of the completion or its EOS.
    """

    inputs: np.ndarray
    labels: np.ndarray
    mask: np.ndarray


# What stands where there is no token; the mask says that it weighs nothing.
PADDING = Batch(*map(np.asarray, (PAD, PAD, False)))


class Window(NamedTuple):
    """The rows behind one optimizer update, cut up and in one piece.

    Attributes:
      micro_batches: as many as are accumulated, with the same number of rows each.
      whole: the same rows as one batch.
      sequences: the same rows without padding, each of its own length.
    """

    micro_batches: list[Batch]
    whole: Batch
    sequences: list[Batch]

    @property
    def stacked(self) -> Batch:
        """The micro-batches as one array `[k, rows, length]`, all of one length."""
        k = len(self.micro_batches)
        return Batch(*(part.reshape(k, -1, part.shape[-1]) for part in self.whole))


def encode(pair: Pair) -> Batch:
    """Makes the tokens `[length]` of one pair; the length is its bytes plus two."""
    prompt, completion = pair.prompt.encode(), pair.completion.encode()
    tokens = np.array([BOS, *prompt, SEP, *completion, EOS], np.int32)
    # The label of SEP's position is the completion's first byte.
    mask = np.arange(len(tokens) - 1) >= len(prompt) + 1
    return Batch(tokens[:-1], tokens[1:], mask)


def padded_lengths(max_length: int) -> list[int]:
    """The lengths to pad to: few, because every one is compiled for."""
    return sorted({-(-max_length // 4), -(-max_length // 2), max_length})


def pad(
    sequences: Sequence[Batch], lengths: list[int], rows: int | None = None
) -> Batch:
    """Stacks sequences, padded to the first of `lengths` that holds the longest.

    Args:
      sequences: encoded pairs.
      lengths: the lengths that there are, ascending.
      rows: how many rows to make; those without a sequence are masked. By
        default as many as there are sequences.

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
    """Adds rows without tokens, until there are equally many for each device."""
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
      updates: how many windows.
      accumulation_steps: micro-batches in a window.
      micro_batch_size: rows in a micro-batch.
      lengths: the lengths to pad to.
      seed: of the shuffle.

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
    """What `plan_window` is told, for the whole run: so its shapes are few.

    No micro-batch is larger than the largest of fixed rows, and needs more memory.
    """
    lengths = [len(sequence.inputs) for w in windows for sequence in w.sequences]
    return {
        "max_tokens": largest_micro_batch(windows).inputs.size,
        "length_buckets": choose_length_buckets(lengths, 6),
    }


def largest_micro_batch(windows: list[Window]) -> Batch:
    """The micro-batch with the most positions, padding included."""
    micro_batches = (batch for window in windows for batch in window.micro_batches)
    return max(micro_batches, key=lambda batch: batch.inputs.size)


def largest_window(windows: list[Window]) -> Window:
    """The window whose whole has the most positions, padding included."""
    return max(windows, key=lambda window: window.whole.inputs.size)


def batches_in_order(
    sequences: Sequence[Batch], rows: int, lengths: list[int]
) -> list[Batch]:
    """Batches that hold every sequence once, for evaluation; sorted to pad less."""
    by_length = sorted(sequences, key=lambda sequence: len(sequence.inputs))
    return [
        pad(by_length[start : start + rows], lengths, rows)
        for start in range(0, len(by_length), rows)
    ]
