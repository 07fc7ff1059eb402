"""Pairs of prompt and completion as token arrays, and windows of micro-batches.

The pairs are the English dialogues of the package chatterbot-corpus. The first turn of
a conversation is the prompt, and each later turn is a completion. That each turn
answers the previous one fits less often: of the 225 turns in third place or later, 184
are in the two files that list several answers to one question.
"""

import hashlib
import math
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np
import yaml

PAD, BOS, SEP, EOS = 256, 257, 258, 259  # a byte is its own token
VOCABULARY = 260
MAX_TURNS = 10
MAX_LENGTH = 256
LENGTHS = 64, 128, MAX_LENGTH  # to pad to: few, because each one costs a compilation


class Pair(NamedTuple):
    """A prompt and the completion that should follow it."""

    prompt: str
    completion: str


class Batch(NamedTuple):
    """Arrays `[rows, length]`, or `[length]` for one encoded pair.

    Attributes:
      inputs: int32: BOS, prompt, SEP, completion, then PAD.
      labels: int32: the inputs one step ahead, with an EOS at the end.
      mask: bool: True where the label is in the completion or its EOS.
    """

    inputs: np.ndarray
    labels: np.ndarray
    mask: np.ndarray


# Where there is no token; the mask excludes it from the loss.
PADDING = Batch(np.array(PAD, np.int32), np.array(PAD, np.int32), np.array(False))


class Window(NamedTuple):
    """The rows behind one optimizer update, in `k` micro-batches and as one batch."""

    micro_batches: list[Batch]
    whole: list[Batch]

    @property
    def stacked(self) -> list[Batch]:
        """The micro-batches as arrays `[k, rows, length]`, padded to one length."""
        k, [whole] = len(self.micro_batches), self.whole
        return [Batch(*(part.reshape(k, -1, part.shape[-1]) for part in whole))]


def read_corpus() -> list[Pair]:
    """Reads the pairs, without repeated conversations and those of many turns."""
    data = resources.files("chatterbot_corpus") / "data" / "english"
    conversations: dict[tuple[str, ...], None] = {}
    for file in sorted(data.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yml"):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            # YAML reads some turns as numbers or bools.
            found = [tuple(map(str, x)) for x in content["conversations"]]
            conversations |= dict.fromkeys(found)
    return [
        Pair(turns[0], turn)
        for turns in conversations
        if len(turns) <= MAX_TURNS
        for turn in turns[1:]
    ]


def split_by_prompt(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Holds out a tenth of the prompts for validation, whatever the order of the pairs.

    No prompt is on both sides: those that differ only in case or white space are equal.
    """

    def normal(pair: Pair) -> str:
        return " ".join(pair.prompt.casefold().split())

    # Hashes depend neither on the order nor on the version of a random generator.
    prompts = sorted(
        {normal(pair) for pair in pairs},
        key=lambda prompt: hashlib.sha256(prompt.encode()).digest(),
    )
    held_out = set(prompts[: round(len(prompts) / 10)])
    validation = [pair for pair in pairs if normal(pair) in held_out]
    return [pair for pair in pairs if normal(pair) not in held_out], validation


def encode(pair: Pair) -> Batch:
    """Encodes one pair as arrays `[length]`; `length` is its bytes plus two."""
    prompt, completion = pair.prompt.encode(), pair.completion.encode()
    tokens = np.array([BOS, *prompt, SEP, *completion, EOS], np.int32)
    # At SEP, the label is the first byte of the completion.
    mask = np.arange(len(tokens) - 1) >= len(prompt) + 1
    return Batch(tokens[:-1], tokens[1:], mask)


def load() -> tuple[list[Batch], list[Batch]]:
    """The encoded pairs to train on and to validate with; long ones are left out."""
    pairs = [x for x in read_corpus() if len(encode(x).inputs) <= MAX_LENGTH]
    train, validation = split_by_prompt(pairs)
    return [*map(encode, train)], [*map(encode, validation)]


def pad(
    sequences: Sequence[Batch],
    lengths: Sequence[int] = LENGTHS,
    rows: int | None = None,
) -> Batch:
    """Stacks sequences, padded to the first of `lengths` that fits the longest.

    Rows beyond the sequences are masked; by default, there are none.
    """
    longest = max(len(sequence.inputs) for sequence in sequences)
    shape = rows or len(sequences), next(n for n in lengths if n >= longest)
    batch = Batch(*(np.full(shape, value) for value in PADDING))
    for row, sequence in enumerate(sequences):
        for padded, values in zip(batch, sequence, strict=True):
            padded[row, : len(values)] = values
    return batch


def make_windows(
    sequences: Sequence[Batch], shape: tuple[int, int, int], seed: int
) -> list[Window]:
    """Cuts a shuffled stream of sequences into windows, epoch after epoch.

    The shape is windows, micro-batches in each, and rows in each. A longer run begins
    with the windows of a shorter one.
    """
    shuffle, needed = np.random.default_rng(seed), math.prod(shape)
    epochs = -(-needed // len(sequences))
    order = np.concatenate([shuffle.permutation(len(sequences)) for _ in range(epochs)])
    windows = []
    for window in order[:needed].reshape(shape).tolist():
        micro_batches = [[sequences[i] for i in rows] for rows in window]
        whole = [sequence for rows in micro_batches for sequence in rows]
        windows.append(Window([*map(pad, micro_batches)], [pad(whole)]))
    return windows


def batches_in_order(sequences: Sequence[Batch]) -> list[Batch]:
    """Batches for evaluation: every sequence once, sorted by length to pad less."""
    rows = 32
    by_length = sorted(sequences, key=lambda sequence: len(sequence.inputs))
    return [
        pad(by_length[start : start + rows], rows=rows)
        for start in range(0, len(by_length), rows)
    ]
