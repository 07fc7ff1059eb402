"""The example: its data, its model, the comparison, and runs that are killed."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import data
import finetune
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from data import Pair


def ragged_sequences(number: int) -> list[data.Batch]:
    """Return encoded pairs with distinct completions of 1, 4, 7... bytes."""
    return [data.encode(Pair(f"prompt {i}", "x" * (1 + 3 * i))) for i in range(number)]


def rows_of(*batches: data.Batch) -> list[Any]:
    """Return the real tokens of every row, so that padding does not matter."""
    rows = [row[row != data.PAD].tolist() for batch in batches for row in batch.inputs]
    return sorted(row for row in rows if row)


def test_windows_cut_the_same_rows_in_two_ways_and_leave_none_out():
    sequences = ragged_sequences(12)
    windows = data.make_windows(sequences, (4, 3, 2), seed=0)
    for window in windows:
        assert rows_of(*window.micro_batches) == rows_of(*window.whole)
        [stacked] = window.stacked
        assert stacked.inputs.shape[:2] == (3, 2)
        for batch, inputs in zip(window.micro_batches, stacked.inputs, strict=True):
            assert rows_of(batch) == rows_of(data.Batch(inputs, inputs, inputs))
    everything = sorted(sequence.inputs.tolist() for sequence in sequences)
    first, second = windows[:2], windows[2:]
    for epoch in (first, second):
        assert rows_of(*(window.whole[0] for window in epoch)) == everything
    assert rows_of(*second[0].whole) != rows_of(*first[0].whole)


def test_a_split_is_judged_by_its_tokens_not_by_its_batches(monkeypatch: Any):
    def loss_fn(params: Any, batch: data.Batch) -> Any:
        losses = params * batch.inputs * batch.mask  # of a short row, another mean
        return losses.sum(), batch.mask.sum()

    monkeypatch.setattr(finetune, "loss_fn", loss_fn)
    sequences = ragged_sequences(40)
    cut = data.batches_in_order(sequences)
    assert len(cut) == 2
    sums = [loss_fn(2.0, batch) for batch in cut]
    exact = sum(x for x, _ in sums) / sum(row.mask.sum() for row in sequences)
    naive = np.mean([loss / n for loss, n in sums])
    assert finetune.mean_loss(2.0, cut) == pytest.approx(exact, rel=1e-5)
    assert abs(naive - exact) > 1e-4 * exact


def test_the_loss_of_a_window_weights_those_of_its_micro_batches():
    results = [(np.float32(2.0), 1), (np.float32(10.0), 9)]
    assert finetune.window_loss(results) == pytest.approx(9.2)  # the mean is 6


def start(*words: Any) -> subprocess.Popen:
    """Start the example; its programs are cached like those of the tests."""
    return subprocess.Popen(
        [sys.executable, finetune.__file__, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*words: Any) -> tuple[int, str]:
    """Run the example; return the exit status and what it printed."""
    with start(*words) as process:
        printed, _ = process.communicate(timeout=600)
    return process.returncode, printed


def resumable(directory: Path) -> tuple[Any, ...]:
    """Return the words of a run with 6 windows of 4, a checkpoint every 3."""
    window = "--gradient-accumulation-steps", 4, "--updates", 6
    return "--checkpoint-dir", directory, *window, "--save-every", 3


@pytest.mark.slow
def test_the_program_prints_a_table_and_draws_pictures(tmp_path: Path):
    words = "--gradient-accumulation-steps", 4, "--updates", 3, "--out", tmp_path
    start = time.monotonic()
    status, printed = run(*words)
    minutes = (time.monotonic() - start) / 60
    assert status == 0, printed
    cells = [line.split() for line in printed.splitlines()]
    rows = {row[0]: row[1:] for row in cells if len(row) == 4}
    assert rows["full-batch"][0] == "reference"
    [took] = re.findall(r"^took (.*) minutes$", printed, re.MULTILINE)
    assert 0 <= float(took) <= minutes + 0.05  # wall time
    assert float(rows["optax.MultiSteps"][0]) > 1e-4
    assert abs(float(rows["optax.MultiSteps"][2])) > 1e-5
    for way in ("MultiSteps", "make_train_step", "make_window_step"):
        assert float(rows[way][0]) < 1e-5, way
        assert abs(float(rows[way][2])) < 1e-5, way
    pictures = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert pictures.keys() == {"weights.png", "results.png"}
    for picture in pictures.values():
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def end_of(directory: Path) -> Any:
    """Return the state of the last checkpoint."""
    with ocp.CheckpointManager(directory) as manager:
        items = ocp.args.Composite(state=ocp.args.StandardRestore())
        return manager.restore(24, args=items)["state"]


def kill(directory: Path, after: int) -> int:
    """Kill a run as soon as that checkpoint is there; return the last checkpoint."""
    with start(*resumable(directory)) as process:
        deadline = time.monotonic() + 200
        while not (directory / str(after)).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return max(int(x.name) for x in directory.iterdir() if x.name.isdecimal())


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_never_had_been(tmp_path: Path):
    status, printed = run(*resumable(tmp_path / "uninterrupted"))
    assert status == 0, printed
    assert "starts after 0 of 24" in printed
    directory = tmp_path / "killed"
    done = kill(directory, 3)  # in the middle of a window
    status, printed = run(*resumable(directory))
    assert status == 0, printed
    place = f"gradient_step {done // 4}, mini_step {done % 4}"
    assert f"resumes after {done} of 24 micro-batches: {place}" in printed
    got, expected = end_of(directory), end_of(tmp_path / "uninterrupted")
    assert expected["opt_state"]["gradient_step"] == 6
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
