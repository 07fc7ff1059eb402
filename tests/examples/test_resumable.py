"""Tests of the loop in `examples/resumable.py`, on a problem that compiles fast."""

import json
import os
import resource
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import resumable
from directories import cut_to_half, snapshot, unfinished_saves
from helpers import RTOL, relative_error
from jax.sharding import Mesh

from optax_tokenaccum import make_train_step

SETTINGS = {"learning_rate": 0.1, "seed": 3, "data_sha256": "0f"}
PARAMS = {"w": jax.random.normal(jax.random.key(0), (24, 24)), "b": jnp.zeros(24)}
DATA = np.random.default_rng(0).normal(size=(14, 8, 24)).astype(np.float32)


def make_step(optimizer, devices=None, **options):
    """Return a step over the first `devices` devices, or without a mesh."""
    if devices:
        mesh = Mesh(jax.devices()[:devices], ("data",))
        options |= {"mesh": mesh, "data_axes": "data"}
    return make_train_step(
        lambda params, x: (
            jnp.sum((x @ params["w"] + params["b"]) ** 2),
            x[:, 0] @ x[:, 0],
        ),
        optimizer,
        every_k_schedule=4,
        **options,
    )


STEP = make_step(optax.adamw(0.1))


def run(directory, micro_batches=DATA, save_every=3, settings=SETTINGS, step=STEP):
    position = resumable.resume(directory, settings, step, PARAMS)
    return resumable.train(
        directory, settings, save_every, step, position, micro_batches
    )


@pytest.mark.parametrize(
    "first", [0, 6, 14, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8, 13))]
)
def test_a_run_in_two_parts_is_a_run_in_one(tmp_path, first):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    end = run(whole)
    run(parts, DATA[:first])
    position = resumable.resume(parts, SETTINGS, STEP, PARAMS)
    assert position.micro_batches == first
    assert position.state.opt_state.mini_step == first % 4
    # What a killed process leaves: a line too many, half a line and half a save.
    with (parts / "metrics.jsonl").open("ab") as log:
        log.write(b'{"micro_batch": 98}\n{"micro_ba')
    (parts / "99.orbax-checkpoint-tmp").mkdir()
    assert resumable.fingerprint(run(parts, save_every=5)) == resumable.fingerprint(end)
    # Orbax waits for its cleanup of leftovers only before a save.
    assert first == len(DATA) or not unfinished_saves(parts)
    ends = [resumable.resume(path, SETTINGS, STEP, PARAMS) for path in (parts, whole)]
    chex.assert_trees_all_equal(*ends)
    names = "metrics.jsonl", "settings.json"
    assert [(parts / name).read_bytes() for name in names] == [
        (whole / name).read_bytes() for name in names
    ]


LAYOUTS = {
    "8 devices to 8": (8, 8),
    "8 devices to 4": (8, 4),
    "4 devices to 8": (4, 8),
    "8 devices to 1": (8, 1),
    "8 devices to no mesh": (8, None),
    "no mesh to 8 devices": (None, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_run_goes_on_in_the_middle_of_a_window_on_other_devices(tmp_path, case):
    # SGD, because AdamW amplifies the rounding of small gradients.
    before, after = (make_step(optax.sgd(0.01), n) for n in LAYOUTS[case])
    whole = run(tmp_path / "whole", DATA[:8], step=before)
    run(tmp_path / "parts", DATA[:6], step=before)
    position = resumable.resume(tmp_path / "parts", SETTINGS, after, PARAMS)
    assert position.state.opt_state.mini_step == 2
    states = position.state, after.init(PARAMS)
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        assert x.shape == y.shape and x.sharding.is_equivalent_to(y.sharding, x.ndim)
    got = run(tmp_path / "parts", DATA[:8], step=after)
    if len({*LAYOUTS[case]}) == 1:
        chex.assert_trees_all_equal(got, whole)
    assert relative_error(got.params, whole.params) < RTOL["float32"]

    sums = jax.tree.map(jnp.zeros_like, position.state.opt_state.acc_grads)
    opt_state = position.state.opt_state._replace(acc_grads=sums)
    lost = position.state._replace(opt_state=opt_state)
    for batch in DATA[6:8]:
        lost, _ = after(lost, batch)
    assert relative_error(lost.params, whole.params) > 1e-3


def test_metrics_are_exact_and_fetched_only_with_a_checkpoint(tmp_path):
    log, lines = tmp_path / "metrics.jsonl", []

    def after_micro_batch(done):
        lines.append(log.read_bytes().count(b"\n"))

    position = resumable.resume(tmp_path, SETTINGS, STEP, PARAMS)
    resumable.train(
        tmp_path, SETTINGS, 3, STEP, position, DATA, after_micro_batch=after_micro_batch
    )
    assert lines == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 14]
    state = STEP.init(PARAMS)
    for batch, line in zip(DATA, log.read_text().splitlines(), strict=True):
        state, metrics = STEP(state, batch)
        written = json.loads(line)
        for name in ("loss", "num_tokens", "grad_norm"):
            exact = np.asarray(getattr(metrics, name))
            assert exact.dtype == np.float32 and np.float32(written[name]) == exact
            assert written[name] == float(exact)
        for name in ("updated", "skipped", "mini_step", "gradient_step"):
            assert written[name] == getattr(metrics, name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_does_not_go_on_with_other_settings(tmp_path, name):
    run(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(resumable.CheckpointError, match=f"{name} is .*and other was"):
        run(tmp_path, settings=SETTINGS | {name: "other"})
    # A checkpoint of another run, next to settings that match.
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(SETTINGS | {name: "other"}))
    with pytest.raises(resumable.CheckpointError, match=f"{name} is .*/14, and other"):
        run(tmp_path, settings=SETTINGS | {name: "other"})
    settings.write_bytes(before["settings.json"])
    assert snapshot(tmp_path) == before


def save_another_checkpoint(directory):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))


