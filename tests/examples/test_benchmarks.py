"""Small runs of the benchmarks; every way is right or known to be wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed import CONTENDERS, check
from benchmarks.workloads import square_layers

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_suites_run_and_say_what_they_measured(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "benchmarks.json").read_text())
    assert {"jax", "device", "cores"} <= results["machine"].keys()
    suites = results["suites"]
    assert suites.keys() == {"speed", "programs", "host", "growth", "ragged"}
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
    for row in suites["ragged"]:
        assert row["update differs by"] < 2e-6
    table = (tmp_path / "benchmarks.md").read_text()
    assert all(name in table for name in CONTENDERS)
    for name in ("benchmarks.png", "ragged.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_contender_that_is_wrong_is_found(monkeypatch):
    naive = CONTENDERS["optax.MultiSteps"]._replace(exact=True)
    monkeypatch.setitem(
        sys.modules["benchmarks.peers"].PEERS, "optax.MultiSteps", naive
    )
    with pytest.raises(AssertionError, match="optax.MultiSteps"):
        check(square_layers(16, 1), k=3)
