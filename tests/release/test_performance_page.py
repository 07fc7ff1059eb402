"""The figures on the pages are those of the results in the repository."""

import re
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("docs/**/*.md"))
    if report.TABLE.search(path.read_text())
]


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_are_made_from_the_results(name: str):
    text = (ROOT / name).read_text()
    assert report.updated(text) == text


def test_a_table_that_was_edited_is_found():
    edited = PERFORMANCE.replace("| 1.00", "| x1.00")
    assert edited != PERFORMANCE
    assert report.updated(edited) == PERFORMANCE


def test_the_first_sentences_quote_the_tables():
    opening, _, tables = PERFORMANCE.partition("## Memory\n")
    quoted = re.findall(r"(\d\.\d\d?) (?:times|to)", opening)
    shown = re.findall(r"\d\.\d+", tables)
    assert len(quoted) > 4 and {*map(float, quoted)} <= {*map(float, shown)}


def ahead() -> list[dict]:
    return report.stored(report.RESULTS / "ahead/benchmarks.json")["ahead"]["rows"]


def test_the_sentence_about_optimizers_quotes_the_results():
    times: dict[str, list[float]] = {}
    for row in ahead():
        if row.get("layout") == "one device" and "step" in row["way"]:
            found = [row[f"{chip} / by hand"] for chip in ("v5e", "H200")]
            times.setdefault(row.get("optimizer"), []).extend(found)
    swap = [x for x in ahead() if x.get("way") == "token_accumulation"]
    groups = [
        times["clipped AdamW"] + times["LAMB"],
        times["Muon"],
        times["apply_if_finite(AdamW)"],
    ]
    sentence = PERFORMANCE.partition("in times of the same by hand")[2]
    numbers = re.findall(r"\b\d\.\d\d\b", sentence.partition("\n\n")[0])
    expected = [f"{bound(x):.2f}" for x in groups for bound in (min, max)]
    expected += [expected[1], f"{swap[0]['H200 / by hand']:.2f}"]
    assert numbers == expected


def test_what_to_try_first_quotes_the_results():
    rows = report.stored(report.RESULTS / "fits/benchmarks.json")["what to try first"]
    held = [str(x["GB on a chip"]) for x in rows["rows"] if "change" in x]
    section = PERFORMANCE.split("\n## Does it fit\n")[1].split("\n### ")[0]
    assert re.findall(r"(\d+\.\d) GB", section) == held


def test_the_sentence_about_data_parallel_quotes_the_results():
    sent = {
        (row["way"], row["mesh"]): row["H200 GB sent"]
        for row in ahead()
        if row.get("layout") == "data parallel"
    }
    text = (ROOT / "docs/devices.md").read_text()
    (times,) = re.findall(r"here in bfloat16: (\S+) times the bytes", text)
    for way in ("pair by hand", "train step"):
        more = sent[way, "no mesh"] / sent["train step", "window"]
        assert times == f"{more:.1f}"
