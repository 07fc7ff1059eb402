"""Small runs of the benchmarks; every way is right or known to be wrong."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import settings, tpu
from benchmarks.speed import check
from benchmarks.ways import CONTENDERS
from benchmarks.workloads import square_layers

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
    assert suites.keys() == {"speed", "programs", "memory", "host", "ragged"}
    for suite in ("speed", "programs"):
        assert {row["way"] for row in suites[suite]} == CONTENDERS.keys()
    for row in suites["speed"]:
        if row["way"] == "optax.MultiSteps":
            assert row["gradient error"] > 0.05
        elif row["kind"] != "limit":
            assert row["gradient error"] < 0.02
    table = (tmp_path / "benchmarks.md").read_text()
    assert all(name in table for name in CONTENDERS)
    assert (tmp_path / "ragged.png").stat().st_size > 10_000


def test_a_contender_that_is_wrong_is_found(monkeypatch):
    naive = CONTENDERS["optax.MultiSteps"]._replace(exact=True)
    monkeypatch.setitem(CONTENDERS, "optax.MultiSteps", naive)
    with pytest.raises(AssertionError, match="optax.MultiSteps"):
        check(square_layers(16, 1), k=3)


@pytest.mark.slow
@pytest.mark.skipif(not tpu.is_available(), reason="needs libtpu, which compiles")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="gradients are whole below")
def test_sums_on_a_tpu_need_the_memory_of_one_gradient():
    peaks: dict[str, dict[str, float]] = {}
    for row in tpu.run(settings.QUICK):
        model = peaks.setdefault(row["model"], {})
        model[row["way"]] = row["peak / gradients alone"]
    for model, most in {"stacked": 1.05, "stacked, tied embedding": 1.15}.items():
        for way in ("train step", "window step"):
            assert peaks[model][way] <= most
        for way in ("pair by hand", "scan by hand"):
            assert peaks[model][way] > 1.3
