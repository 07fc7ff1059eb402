"""Tests of `finetune.py` on two processes of four devices each."""

import contextlib
import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import batches
import chex
import finetune
import jax
import methods
import numpy as np
import optax
import options
import orbax.checkpoint as ocp
import pytest
from directories import checkpoints, cut_to_half, largest_file, snapshot
from helpers import RTOL, relative_error
from rich.console import Console
from small_finetuning import K, new_command

pytestmark = pytest.mark.slow

ROWS, UPDATES = 6, 6
MICRO_BATCHES = K * UPDATES
STOPPED = 10  # a checkpoint in the middle of a window
ALONE = (((), {}),)  # a process without extra words or variables
# Gloo's threads write at the same time, and cut each other's lines in two.
OF_GLOO = re.compile(r"\[Gloo\]|peer ranks|^\s*\d*\s*$")


@contextlib.contextmanager
def start(command, directory, processes, devices):
    """Start processes with their own words and variables; kill them at the end."""
    started = []
    try:
        for number, (words, variables) in enumerate(processes):
            log = log_of(directory, number)
            own = {"devices": devices, "variables": variables}
            started.append(command.start(log, directory, *words, **own))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(command, directory, processes=ALONE, devices=4):
    """Run to the end; return the exit statuses and each process's output."""
    with start(command, directory, processes, devices) as started:
        statuses = [process.wait(timeout=150) for process in started]
    return statuses, [output_of(directory, number) for number in range(len(started))]


def log_of(directory, number):
    return directory.with_name(f"{directory.name}.{number}.log")


def output_of(directory, number):
    """Return the output without the messages of gloo, which connects CPUs."""
    lines = log_of(directory, number).read_text().splitlines()
    return " ".join(line.strip() for line in lines if not OF_GLOO.search(line))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def two_by_hand():
    where = "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2
    return [((*where, "--process-id", i), {}) for i in range(2)]


def two_on_slurm():
    job = {
        "JAX_COORDINATOR_PORT": str(free_port()),
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
    }
    numbers = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    return [(["--distributed"], job | each) for each in numbers]


def state_of(directory, number=MICRO_BATCHES):
    """Return the arrays of a checkpoint, as they were saved."""
    path, reader = directory / str(number) / "state", ocp.PyTreeCheckpointer()
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    tree = reader.metadata(path).item_metadata.tree
    return reader.restore(path, restore_args=jax.tree.map(lambda _: as_numpy, tree))


def lines_of(directory):
    return [*map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]


def assert_alike(directory, expected):
    """Compare the end of a run with one on other devices, up to rounding."""
    got, want = (state_of(path)["params"] for path in (directory, expected))
    assert relative_error(got, want) < RTOL["float32"]
    for line, like in zip(lines_of(directory), lines_of(expected), strict=True):
        assert line.keys() == like.keys()
        for name in line.keys() - {"loss", "grad_norm"}:
            assert line[name] == like[name], name
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(like[name], rel=1e-5)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    return new_command(folder, "--updates", UPDATES, "--micro-batch-size", ROWS)


@pytest.fixture(scope="module")
def uninterrupted(command):
    """Return the directory of a run on two processes."""
    directory = command.folder / "uninterrupted"
    statuses, (first, second) = run(command, directory, two_by_hand())
    assert statuses == [0, 0], (first, second)
    assert "starts after 0 of" in first and "devices: 8, processes: 2" in first
    assert f"done: gradient_step {UPDATES}" in first
    assert not second
    assert checkpoints(directory) == [15, 20, 24]
    embedding = state_of(directory)["opt_state"]["acc_grads"]["embedding"]
    assert embedding.shape == (8, batches.VOCABULARY, 32)
    return directory


@pytest.fixture(scope="module")
def on_one_device(command):
    directory = command.folder / "on_one_device"
    (status,), (printed,) = run(command, directory, devices=1)
    assert status == 0, printed
    assert "devices: 1, processes: 1" in printed
    return directory


def test_two_processes_give_the_answer_of_one_device(
    command, uninterrupted, on_one_device
):
    assert_alike(uninterrupted, on_one_device)


def test_the_mean_over_devices_of_their_means_is_another_answer(command, on_one_device):
    chosen = options.parse_options(command.words(on_one_device))
    train, _ = finetune.load(chosen.data, chosen.max_length, Console(quiet=True))
    windows = batches.make_windows(
        train,
        updates=UPDATES,
        # On six devices, each had one row of each micro-batch.
        accumulation_steps=K * ROWS,
        micro_batch_size=1,
        lengths=[chosen.max_length],
        seed=chosen.seed,
    )
    params, frozen = finetune.make_parameters(chosen)
    inner = optax.adamw(chosen.learning_rate)
    loop = methods.optax_multi_steps(params, frozen, windows, inner, K * ROWS)
    *_, naive = loop
    exact = state_of(on_one_device)["params"]
    assert relative_error(naive, exact) > 1000 * RTOL["float32"]


