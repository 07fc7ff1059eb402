"""Tests of `examples/finetune.py` and of the files beside it."""

import importlib
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

batches = importlib.import_module("batches")
compare = importlib.import_module("compare")
dialogue = importlib.import_module("dialogue")
finetune = importlib.import_module("finetune")
options = importlib.import_module("options")
transformer = importlib.import_module("transformer")

Pair = dialogue.Pair


def ragged_sequences(number):
    """Encoded pairs whose completions have 1, 4, 7... bytes, all of them different."""
    return [
        batches.encode(Pair(f"prompt {i}", "x" * (1 + 3 * i))) for i in range(number)
    ]


def rows_of(*parts):
    """The real tokens of every row, so that padding does not matter."""
    return sorted(
        tuple(row[row != batches.PAD].tolist()) for part in parts for row in part.inputs
    )


# Data: the corpus.


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


# Data: a file of the user's own.


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
    assert lengths == [4, 5, 6, 7, 8, 9]  # up to and with --max-length
    assert "8 pairs of prompt and completion: left out 2 of over 9 tokens" in (
        out.getvalue()
    )
    assert "the longest has 11" in out.getvalue()


# Batches.


@pytest.mark.parametrize(
    "pair",
    [Pair("What?", "That."), Pair("é", "naïve ✓"), Pair("long prompt", "y")],
    ids=["ascii", "utf8", "one byte"],
)
def test_the_loss_covers_the_completion_and_its_end(pair):
    inputs, labels, mask = batches.encode(pair)
    completion = [*pair.completion.encode(), batches.EOS]
    prompt = [*pair.prompt.encode(), batches.SEP]
    assert inputs.tolist() == [batches.BOS, *prompt, *completion[:-1]]
    assert labels[:-1].tolist() == inputs[1:].tolist()
    assert labels[mask].tolist() == completion
    assert labels[~mask].tolist() == prompt


def test_padding_takes_the_first_length_that_fits_and_bears_no_loss():
    sequences = ragged_sequences(4)
    lengths = [len(sequences[1].inputs), len(sequences[2].inputs), 99]
    assert batches.pad(sequences[:2], lengths).inputs.shape == (2, lengths[0])
    batch = batches.pad(sequences[1:3], lengths, rows=5)
    assert [part.shape for part in batch] == [(5, lengths[1])] * 3
    for row, sequence in enumerate(sequences[1:3]):
        n = len(sequence.inputs)
        for padded, values in zip(batch, sequence, strict=True):
            np.testing.assert_array_equal(padded[row, :n], values)
        assert (batch.inputs[row, n:] == batches.PAD).all()
        assert not batch.mask[row, n:].any()
    assert (batch.inputs[2:] == batches.PAD).all()
    assert not batch.mask[2:].any()


def test_windows_cut_the_same_rows_in_two_ways_and_leave_none_out():
    sequences = ragged_sequences(12)

    def make(seed):
        return batches.make_windows(
            sequences,
            updates=4,
            accumulation_steps=3,
            micro_batch_size=2,
            lengths=[30, 60],
            seed=seed,
        )

    windows = make(0)
    for window in windows:
        assert [len(batch.inputs) for batch in window.micro_batches] == [2, 2, 2]
        assert rows_of(*window.micro_batches) == rows_of(window.whole)
    everything = sorted(tuple(sequence.inputs.tolist()) for sequence in sequences)
    epochs = [windows[:2], windows[2:]]
    for epoch in epochs:
        assert rows_of(*(window.whole for window in epoch)) == everything
    assert rows_of(epochs[0][0].whole) != rows_of(epochs[1][0].whole)
    jax.tree.map(np.testing.assert_array_equal, windows, make(0))
    assert rows_of(make(1)[0].whole) != rows_of(windows[0].whole)


# Model.


@pytest.fixture(scope="module")
def params():
    return transformer.init(
        jax.random.key(0), vocabulary=batches.VOCABULARY, d_model=32, layers=2
    )


