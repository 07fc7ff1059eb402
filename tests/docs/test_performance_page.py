"""The figures on the pages are lines of the results in the repository."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks/results/cpu/benchmarks.md").read_text().splitlines()


@pytest.mark.parametrize("page", ["performance", "ragged"])
def test_every_measured_row_is_a_row_of_the_results(page: str):
    lines = (ROOT / f"docs/{page}.md").read_text().splitlines()
    measured = [line for line in lines if line.startswith("|") and " to " in line]
    measured = [line for line in measured if any(c.isdigit() for c in line)]
    assert len(measured) > 4
    assert not [line for line in measured if line not in RESULTS]