@pytest.fixture(scope="module")
def killed(command):
    """Return the directory of a run that ended because one process was killed."""
    directory = command.folder / "killed"
    with start(command, directory, two_by_hand(), devices=4) as (first, second):
        deadline = time.monotonic() + 150
        while STOPPED not in checkpoints(directory):
            assert first.poll() is None, output_of(directory, 0)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        second.kill()
        assert first.wait(timeout=100) != 0
    printed = output_of(directory, 0)
    assert "done: gradient_step" not in printed  # a traceback may quote the source
    assert "The tasks have crashed" in printed or "Connection closed by" in printed
    for number in checkpoints(directory):
        if number > STOPPED:
            shutil.rmtree(directory / str(number))
    return directory


def test_ctrl_c_ends_every_process_with_one_line(command, tmp_path):
    directory = tmp_path / "ended"
    with start(command, directory, two_by_hand(), devices=4) as started:
        deadline = time.monotonic() + 150
        while STOPPED not in checkpoints(directory):
            assert started[0].poll() is None, output_of(directory, 0)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        for process in started:
            process.send_signal(signal.SIGINT)
        assert [process.wait(timeout=60) for process in started] == [130, 130]
    printed = [output_of(directory, number) for number in range(2)]
    line = "interrupted: the same command resumes from checkpoint {} in {}"
    for text in printed:
        assert text.count("interrupted") == 1 and "Traceback" not in text
        last = text.partition("from checkpoint ")[2].partition(" ")[0]
        assert int(last) in checkpoints(directory) and int(last) >= STOPPED
        assert line.format(last, directory) in text
    assert "update 2 of" in printed[0] and "update" not in printed[1]


def test_after_a_kill_the_same_devices_resume_bit_for_bit(
    command, uninterrupted, killed, tmp_path
):
    directory = Path(shutil.copytree(killed, tmp_path / "again"))
    statuses, (first, second) = run(command, directory, two_on_slurm())
    assert statuses == [0, 0], (first, second)
    assert f"resumes after {STOPPED} of" in first and "mini_step 2;" in first
    assert "devices: 8, processes: 2" in first
    chex.assert_trees_all_equal(state_of(directory), state_of(uninterrupted))
    metrics = (directory / "metrics.jsonl").read_bytes()
    assert metrics == (uninterrupted / "metrics.jsonl").read_bytes()


def test_after_a_kill_fewer_devices_resume_in_the_middle_of_the_window(
    command, on_one_device, killed, tmp_path
):
    directory = Path(shutil.copytree(killed, tmp_path / "fewer"))
    (status,), (printed,) = run(command, directory)
    assert status == 0, printed
    assert f"resumes after {STOPPED} of" in printed and "mini_step 2;" in printed
    assert "devices: 4, processes: 1" in printed
    embedding = state_of(directory)["opt_state"]["acc_grads"]["embedding"]
    assert embedding.shape == (4, batches.VOCABULARY, 32)
    assert_alike(directory, on_one_device)


def test_what_one_process_refuses_ends_both(command, killed, tmp_path):
    directory = Path(shutil.copytree(killed, tmp_path / "damaged"))
    cut_to_half(largest_file(directory / str(STOPPED)))
    before = snapshot(directory)
    statuses, printed = run(command, directory, two_by_hand())
    assert statuses == [1, 1]
    for text in printed:
        assert f"checkpoint {directory}/{STOPPED} is damaged" in text
        assert text.count("error: ") == 1 and "Traceback" not in text
    assert snapshot(directory) == before


DIFFERENT = {
    "seed": (["--seed", 1], "seed is 0 on process 0 and 1 on process 1"),
    "updates": (
        ["--updates", 2],
        f"micro-batches is {MICRO_BATCHES} on process 0 and 8 on process 1",
    ),
    "no data": (
        ["--data", "missing"],
        "cannot read missing: No such file or directory",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_processes_that_were_given_different_things_do_not_begin(
    command, tmp_path, case
):
    more, message = DIFFERENT[case]
    first, (words, variables) = two_by_hand()
    directory = tmp_path / "different"
    statuses, printed = run(command, directory, [first, ([*words, *more], variables)])
    assert statuses == [1, 1]
    for text in printed:
        assert message in text
        assert text.count("error: ") == 1 and "Traceback" not in text
    assert not directory.exists()
