"""The example: its data, its model, the comparison, and runs that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import data
import finetune
import jax
import model
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from data import InputError, Pair
from helpers import RTOL, relative_error
from rich.console import Console

SMALL = ("--max-length", 64, "--d-model", 32, "--layers", 1)


def ragged_sequences(number: int) -> list[data.Batch]:
    """Return encoded pairs with distinct completions of 1, 4, 7... bytes."""
    return [data.encode(Pair(f"prompt {i}", "x" * (1 + 3 * i))) for i in range(number)]


def rows_of(*batches: data.Batch) -> list[Any]:
    """Return the real tokens of every row, so that padding does not matter."""
    rows = [row[row != data.PAD].tolist() for batch in batches for row in batch.inputs]
    return sorted(row for row in rows if row)


# Data.


def test_the_loss_covers_the_completion_and_its_end_and_no_padding():
    pair = Pair("é?", "naïve ✓")
    inputs, labels, mask = data.encode(pair)
    completion = [*pair.completion.encode(), data.EOS]
    prompt = [*pair.prompt.encode(), data.SEP]
    assert inputs.tolist() == [data.BOS, *prompt, *completion[:-1]]
    assert labels[:-1].tolist() == inputs[1:].tolist()
    assert labels[mask].tolist() == completion
    assert labels[~mask].tolist() == prompt
    sequences = ragged_sequences(4)[1:3]
    lengths = [len(sequences[0].inputs), len(sequences[1].inputs), 99]
    batch = data.pad(sequences, lengths, rows=5)
    assert [part.shape for part in batch] == [(5, lengths[1])] * 3
    assert rows_of(batch) == sorted(row.inputs.tolist() for row in sequences)
    assert batch.mask.sum() == sum(row.mask.sum() for row in sequences)


def windows_of(
    sequences: list[data.Batch], devices: int = 1, seed: int = 0
) -> list[data.Window]:
    return data.make_windows(sequences, (4, 3, 2), devices, [30, 60], seed)


def test_windows_cut_the_same_rows_in_two_ways_and_leave_none_out():
    sequences = ragged_sequences(12)
    windows = windows_of(sequences, devices=4)
    for window in windows:
        assert [len(batch.inputs) for batch in window.micro_batches] == [4, 4, 4]
        assert rows_of(*window.micro_batches) == rows_of(*window.whole)
        [stacked] = window.stacked
        assert stacked.inputs.shape[:2] == (3, 2)
        for batch, inputs in zip(window.micro_batches, stacked.inputs, strict=True):
            assert rows_of(batch) == rows_of(data.Batch(inputs, inputs, inputs))
    everything = sorted(sequence.inputs.tolist() for sequence in sequences)
    first, second = windows[:2], windows[2:]
    for epoch in (first, second):
        assert rows_of(*(window.whole[0] for window in epoch)) == everything
    other = windows_of(sequences, seed=1)
    for epoch in (second, other):
        assert rows_of(*epoch[0].whole) != rows_of(*first[0].whole)


def test_no_prompt_is_on_both_sides_of_the_split_whatever_the_order():
    prompts = [p for i in range(50) for p in (f"What is {i}?", f"what  is {i}? ")]
    pairs = [Pair(prompt, answer) for prompt in prompts for answer in ("this", "that")]
    train, validation = data.split_by_prompt(pairs)
    assert sorted(train + validation) == sorted(pairs)
    assert len(validation) == 4 * 5  # a tenth of the 50 prompts
    of_train, of_validation = (
        {pair.prompt.split()[2] for pair in side} for side in (train, validation)
    )
    assert not of_train & of_validation
    assert set(data.split_by_prompt(pairs[::-1])[1]) == set(validation)
    with pytest.raises(InputError, match="the data has 1 that"):
        data.split_by_prompt([Pair("a", "b"), Pair("A", "c")])


def test_jsonl_is_read_in_order_and_a_bad_line_is_named_by_its_number(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    good = (
        '{"prompt": "b", "completion": "é", "id": 7}\n\n'
        '{"completion": "two\\nlines", "prompt": "a"}\n'
        '{"prompt": "c", "completion": "d"}\n'
    ).encode()
    file.write_bytes(good)
    assert data.read_jsonl(file) == [("b", "é"), ("a", "two\nlines"), ("c", "d")]
    train, validation, notes = data.load(file, 5)
    assert sorted(len(row.inputs) for row in train + validation) == [4, 5]
    assert "3 pairs of prompt and completion: left out 1 of over 5 tokens" in notes
    for line in (
        b"{]",
        b'{"prompt": "\xff", "completion": "b"}',
        b'{"prompt": "a"}',
        b'{"prompt": "a", "completion": " "}',
        b'{"prompt": "\\ud800", "completion": "b"}',
    ):
        file.write_bytes(good + line)
        with pytest.raises(InputError, match='data.jsonl, line 5 must be like {"promp'):
            data.read_jsonl(file)


def test_a_split_is_judged_by_its_tokens_not_by_its_batches():
    key = jax.random.key(0)
    params = model.init(key, vocabulary=data.VOCABULARY, d_model=32, layers=2)
    sequences = ragged_sequences(40)
    cut = data.batches_in_order(sequences, [70, 140])
    assert len(cut) == 2
    loss_fn = jax.jit(model.loss_fn)
    sums = [loss_fn(params, batch, {}) for batch in cut]
    exact = float(sum(x for x, _ in sums) / sum(row.mask.sum() for row in sequences))
    naive = float(np.mean([loss / n for loss, n in sums]))
    assert finetune.mean_loss(params, {}, cut) == pytest.approx(exact, rel=1e-5)
    assert abs(naive - exact) > 1e-4 * exact


# The comparison.


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 2], ids=["full", "lora"])
def test_exact_ways_follow_the_full_batch_and_the_mean_of_means_does_not(
    lora_rank: int,
):
    words = [*SMALL, "--optimizer", "sgd", "--lora-rank", lora_rank]
    options = finetune.parse_options([*map(str, words)])
    options.gradient_accumulation_steps = 3
    trained, frozen = finetune.make_parameters(options)
    if lora_rank:
        assert optax.tree.size(frozen) > 4 * optax.tree.size(trained)
    else:
        assert frozen == {}
    sequences = ragged_sequences(12)
    windows = windows_of(sequences)
    held_out = data.batches_in_order(sequences, [60])
    runs = finetune.compare(options, windows, held_out, Console(quiet=True))
    reference, naive, *exact = runs
    assert [run.way for run in exact] == [
        "MultiSteps",
        "token_accumulation",
        "make_train_step",
        "make_window_step",
        "optax.microbatching",
    ]
    assert set(reference.distances) == {0}
    for run in exact:
        assert run.distances[-1] < 1e-5
        assert naive.distances[-1] > max(100 * run.distances[-1], 1e-4)
        far, farther = (abs(x.losses[-1] - reference.losses[-1]) for x in (run, naive))
        assert farther > 10 * far
    for run in runs:
        assert len(run.distances) == len(run.losses) == 4
        assert run.losses[-1] < run.losses[0]
        assert run.memory > 0


# The command.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--updates=0", "--updates must be a whole number >= 1, got 0"),
        ("--micro-batch-size=1.5", "invalid int value: '1.5'"),
        ("--learning-rate=nan", "--learning-rate must be above 0, got nan"),
        ("--d-model=48", "--d-model must be a multiple of 32 (the width of a head)"),
    ],
)
def test_bad_values_are_refused(capsys: Any, words: str, message: str):
    with pytest.raises(SystemExit) as error:
        finetune.parse_options([words])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


class Command:
    """The example in a process, on small data, with programs cached in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = (
            {
                "prompt": f"prompt {i}",
                "completion": "abcdefgh"[i % 8] * (1 + 7 * i % 29),
            }
            for i in range(40)
        )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "data.jsonl").write_text(text)

    def start(self, *words: Any, devices: int = 1) -> subprocess.Popen:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count="
        environment = os.environ | {
            "XLA_FLAGS": f"{flags}{devices}",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = sys.executable, finetune.__file__, *SMALL, *words
        return subprocess.Popen(
            [*map(str, command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: Any, **options: Any) -> tuple[int, str]:
        """Run to the end; return the exit status and what was printed."""
        with self.start(*words, **options) as process:
            printed, _ = process.communicate(timeout=300)
        return process.returncode, printed

    def resumable(self, directory: Path, *more: Any) -> tuple[Any, ...]:
        """Return the words of a run with 6 windows of 4, a checkpoint every 3."""
        data = "--data", self.folder / "data.jsonl", "--checkpoint-dir", directory
        window = "--gradient-accumulation-steps", 4, "--updates", 6
        return *data, *window, "--save-every", 3, "--lora-rank", 2, *more


@pytest.fixture(scope="module")
def command(tmp_path_factory: Any) -> Command:
    return Command(tmp_path_factory.mktemp("command"))


@pytest.mark.slow
def test_the_program_prints_a_table_and_draws_a_picture(
    command: Command, tmp_path: Path
):
    words = "--gradient-accumulation-steps", 4, "--updates", 3, "--out", tmp_path
    status, printed = command.run(*words)
    assert status == 0, printed
    assert "2026 conversations: left out 1127 repetitions" in printed
    cells = [line.split() for line in printed.splitlines()]
    rows = {row[0]: row[1:] for row in cells if len(row) == 4}
    assert rows["full-batch"][0] == "reference"
    assert float(rows["optax.MultiSteps"][0]) > 1e-4 > float(rows["MultiSteps"][0])
    assert [path.name for path in tmp_path.iterdir()] == ["finetune.png"]
    picture = (tmp_path / "finetune.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


# Runs that are killed.


def end_of(directory: Path, number: int = 24) -> Any:
    """Return the state and the losses of a checkpoint."""
    with ocp.CheckpointManager(directory) as manager:
        items = manager.restore(
            number,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(), position=ocp.args.JsonRestore()
            ),
        )
    return items["state"], items["position"]["losses"]


def kill(command: Command, directory: Path, after: int, **options: Any) -> int:
    """Kill a run as soon as that checkpoint is there; return the last checkpoint."""
    with command.start(*command.resumable(directory), **options) as process:
        deadline = time.monotonic() + 200
        while not (directory / str(after)).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return max(int(x.name) for x in directory.iterdir() if x.name.isdecimal())


@pytest.fixture(scope="module")
def uninterrupted(command: Command) -> Path:
    directory = command.folder / "uninterrupted"
    status, printed = command.run(*command.resumable(directory))
    assert status == 0, printed
    assert "starts after 0 of 24" in printed and "devices: 1" in printed
    state, losses = end_of(directory)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert state["opt_state"]["gradient_step"] == 6
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 1), (8, 1), (1, 4)])
def test_a_run_that_is_killed_ends_as_if_it_never_had_been_on_any_devices(
    command: Command, uninterrupted: Path, tmp_path: Path, before: int, after: int
):
    directory = tmp_path / "killed"
    for checkpoint in (3, 9):  # in the middle of a window
        done = kill(command, directory, checkpoint, devices=before)
    status, printed = command.run(*command.resumable(directory), devices=after)
    assert status == 0, printed
    place = f"gradient_step {done // 4}, mini_step {done % 4}"
    assert f"resumes after {done} of 24 micro-batches: {place}" in printed
    assert f"devices: {after}" in printed
    (got, losses), (expected, expected_losses) = map(end_of, (directory, uninterrupted))
    if before == after:
        assert losses == expected_losses
        for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    # AdamW amplifies the rounding of small gradients.
    assert relative_error(got["params"], expected["params"]) < 100 * RTOL["float32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--seed", 1), "must keep the settings that it started with: seed was 0"),
        (("--updates", 2), "has done 24 micro-batches, and --updates 2 asks for 8"),
        (("--data", "none.jsonl"), "none.jsonl"),
    ],
    ids=["settings", "updates", "data"],
)
def test_a_refusal_is_one_line_without_a_traceback(
    command: Command, uninterrupted: Path, more: Any, message: str
):
    status, printed = command.run(*command.resumable(uninterrupted, *more))
    assert status == 1 and message in printed
    assert "Traceback" not in printed and printed.count("error: ") == 1
