"""Pairs of prompt and completion as token arrays, and windows of micro-batches.

By default, the pairs are the English dialogues of the package chatterbot-corpus. The
first turn of a conversation is the prompt, and each later turn is a completion. That
each turn answers the previous one fits less often: of the 225 turns in third place or
later, 184 are in the two files that list several answers to one question.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAD, BOS, SEP, EOS = 256, 257, 258, 259  # a byte is its own token
VOCABULARY = 260
MAX_TURNS = 10


class Pair(NamedTuple):
    """A prompt and the completion that should follow it."""

    prompt: str
    completion: str


class InputError(Exception):
    """The data or a directory cannot be used; the message says what to do."""


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


# Fills positions without a token; the mask excludes them from the loss.
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


def read_corpus() -> tuple[list[Pair], str]:
    """Reads the pairs of chatterbot-corpus, and says in words what was left out."""
    try:
        import yaml

        data = resources.files("chatterbot_corpus") / "data" / "english"
    except ModuleNotFoundError as error:
        raise InputError(
            f"the default data needs {error.name!r}, which is not installed: run "
            "pip install chatterbot-corpus pyyaml, or name your own file with --data"
        ) from error
    conversations = []
    for file in sorted(data.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yml"):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            # YAML reads some turns as numbers or bools.
            conversations += [tuple(map(str, x)) for x in content["conversations"]]
    unique = list(dict.fromkeys(conversations))
    kept = [turns for turns in unique if 2 <= len(turns) <= MAX_TURNS]
    repeated, unfit = len(conversations) - len(unique), len(unique) - len(kept)
    notes = (
        f"{len(conversations)} conversations: left out {repeated} repetitions, and "
        f"{unfit} of one turn or of over {MAX_TURNS}"
    )
    return [Pair(turns[0], turn) for turns in kept for turn in turns[1:]], notes


def read_jsonl(path: Path) -> list[Pair]:
    """Reads one JSON object per line, with the strings `prompt` and `completion`.

    Empty lines and other fields are ignored.

    Raises:
      InputError: the file is empty, or has a bad line; the message names its number.
    """
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            pair = Pair(record["prompt"], record["completion"])
            # Half a surrogate pair is JSON, and raises an error here.
            if not all(text.strip().encode() for text in pair):
                raise ValueError("a text is empty")
        except (
            AttributeError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise InputError(
                f'{path}, line {number} must be like {{"prompt": "...", "completion": '
                f'"..."}}, with texts that are not empty: {error!r}'
            ) from error
        pairs.append(pair)
    if not pairs:
        raise InputError(f"{path} must have a line or more, and has none")
    return pairs


def split_by_prompt(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Holds out a tenth of the prompts for validation, whatever the order of the pairs.

    No prompt is on both sides: those that differ only in case or white space are equal.

    Raises:
      InputError: there are fewer than two prompts.
    """

    def normal(pair: Pair) -> str:
        return " ".join(pair.prompt.casefold().split())

    # Hashes depend neither on the order nor on the version of a random generator.
    prompts = sorted(
        {normal(pair) for pair in pairs},
        key=lambda prompt: hashlib.sha256(prompt.encode()).digest(),
    )
    if len(prompts) < 2:
        raise InputError(
            "training and validation need a prompt each, and the data has "
            f"{len(prompts)} that are not over --max-length"
        )
    held_out = set(prompts[: max(1, round(len(prompts) / 10))])
    validation = [pair for pair in pairs if normal(pair) in held_out]
    return [pair for pair in pairs if normal(pair) not in held_out], validation


def encode(pair: Pair) -> Batch:
    """Encodes one pair as arrays `[length]`; `length` is its bytes plus two."""
    prompt, completion = pair.prompt.encode(), pair.completion.encode()
    tokens = np.array([BOS, *prompt, SEP, *completion, EOS], np.int32)
    # At SEP, the label is the first byte of the completion.
    mask = np.arange(len(tokens) - 1) >= len(prompt) + 1
    return Batch(tokens[:-1], tokens[1:], mask)


def load(data: Path | None, max_length: int) -> tuple[list[Batch], list[Batch], str]:
    """Reads, splits and encodes a JSONL file, or the dialogue corpus if None.

    Returns:
      The training pairs, the validation pairs, and what was left out, in words.

    Raises:
      InputError: the data cannot be used as it is.
    """
    pairs, notes = read_corpus() if data is None else (read_jsonl(data), f"{data}")
    kept = [pair for pair in pairs if len(encode(pair).inputs) <= max_length]
    train, validation = split_by_prompt(kept)
    notes += (
        f"\n{len(pairs)} pairs of prompt and completion: left out "
        f"{len(pairs) - len(kept)} of over {max_length} tokens (--max-length)\n"
        f"{len(train)} pairs to train on and {len(validation)} to validate with"
    )
    return [*map(encode, train)], [*map(encode, validation)], notes


def padded_lengths(max_length: int) -> list[int]:
    """The lengths to pad to: few, because each one costs a compilation."""
    return sorted({-(-max_length // 4), -(-max_length // 2), max_length})


def pad(
    sequences: Sequence[Batch], lengths: list[int], rows: int | None = None
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
    sequences: Sequence[Batch],
    shape: tuple[int, int, int],
    devices: int,
    lengths: list[int],
    seed: int,
) -> list[Window]:
    """Cuts a shuffled stream of sequences into windows, epoch after epoch.

    The shape is windows, micro-batches in each, and rows in each. A longer run begins
    with the windows of a shorter one. Micro-batches are filled up with masked rows
    until the devices can share them.
    """
    shuffle, needed = np.random.default_rng(seed), math.prod(shape)
    epochs = -(-needed // len(sequences))
    order = np.concatenate([shuffle.permutation(len(sequences)) for _ in range(epochs)])
    all_rows = -(-shape[-1] // devices) * devices
    windows = []
    for window in order[:needed].reshape(shape).tolist():
        micro_batches = [[sequences[i] for i in rows] for rows in window]
        whole = [sequence for rows in micro_batches for sequence in rows]
        padded = [pad(rows, lengths, all_rows) for rows in micro_batches]
        windows.append(Window(padded, [pad(whole, lengths)]))
    return windows


def fingerprint(batches: Sequence[Batch]) -> str:
    """The SHA-256 of the values."""
    values = (part.tobytes() for batch in batches for part in batch)
    return hashlib.sha256(b"".join(values)).hexdigest()


def batches_in_order(sequences: Sequence[Batch], lengths: list[int]) -> list[Batch]:
    """Batches for evaluation: every sequence once, sorted by length to pad less."""
    rows = 32
    by_length = sorted(sequences, key=lambda sequence: len(sequence.inputs))
    return [
        pad(by_length[start : start + rows], lengths, rows)
        for start in range(0, len(by_length), rows)
    ]