def test_a_later_token_does_not_change_earlier_logits(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % 256)
    before = transformer.forward(params, tokens)
    after = transformer.forward(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    difference = jnp.abs(before - after).max(axis=(0, 2))
    assert (difference[7:] > 1e-3).all(), "a token must reach itself and all after it"


def test_positions_matter():
    # One layer: the last position of a second one would see the order without them.
    params = transformer.init(jax.random.key(0), vocabulary=9, d_model=32, layers=1)
    tokens = jnp.array([[5, 6, 7, 8], [6, 5, 7, 8]])
    first, second = transformer.forward(params, tokens)[:, -1]
    assert jnp.abs(first - second).max() > 1e-4


def test_padding_changes_nothing_at_the_real_positions(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    padded = jnp.pad(tokens, ((0, 0), (0, 20)), constant_values=batches.PAD)
    np.testing.assert_allclose(
        transformer.forward(params, padded)[:, :12],
        transformer.forward(params, tokens),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_split_is_judged_by_its_tokens_not_by_its_batches(params):
    sequences = ragged_sequences(7)
    cut = batches.batches_in_order(sequences, rows=3, lengths=[20, 40])
    whole = batches.pad(sequences, [40])
    assert len(cut) == 3
    loss_fn = jax.jit(compare.loss_fn)
    sums = [loss_fn(params, batch) for batch in cut]
    loss_sum, num_tokens = loss_fn(params, whole)
    assert num_tokens == sum(int(sequence.mask.sum()) for sequence in sequences)
    exact = float(loss_sum / num_tokens)
    naive = float(np.mean([loss / n for loss, n in sums]))
    assert compare.mean_loss(params, cut) == pytest.approx(exact, rel=1e-5)
    assert abs(naive - exact) > 1e-3 * exact


# The command.


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--updates", "0", "must be a whole number >= 1, got '0'"),
        ("--micro-batch-size", "1.5", "must be a whole number >= 1, got '1.5'"),
        ("--gradient-accumulation-steps", "-2", ">= 1, got '-2'"),
        ("--learning-rate", "nan", "must be a number above 0, got 'nan'"),
        ("--learning-rate", "0", "must be a number above 0, got '0'"),
        ("--d-model", "48", "must be a multiple of 32 (the width of a head), got 48"),
        ("--seed", "-1", "must be a whole number >= 0, got '-1'"),
        ("--methods", "adam", "invalid choice: 'adam'"),
        ("--optimizer", "lion", "invalid choice: 'lion'"),
    ],
)
def test_bad_values_are_refused(capsys, flag, value, message):
    with pytest.raises(SystemExit) as error:
        options.parse_options([f"{flag}={value}"])
    assert error.value.code == 2
    complaint = " ".join(capsys.readouterr().err.split())
    assert f"argument {flag}: " in complaint
    assert message in complaint


def run_command(*words):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_bad_data_ends_the_command_without_a_traceback(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n')
    result = run_command("--data", file, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "line 1: 'completion' must be a text" in result.stderr
    assert "Traceback" not in result.stderr


def test_exact_methods_follow_the_full_batch_and_the_mean_of_means_does_not(tmp_path):
    result = run_command(
        *("--optimizer", "sgd", "--updates", 6, "--max-length", 96, "--d-model", 32),
        *("--layers", 1, "--gradient-accumulation-steps", 8, "--out", tmp_path / "out"),
    )
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {row.pop("method"): row for row in content["table"]}
    naive = rows["optax.MultiSteps"]["distance"]
    exact = {"MultiSteps", "token_accumulation", "make_train_step"}
    assert set(rows) == exact | {"full-batch", "optax.MultiSteps"}
    for method in exact:
        distance = rows[method]["distance"]
        assert distance < 1e-5, method
        assert naive > max(100 * distance, 1e-4), method
    for method, row in rows.items():
        curve = content["curves"][method]
        assert len(curve["distance"]) == 6
        assert curve["distance"][-1] == row["distance"]
        losses = [loss for _, loss in curve["validation_loss"]]
        assert losses[-1] == row["validation_loss"] < losses[0]
        assert row["tokens_per_second"] > 0
        assert all(size > 0 for size in row["memory_bytes"].values())
    assert set(rows["make_train_step"]["memory_bytes"]) == {
        "accumulate",
        "close_window",
    }
    assert content["settings"]["optimizer"] == "sgd"
    assert set(content["versions"]) == {"python", "jax", "optax"}
    for method in rows:
        assert method in result.stdout
    picture = (tmp_path / "out" / "finetune.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