FOREIGN = {
    "files": lambda directory: (directory / "metrics.jsonl").write_text("mine\n"),
    "a checkpoint": save_another_checkpoint,
    "settings": lambda directory: (directory / "settings.json").write_text("[1]"),
    "no JSON": lambda directory: (directory / "settings.json").write_text("{'a': 1}"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_directory_of_somebody_else_is_left_alone(tmp_path, case):
    FOREIGN[case](tmp_path)
    before = snapshot(tmp_path)
    assert before
    with pytest.raises(resumable.CheckpointError, match="Nothing was changed"):
        run(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_file_is_no_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(resumable.CheckpointError, match="must be a new or empty dir"):
        run(file)
    assert file.read_text() == "mine"


def test_a_start_that_was_killed_before_it_wrote_its_settings_is_no_start(tmp_path):
    (tmp_path / "settings.json.tmp").write_text('{"learning')
    run(tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text()) == SETTINGS


@pytest.mark.parametrize("how", ["shorter", "missing"])
def test_metrics_that_a_checkpoint_covers_must_be_there(tmp_path, how):
    run(tmp_path)
    log = tmp_path / "metrics.jsonl"
    cut_to_half(log) if how == "shorter" else log.unlink()
    before = snapshot(tmp_path)
    with pytest.raises(
        resumable.CheckpointError, match="bytes of metrics that go with"
    ):
        run(tmp_path)
    assert snapshot(tmp_path) == before


def run_without_room(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    with pytest.raises(
        resumable.CheckpointError, match="could not be written"
    ) as error:
        run(directory)
    assert "the same command resumes from the last" in str(error.value)


def in_a_process(name, directory):
    """Call a function of this file in a new process."""
    code = "import sys, pathlib, test_resumable as test\n"
    code += f"test.{name}(pathlib.Path(sys.argv[1]))"
    return subprocess.run(
        [sys.executable, "-c", code, directory],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_checkpoint_that_finds_no_room_is_an_error_that_loses_nothing(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", DATA[:6])
    done = in_a_process("run_without_room", tmp_path / "parts")
    assert done.returncode == 0, done.stderr
    position = resumable.resume(tmp_path / "parts", SETTINGS, STEP, PARAMS)
    assert position.micro_batches == 6
    chex.assert_trees_all_equal(run(tmp_path / "parts"), whole)


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "cut to half": cut_to_half,
    "one bit changed": lambda path: path.write_bytes(
        (data := path.read_bytes())[: len(data) // 2]
        + bytes([data[len(data) // 2] ^ 4])
        + data[len(data) // 2 + 1 :]
    ),
}


def damage_every_file(directory):
    """Damage each file of the last checkpoint in every way, and print the outcomes."""
    intact = resumable.resume(directory, SETTINGS, STEP, PARAMS)
    last = directory / str(intact.micro_batches)
    paths = [path for path in sorted(last.rglob("*")) if path.is_file()]
    for path in paths:
        original = path.read_bytes()
        for name, damage in DAMAGES.items():
            damage(path)
            before = snapshot(directory)
            try:
                position = resumable.resume(directory, SETTINGS, STEP, PARAMS)
            except resumable.CheckpointError as error:
                assert f"{last} is damaged" in str(error), error
                assert "the same command resumes from 12, the" in str(error), error
                outcome = "refused"
            else:
                # Orbax does not need every file to restore.
                chex.assert_trees_all_equal(position, intact)
                outcome = "unharmed"
            assert snapshot(directory) == before, path
            print(outcome, name, path.relative_to(last), len(original), sep="\t")
            path.write_bytes(original)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_or_restored_exactly(tmp_path):
    run(tmp_path / "run")
    # In a separate process: reads that Orbax abandons end at unknown times.
    done = in_a_process("damage_every_file", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    outcomes = [line.split("\t") for line in done.stdout.splitlines()]
    largest = max(int(size) for *_, size in outcomes)
    of_largest = [outcome for outcome, *_, size in outcomes if int(size) == largest]
    assert of_largest == ["refused"] * len(DAMAGES)
    refused = [name for outcome, name, *_ in outcomes if outcome == "refused"]
    for name in DAMAGES:
        assert refused.count(name) > 4, name
