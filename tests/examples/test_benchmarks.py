"""Small runs of the benchmarks; every way is right or known to be wrong."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import settings, tpu
from benchmarks.speed import CONTENDERS, check
from benchmarks.workloads import TINY_WORKLOADS, square_layers

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_suites_run_and_say_what_they_measured(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "benchmarks.json").read_text())
    for suite in results["suites"].values():
        assert {"jax", "device", "cores"} <= suite["machine"].keys()
    suites = {name: suite["rows"] for name, suite in results["suites"].items()}
    assert suites.keys() == {
        "speed",
        "programs",
        "memory",
        "host",
        "ragged",
    }
    timed = [row for row in suites["speed"] if "contender" in row]
    assert {row["contender"] for row in timed} == CONTENDERS.keys()
    for row in timed:
        median, low, high = row["time"]
        assert 0 < low <= median <= high
        if row["contender"] == "optax.MultiSteps":
            assert row["gradient error"] > 0.05
        elif row["kind"] != "limit":
            assert row["gradient error"] < 0.02
    compilations = {row["contender"]: row["compilations"] for row in suites["programs"]}
    assert compilations["train step"] == 2
    for one_program in (
        "train step, one program",
        "window step",
        "token_accumulation",
        "MultiSteps",
    ):
        assert compilations[one_program] == 1
    for row in suites["programs"]:
        if row["contender"] == "gradients alone":
            assert row["peak / gradients alone"] == {"gradient": 1}
        assert row["peak / gradients alone"].keys() == row["net MB"].keys()
    for row in suites["ragged"]:
        assert row["update differs by"] < 2e-6
    table = (tmp_path / "benchmarks.md").read_text()
    assert all(name in table for name in CONTENDERS)
    for name in ("benchmarks.png", "memory.png", "ragged.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_contender_that_is_wrong_is_found(monkeypatch):
    naive = CONTENDERS["optax.MultiSteps"]._replace(exact=True)
    monkeypatch.setitem(
        sys.modules["benchmarks.peers"].PEERS, "optax.MultiSteps", naive
    )
    with pytest.raises(AssertionError, match="optax.MultiSteps"):
        check(square_layers(16, 1), k=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stacked, bfloat16 compute", "stacked layers"])
def test_every_way_is_right_with_stacked_layers(name: str):
    assert check(TINY_WORKLOADS[name](), k=2)["optax.MultiSteps"] > 0.05


def test_the_parameters_of_a_program_for_a_tpu_are_shapes():
    workload = tpu.shapes_alone(TINY_WORKLOADS["stacked layers"])
    for leaf in jax.tree.leaves(workload.params):
        assert type(leaf) is jax.ShapeDtypeStruct


def test_a_suite_that_cannot_run_says_so(monkeypatch, capsys):
    monkeypatch.setattr(tpu, "is_available", lambda: False)
    assert tpu.run(settings.QUICK) == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not tpu.is_available(), reason="needs libtpu, which compiles")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="gradients are whole below")
def test_sums_on_a_tpu_need_the_memory_of_one_gradient():
    peaks: dict[str, dict[str, float]] = {}
    for row in tpu.run(settings.QUICK):
        model = peaks.setdefault(row["model"], {})
        model[row["way"]] = row["peak / gradients alone"]
    for model, most in {"stacked": 1.05, "stacked, tied embedding": 1.15}.items():
        for way in ("train step", "window step", "window_value_and_grad"):
            assert peaks[model][way] <= most
        for way in ("pair by hand", "scan by hand"):
            assert peaks[model][way] > 1.3
