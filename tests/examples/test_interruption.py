"""Tests of `finetune.py --checkpoint-dir`: killed runs, and what is refused.

`KILLS=50 pytest -m slow tests/examples/test_interruption.py -rP` kills fifty times and
prints where.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import batches
import chex
import finetune
import jax
import jax.numpy as jnp
import numpy as np
import options
import processes
import pytest
import resumable
from checksum import checksum
from directories import (
    checkpoints,
    cut_to_half,
    largest_file,
    snapshot,
    unfinished_saves,
)
from helpers import relative_error
from jax.sharding import Mesh
from rich.console import Console
from small_finetuning import SAVE_EVERY, K, new_command

from optax_tokenaccum import StepState

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "5"))
UPDATES = 4 * KILLS + 8
MICRO_BATCHES = K * UPDATES


def run(command, directory, *more):
    """Run to the end; return the exit status and everything printed."""
    log = directory.with_suffix(".log")
    process = command.start(log, directory, *more, cached=True)
    return process.wait(timeout=300), log.read_text()


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    return new_command(tmp_path_factory.mktemp("command"), "--updates", UPDATES)


@pytest.fixture(scope="module")
def uninterrupted(command):
    """Return the directory of a run that nothing interrupted."""
    directory = command.folder / "uninterrupted"
    status, printed = run(command, directory)
    assert status == 0, printed
    assert len(checkpoints(directory)) == resumable.KEPT
    assert checkpoints(directory)[-1] == MICRO_BATCHES
    lines = [*map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]
    assert [line["micro_batch"] for line in lines] == [*range(1, MICRO_BATCHES + 1)]
    assert sum(line["updated"] for line in lines) == UPDATES
    assert len({line["batch_sha256"] for line in lines}) > MICRO_BATCHES // 2
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    return directory


@pytest.fixture
def copy(uninterrupted, tmp_path):
    """Return a copy of that directory, for a test to damage."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "copy"))


class Setting(NamedTuple):
    """What `resume` receives for a run of the command."""

    settings: dict
    step: object
    params: object


def setting_of(command, directory):
    chosen = options.parse_options(command.words(directory))
    settings = json.loads((directory / "settings.json").read_text())
    assert settings["seed"] == chosen.seed == 0
    params, _ = finetune.make_parameters(chosen)
    mesh = Mesh(jax.devices()[:1], (processes.DATA,))
    return Setting(settings, finetune.make_step(chosen, mesh), params)


def assert_same_end(command, directory, expected):
    setting = setting_of(command, expected)
    got, want = (resumable.resume(path, *setting) for path in (directory, expected))
    assert got.micro_batches == want.micro_batches == MICRO_BATCHES
    assert want.state.opt_state.gradient_step == UPDATES
    chex.assert_trees_all_equal(got.state, want.state)
    # To the last bit: comparing numbers would accept -0.0 for 0.0.
    assert checksum(got.state) == checksum(want.state)
    metrics = (directory / "metrics.jsonl").read_bytes()
    assert metrics == (expected / "metrics.jsonl").read_bytes()


def number_of_lines(directory):
    metrics = directory / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def where_it_begins(printed):
    """Return the printed micro-batches done, `gradient_step` and `mini_step`."""
    place = re.search(
        r"after (\d+) of \d+ micro-batches: gradient_step (\d+), mini_step (\d+)",
        printed,
    )
    return place and tuple(map(int, place.groups()))


