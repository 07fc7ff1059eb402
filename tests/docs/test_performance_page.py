"""The figures on the pages are those of the results in the repository."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import page

ROOT = Path(__file__).parents[2]
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if page.TABLE.search(path.read_text())
]


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_are_made_from_the_results(name: str):
    text = (ROOT / name).read_text()
    assert "Not measured yet" not in text
    assert page.updated(text) == text


@pytest.mark.parametrize("old", ["1.00", "gradients alone"])
def test_a_table_that_was_edited_is_found(old: str):
    edited = PERFORMANCE.replace(f"| {old}", f"| x{old}")
    assert edited != PERFORMANCE
    assert page.updated(edited) == PERFORMANCE


def test_the_first_sentences_quote_the_tables():
    opening, _, tables = PERFORMANCE.partition("## Which method to take")
    quoted = re.findall(r"(\d\.\d\d?) (?:times|to)", opening)
    shown = re.findall(r"\d\.\d+", tables)
    assert len(quoted) > 4 and {*map(float, quoted)} <= {*map(float, shown)}


def stored(results: str, suite: str) -> list[dict]:
    text = (page.RESULTS / results / "benchmarks.json").read_text()
    return json.loads(text)["suites"][suite]["rows"]


def test_the_sentence_about_older_jax_quotes_the_results():
    rows = stored("older_jax", "programs")
    peaks = {row["way"]: max(row["peak / gradients alone"].values()) for row in rows}
    older = PERFORMANCE.partition("(On [older")[2].partition(" Every gradient")[0]
    assert re.findall(r"\d\.\d\d ", older) == [
        f"{peaks[way]:.2f} " for way in ("train step", "scan by hand")
    ]


def test_the_sentence_about_optimizers_quotes_the_results():
    times: dict[str, list[float]] = {}
    for row in stored("ahead", "ahead"):
        if row.get("layout") == "one device" and "step" in row["way"]:
            found = [row[f"{chip} / by hand"] for chip in ("v5e", "H200")]
            times.setdefault(row.get("optimizer"), []).extend(found)
    guarded = times["apply_if_finite(AdamW)"]
    others = [x for name in ("clipped AdamW", "LAMB", "Muon") for x in times[name]]
    sentence = PERFORMANCE.partition("With clipped AdamW")[2].partition("\n\n")[0]
    assert re.findall(r"(\d\.\d\d)\s+(?:to|times)", sentence) == [
        f"{bound(x):.2f}" for x in (others, guarded) for bound in (min, max)
    ]


def test_the_sentence_about_data_parallel_quotes_the_results():
    rows = stored("ahead", "ahead")
    sent = {
        (row["way"], row["mesh"]): row["H200 GB sent"]
        for row in rows
        if row.get("layout") == "data parallel"
    }
    text = (ROOT / "docs/devices.md").read_text()
    (times,) = re.findall(r"here in bfloat16: (\S+) times the bytes", text)
    for way in ("pair by hand", "train step"):
        more = sent[way, "no mesh"] / sent["train step", "window"]
        assert times == f"{more:.1f}"


def test_the_sentence_about_the_host_quotes_the_results():
    more = {
        (row["leaves"], row["step"]): row["us more"][0] for row in stored("cpu", "host")
    }
    assert max(more[10, "train step"], more[10, "window step"]) < 100
    assert more[300, "train step"] < 0
    [quoted] = re.findall(r"window step takes (\d\.\d) ms\s+longer", PERFORMANCE)
    assert f"{more[300, 'window step'] / 1000:.1f}" == quoted
    assert all(value < 0 for (_, step), value in more.items() if "nnx" in step)
