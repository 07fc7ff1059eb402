"""Prompts and completions: the English dialogues of chatterbot-corpus, or a JSONL file.

A conversation of the corpus becomes one pair for each turn after the first: the first
turn is the prompt, and the later turn is the completion. The alternative, that each
turn answers the previous one, fits fewer turns: of the 225 turns in third place or
later, 184 are in the two files that list several answers to one question ("emotion" and
"computers").
"""

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

MAX_TURNS = 10
_LINES_NAMED = 10
_LIKE = 'each line must be like {"prompt": "...", "completion": "..."}'


class Pair(NamedTuple):
    """A prompt and the completion that should follow it."""

    prompt: str
    completion: str


class DataError(Exception):
    """The data cannot be used as it is; the message says what to do."""


def read_corpus() -> tuple[list[Pair], str]:
    """Reads the English files of the PyPI package chatterbot-corpus.

    Returns:
      The pairs, and a sentence about everything that was dropped or changed.

    Raises:
      DataError: the package is not installed.
    """
    try:
        import yaml

        data = resources.files("chatterbot_corpus") / "data" / "english"
    except ModuleNotFoundError as error:
        raise DataError(
            f"the default data needs {error.name!r}, which is not installed: run "
            "pip install chatterbot-corpus pyyaml, or name your own file with --data"
        ) from error
    conversations = []
    for file in sorted(data.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yml"):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            conversations += content["conversations"]
    return pairs_of_conversations(conversations)


def pairs_of_conversations(
    conversations: list[list[Any]],
) -> tuple[list[Pair], str]:
    """Makes pairs from conversations: the first turn with each later turn.

    Repeated conversations, conversations of one turn and conversations of more than
    `MAX_TURNS` turns are left out. A turn that YAML read as a number or a bool becomes
    text.

    Args:
      conversations: the turns of each conversation.

    Returns:
      The pairs, and a sentence about everything that was dropped or changed.
    """
    not_text = sum(
        not isinstance(turn, str) for turns in conversations for turn in turns
    )
    unique = list(dict.fromkeys(tuple(map(str, turns)) for turns in conversations))
    long = sum(len(turns) > MAX_TURNS for turns in unique)
    short = sum(len(turns) < 2 for turns in unique)
    pairs = [
        Pair(turns[0], completion)
        for turns in unique
        if len(turns) <= MAX_TURNS
        for completion in turns[1:]
    ]
    notes = (
        f"{len(conversations)} conversations: left out "
        f"{len(conversations) - len(unique)} repetitions, {long} of over {MAX_TURNS} "
        f"turns and {short} of one turn; {not_text} turns that YAML read as numbers or "
        "the like became text"
    )
    return pairs, notes


def read_jsonl(path: Path) -> list[Pair]:
    """Reads one JSON object per line, with the strings `prompt` and `completion`.

    Empty lines and other fields are ignored.

    Args:
      path: the file.

    Returns:
      The pairs, in the order of the file.

    Raises:
      DataError: the file cannot be read, is empty, or has bad lines; the message names
        their numbers.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    pairs, bad = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                pairs.append(_parse(line))
            except ValueError as error:
                bad.append(f"  line {number}: {error}")
    if bad:
        more = (
            [f"  and {len(bad) - _LINES_NAMED} more"] if len(bad) > _LINES_NAMED else []
        )
        raise DataError(
            f"{path}: {_LIKE}; fix or remove the {len(bad)} of {len(lines)} that are "
            "not:\n" + "\n".join(bad[:_LINES_NAMED] + more)
        )
    if not pairs:
        raise DataError(
            f"{path} is empty{' except for blank lines' * bool(lines)}: {_LIKE}"
        )
    return pairs


def split_by_prompt(
    pairs: list[Pair], validation_share: float = 0.1
) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs so that no prompt is on both sides, whatever their order.

    Prompts that differ only in case or white space count as equal.

    Args:
      pairs: all pairs.
      validation_share: the share of the prompts to hold out; at least one is.

    Returns:
      The training pairs and the validation pairs.

    Raises:
      DataError: there are fewer than two prompts.
    """

    def normal(pair: Pair) -> str:
        return " ".join(pair.prompt.casefold().split())

    # The order of the hashes depends only on the prompts, not on the order of the file
    # or on the version of a random generator.
    prompts = sorted(
        {normal(pair) for pair in pairs},
        key=lambda prompt: hashlib.sha256(prompt.encode()).digest(),
    )
    if len(prompts) < 2:
        raise DataError(
            f"training and validation need a prompt each, the data has {len(prompts)} "
            "that can be used"
        )
    held_out = set(prompts[: max(1, round(validation_share * len(prompts)))])
    train = [pair for pair in pairs if normal(pair) not in held_out]
    validation = [pair for pair in pairs if normal(pair) in held_out]
    return train, validation


def _parse(line: bytes) -> Pair:
    """Reads one line; raises a ValueError that says what is wrong."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        place = f"{error.msg}, column {error.colno}"
        raise ValueError(f"not JSON ({place})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}, byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("not JSON of this kind (nested too deeply)") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    for field in Pair._fields:
        text = record.get(field)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"{field!r} must be a text that is not empty, got {text!r}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{field!r} has half a surrogate pair, got {text!r}")
    return Pair(record["prompt"], record["completion"])