def kill(command, directory, log, *more, after, in_a_save, delay, cached):
    """Kill the command: during a save, or some time after its checkpoint `after`.

    Returns:
      Where the process began, and whether it left an unfinished save.
    """
    before = unfinished_saves(directory)

    def is_due():
        saves = unfinished_saves(directory) - before
        complete = checkpoints(directory)
        begun = [int(name.partition(".")[0]) for name, _ in saves]
        # A checkpoint's metric lines are on disk before the checkpoint.
        assert number_of_lines(directory) >= max([0, *complete, *begun])
        if max(complete, default=0) < after or not where_it_begins(log.read_text()):
            return False
        return not in_a_save or saves

    process = command.start(log, directory, *more, cached=cached)
    try:
        deadline = time.monotonic() + 300
        while not is_due():
            assert process.poll() is None and time.monotonic() < deadline, (
                f"{process.returncode}: {log.read_text()}"
            )
            time.sleep(0.002)
        if not in_a_save:
            time.sleep(delay)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL, log.read_text()
    return where_it_begins(log.read_text()), bool(unfinished_saves(directory) - before)


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_had_been(
    command, uninterrupted, tmp_path
):
    directory, log = tmp_path / "killed", tmp_path / "log"
    random = np.random.default_rng(KILLS)
    done, kills, in_a_window, in_a_save = 0, 0, 0, 0
    while kills < KILLS or not (in_a_window and in_a_save):
        assert kills < 3 * KILLS, "no kill in the middle of a window, or none of a save"
        began, left_a_save = kill(
            command,
            directory,
            log,
            # Metrics do not depend on it, and kills also hit long gaps between saves.
            *("--save-every", random.choice([1, 3, 5, 14])),
            # The kills are spread over the run.
            after=min(kills, KILLS - 1) * (MICRO_BATCHES // (KILLS + 1)),
            in_a_save=kills % 2 == 0,
            delay=random.uniform(0, 0.2),
            # The first process compiles, and the others find the programs in the cache.
            cached=kills > 0,
        )
        assert began == (done, *divmod(done, K))
        done = max(checkpoints(directory), default=0)
        assert number_of_lines(directory) >= done
        kills += 1
        in_a_window += done % K > 0
        in_a_save += left_a_save
    status, printed = run(command, directory)
    assert status == 0, printed
    assert where_it_begins(printed) == (done, *divmod(done, K))
    print(
        f"{kills} kills: after {in_a_window} the run resumed in the middle of a "
        f"window, {in_a_save} left an unfinished save"
    )
    assert not unfinished_saves(directory)
    assert_same_end(command, directory, uninterrupted)


def interrupt(process, log, is_due):
    """Send SIGINT once `is_due`, and return what was printed."""
    deadline = time.monotonic() + 300
    while not is_due(log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, log.read_text()
    printed = log.read_text()
    assert "Traceback" not in printed and "Exception ignored" not in printed
    assert printed.count("interrupted") == 1
    return printed.splitlines()[-1]


def test_ctrl_c_ends_the_run_with_one_line_and_loses_no_checkpoint(
    command, uninterrupted, tmp_path
):
    directory, log = tmp_path / "run", tmp_path / "log"
    moments = {
        "compiling": lambda printed: "compiling 1/" in printed,
        "in a save": lambda printed: unfinished_saves(directory),
        "between saves": lambda printed: max(checkpoints(directory), default=0) > done,
    }
    for moment, is_due in moments.items():
        done = max(checkpoints(directory), default=0)
        process = command.start(log, directory, cached=moment != "compiling")
        line = interrupt(process, log, is_due)
        assert where_it_begins(log.read_text()) == (done, *divmod(done, K)), moment
        assert line == (
            f"interrupted: the same command resumes from checkpoint {last} in "
            f"{directory}"
            if (last := max(checkpoints(directory), default=0))
            else "interrupted before the first checkpoint: the same command starts "
            "from the beginning"
        ), moment
        assert number_of_lines(directory) >= last, moment
    assert last
    status, printed = run(command, directory)
    assert status == 0, printed
    assert where_it_begins(printed) == (last, *divmod(last, K))
    assert_same_end(command, directory, uninterrupted)


def test_ctrl_c_in_a_terminal_shows_the_cursor_that_the_bar_hides(command, tmp_path):
    terminal, end = os.openpty()
    words = [sys.executable, finetune.__file__, *command.words(tmp_path / "run")]
    printed = b""
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        process = subprocess.Popen(words, stdin=end, stdout=end, stderr=end)
        os.close(end)
        with contextlib.suppress(OSError):  # how Linux ends a terminal
            while text := screen.read(4096):
                printed += text
                if b"compiling 1/" in printed:
                    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    hidden, shown = b"\x1b[?25l", b"\x1b[?25h"
    assert printed.rfind(shown) > printed.rfind(hidden) > 0
    assert printed.endswith(b"the same command starts from the beginning\r\n")
    assert b"Traceback" not in printed


def test_the_loss_of_every_token_is_printed_with_its_checkpoint(uninterrupted):
    printed = uninterrupted.with_suffix(".log").read_text()
    found = re.findall(
        r"^update (\d+) of (\d+): loss (\S+), the mean of ([\d,]+) tokens$",
        printed,
        re.MULTILINE,
    )
    path = uninterrupted / "metrics.jsonl"
    closed = [
        line
        for line in map(json.loads, path.read_text().splitlines())
        if line["updated"]
    ]
    ends = [int(end) for end, *_ in found]
    assert len(ends) == MICRO_BATCHES // SAVE_EVERY + bool(MICRO_BATCHES % SAVE_EVERY)
    assert ends[-1] == UPDATES and {total for _, total, *_ in found} == {str(UPDATES)}
    naive = 0
    for begin, (end, _, loss, tokens) in zip([0, *ends], found, strict=False):
        lines = closed[begin : int(end)]
        losses, counts = zip(
            *((line["loss"], line["num_tokens"]) for line in lines), strict=True
        )
        assert loss == f"{np.average(losses, weights=counts):.4f}"
        assert tokens == f"{sum(counts):,.0f}"
        naive += loss != f"{np.mean(losses):.4f}"
    assert naive, "the mean of the windows' means must differ somewhere"
    assert printed.index("compiling 1/") < printed.index("\nupdate ")


def test_a_resume_that_drops_the_open_window_ends_elsewhere(command, copy):
    chosen = options.parse_options(command.words(copy))
    setting = setting_of(command, copy)
    end = resumable.resume(copy, *setting).state
    number = next(number for number in checkpoints(copy) if number % K)
    for later in checkpoints(copy):
        if later > number:
            shutil.rmtree(copy / str(later))
    state = resumable.resume(copy, *setting).state
    assert state.opt_state.mini_step == number % K > 0

    frozen = finetune.make_parameters(chosen)[1]
    train, _ = finetune.load(chosen.data, chosen.max_length, Console(quiet=True))
    windows = batches.make_windows(
        train,
        updates=UPDATES,
        accumulation_steps=K,
        micro_batch_size=chosen.micro_batch_size,
        lengths=batches.padded_lengths(chosen.max_length),
        seed=chosen.seed,
    )
    micro_batches = [batch for window in windows for batch in window.micro_batches]
    lines = [*map(json.loads, (copy / "metrics.jsonl").read_text().splitlines())]
    assert [*map(resumable.fingerprint, micro_batches)] == [
        line["batch_sha256"] for line in lines
    ]

    def resume(state):
        state = jax.tree.map(jnp.copy, state)
        for batch in micro_batches[number:]:
            state, _ = setting.step(state, batch, frozen=frozen)
        return state

    fresh = setting.step.init(state.params).opt_state
    naive = {
        "without its sums": fresh._replace(
            inner_opt_state=state.opt_state.inner_opt_state,
            gradient_step=state.opt_state.gradient_step,
        ),
        "without any optimizer state": fresh,
    }
    with jax.default_matmul_precision("highest"):
        chex.assert_trees_all_equal(resume(state), end)
        for name, opt_state in naive.items():
            got = resume(StepState(state.params, opt_state))
            assert relative_error(got.params, end.params) > 1e-4, name


REFUSED = {
    "other settings": (
        ["--learning-rate", 0.5],
        lambda directory: None,
        "learning_rate is 0.003 in {0}/settings.json, and 0.5 was given",
    ),
    "fewer updates": (
        ["--updates", 2],
        lambda directory: None,
        f"has done {MICRO_BATCHES} micro-batches, and --updates 2 asks for 8",
    ),
    "somebody's files": (
        [],
        lambda directory: (directory / "settings.json").unlink(),
        "{0} must be a new or empty directory or that of a run",
    ),
    "damaged checkpoint": (
        [],
        lambda directory: cut_to_half(largest_file(directory / str(MICRO_BATCHES))),
        f"checkpoint {{0}}/{MICRO_BATCHES} is damaged",
    ),
}


def test_a_directory_that_cannot_be_written_is_refused_before_anything_compiles(
    command, tmp_path
):
    (tmp_path / "file").write_text("mine")
    log = tmp_path / "log"
    assert command.start(log, tmp_path / "file" / "run").wait(timeout=300) == 1
    printed = log.read_text()
    assert printed.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in printed and "compiling" not in printed


@pytest.mark.parametrize("case", REFUSED)
def test_the_command_refuses_without_a_traceback_or_a_change(command, copy, case):
    words, spoil, message = REFUSED[case]
    spoil(copy)
    (copy / f"{MICRO_BATCHES + 1}.orbax-checkpoint-tmp").mkdir()
    before = snapshot(copy)
    status, printed = run(command, copy, *words)
    assert status == 1
    assert message.format(copy) in printed
    assert printed.count("error: ") == 1 and "Nothing was changed" in printed
    assert "Traceback" not in printed and "Exception ignored" not in printed
    assert printed.splitlines()[-1].startswith("error: ")
    assert snapshot(copy) == before


def test_with_a_damaged_checkpoint_out_of_the_way_the_one_before_it_is_resumed(
    command, uninterrupted, copy, tmp_path
):
    cut_to_half(largest_file(copy / str(MICRO_BATCHES)))
    shutil.move(copy / str(MICRO_BATCHES), tmp_path / "away")
    status, printed = run(command, copy)
    assert status == 0, printed
    assert f"resumes after {checkpoints(uninterrupted)[-2]} of" in printed
    assert_same_end(command, copy, uninterrupted)
