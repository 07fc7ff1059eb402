"""The suite for a GPU: its tables, and what pages say of it."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import write_tables
from benchmarks.report import RESULTS, stored

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("gpu_small.jsonl")  # of `--small`, on a CPU
CARDS = {
    path.parent.name.upper()
    for path in RESULTS.glob("*/benchmarks.json")
    if any("driver" in suite["machine"] for suite in stored(path).values())
}


def test_results_that_were_cut_off_become_tables(tmp_path):
    lines = STORED.read_text().splitlines()
    kinds = {json.loads(line)["case"][0] for line in lines}
    case = ["memory", "decoder", "pair by hand", "2"]
    failed = {"case": case, "took": 1, "failed": "...\nXlaError: x\n"}
    # A case that ran again counts once, as in its last line.
    lines += [json.dumps(failed), *lines[-2:]]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    page = write_tables(tmp_path / "results.jsonl")
    suites = stored(tmp_path / "benchmarks.json")
    measured = {name for name, suite in suites.items() if suite["rows"]}
    assert measured == {f"gpu {kind}" for kind in kinds - {"environment"}} | {"failed"}
    assert suites["failed"]["rows"] == [{"case": " ".join(case), "why": "XlaError: x"}]
    for suite in suites.values():
        rows = [json.dumps(row) for row in suite["rows"]]
        assert len({*rows}) == len(rows)
        assert {"jax", "device"} <= suite["machine"].keys()
    right = {row["method"]: row["exact"] for row in suites["gpu exact"]["rows"]}
    assert not right.pop("optax.MultiSteps") and all(right.values())
    assert all(method in page for method in ("train step", "nnx train step"))


@pytest.mark.parametrize("name", ["README", "docs/performance", "notebooks/README"])
def test_pages_say_what_ran_on_a_gpu(name):
    text = (ROOT / f"{name}.md").read_text()
    assert CARDS and all(card in text for card in CARDS)
    assert "No GPU" not in text


def test_readme_quotes_the_memory_of_runs():
    readme = (ROOT / "README.md").read_text()
    rows = stored(RESULTS / "h200/benchmarks.json")["gpu memory"]["rows"]
    ran = {(row["model"], row["method"]): row["ran"] for row in rows}
    for model in ("float32", "bfloat16"):
        alone = ran[model, "gradients alone"]
        by_hand, ours = (ran[model, x] / alone for x in ("pair by hand", "train step"))
        assert f"| {by_hand:.2f}; {ours:.2f} |" in readme
