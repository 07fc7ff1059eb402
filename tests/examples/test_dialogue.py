"""The data of the example: the corpus, a user's own file, and what is left out."""

import io
import json
import random
import re

import dialogue
import finetune
import pytest
from dialogue import Pair


def test_conversations_become_pairs_and_what_is_left_out_is_counted():
    pairs, notes = dialogue.pairs_of_conversations(
        [
            ["hi", "hello", "good day"],
            ["hi", "hello", "good day"],
            ["how many?", 3, True],
            ["alone"],
            [str(turn) for turn in range(10)],
            [str(turn) for turn in range(11)],
        ]
    )
    assert pairs == [
        ("hi", "hello"),
        ("hi", "good day"),
        ("how many?", "3"),
        ("how many?", "True"),
        *[("0", str(turn)) for turn in range(1, 10)],
    ]
    assert notes == (
        "6 conversations: left out 1 repetitions, 1 of over 10 turns and 1 of one "
        "turn; 2 turns that YAML read as numbers or the like became text"
    )


def test_the_corpus_has_its_repetitions_removed():
    pairs, notes = dialogue.read_corpus()
    assert len(set(pairs)) == len(pairs) > 1000
    assert [pair.prompt for pair in pairs].count("My system is overheating.") == 1
    found = re.search(r"left out (\d+) repetitions", notes)
    assert found and int(found[1]) > 1000


def test_no_prompt_is_on_both_sides_of_the_split():
    pairs = [
        Pair(prompt, completion)
        for i in range(50)
        for prompt in (f"What is {i}?", f"what  is {i}? ")
        for completion in ("this", "that")
    ]
    train, validation = dialogue.split_by_prompt(pairs)
    assert sorted(train + validation) == sorted(pairs)
    assert len(validation) == 4 * 5  # a tenth of the 50 prompts
    train_prompts = {pair.prompt.casefold().split()[2] for pair in train}
    assert not train_prompts & {
        pair.prompt.casefold().split()[2] for pair in validation
    }


def test_the_split_does_not_depend_on_the_order():
    pairs = [Pair(f"prompt {i}", "answer") for i in range(50)]
    shuffled = random.Random(0).sample(pairs, len(pairs))
    assert shuffled != pairs
    validation = dialogue.split_by_prompt(pairs)[1]
    assert set(dialogue.split_by_prompt(shuffled)[1]) == set(validation)


def test_a_split_needs_two_prompts():
    with pytest.raises(dialogue.DataError, match="the data has 1 that"):
        dialogue.split_by_prompt([Pair("a", "b"), Pair("A", "c")])


def test_jsonl_is_read_in_order_whatever_else_it_holds(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"prompt": "b", "completion": "é", "id": 7}\n\n'
        '{"completion": "two\\nlines", "prompt": "a"}\n',
        encoding="utf-8",
    )
    assert dialogue.read_jsonl(file) == [("b", "é"), ("a", "two\nlines")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{]", "not JSON (Expecting property name"),
        (b'{"prompt": "\xff", "completion": "b"}', "not UTF-8 (invalid start byte"),
        (b'["a", "b"]', "a JSON list, not an object"),
        (b'{"prompt": "a"}', "'completion' must be a text"),
        (b'{"prompt": 3, "completion": "b"}', "'prompt' must be a text"),
        (b'{"prompt": "a", "completion": " "}', "'completion' must be a text"),
        (
            b'{"prompt": "\\ud800", "completion": "b"}',
            "'prompt' has half a surrogate pair",
        ),
    ],
    ids=["json", "utf8", "list", "missing", "number", "blank", "surrogate"],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, reason):
    file = tmp_path / "data.jsonl"
    good = b'{"prompt": "a", "completion": "b"}\n'
    file.write_bytes(good + b"\n" + line + b"\n" + good)
    with pytest.raises(dialogue.DataError, match="1 of 4 that are not") as error:
        dialogue.read_jsonl(file)
    assert f"\n  line 3: {reason}" in str(error.value)
    assert "line 1" not in str(error.value)


def test_json_nested_too_deeply_is_a_bad_line(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": ' + "[" * 100_000 + "\n")
    with pytest.raises(dialogue.DataError, match="line 1: not JSON"):
        dialogue.read_jsonl(file)


@pytest.mark.parametrize("content", ["", "\n  \n\t\n"], ids=["nothing", "blank lines"])
def test_an_empty_file_is_said_to_be_empty(tmp_path, content):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(dialogue.DataError) as error:
        dialogue.read_jsonl(file)
    assert str(error.value).startswith(f"{file} is empty")
    assert '{"prompt": "...", "completion": "..."}' in str(error.value)


def test_many_bad_lines_are_counted(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("{}\n" * 25)
    with pytest.raises(dialogue.DataError, match="25 of 25") as error:
        dialogue.read_jsonl(file)
    assert "line 10:" in str(error.value)
    assert "line 11:" not in str(error.value)
    assert "and 15 more" in str(error.value)


def test_what_is_too_long_is_left_out_and_counted(tmp_path):
    file = tmp_path / "data.jsonl"
    texts = [f"{i}{'x' * i}" for i in range(8)]  # 1 to 8 bytes
    file.write_text(
        "".join(
            json.dumps({"prompt": text, "completion": "y"}) + "\n" for text in texts
        )
    )
    out = io.StringIO()
    console = finetune.Console(file=out, width=200)
    train, validation = finetune.load(file, 9, console)
    lengths = sorted(len(sequence.inputs) for sequence in train + validation)
    assert lengths == [4, 5, 6, 7, 8, 9]  # up to and including --max-length
    assert "8 pairs of prompt and completion: left out 2 of over 9 tokens" in (
        out.getvalue()
    )
    assert "the longest has 11" in out.getvalue()
    with pytest.raises(dialogue.DataError, match="all 8 .* shortest has 4 tokens"):
        finetune.load(file, 3, console)
