"""Tests of `examples/published_figures.py` and of the page that shows its figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import llama
import numpy as np
import published_figures
import published_fixtures
import pytest
from helpers import RTOL

DOCS = Path(__file__).parents[2] / "docs"


def test_numbers_are_those_of_pytorch():
    """The numbers that follow `torch.manual_seed(0)` in PyTorch."""
    uniform = llama.TorchRandom(0).uniform(3)
    np.testing.assert_allclose(uniform, [0.4963, 0.7682, 0.0885], atol=5e-5)
    normal = llama.TorchRandom(0).normal(2, 16)
    expected = [-1.1258, -1.1524, -0.2506, -0.4339, 0.8487]
    assert normal.shape == (2, 16)
    np.testing.assert_allclose(normal[0, :5], expected, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "exact", "naive"),
    [("torchtitan", 9.2, 6), ("megatron", 4, 14 / 3)],
    ids=["torchtitan", "megatron"],
)
def test_arithmetic_fixtures_are_exact(name, exact, naive):
    [fixture] = getattr(published_fixtures, name)()
    assert fixture.exact == np.float32(exact)
    assert fixture.naive == np.float32(naive)


def rows_in_docs():
    """Yield the cells of the table of fixtures in `docs/why.md`."""
    lines = (DOCS / "why.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| published by | quantity | right | exact | wrong | naive |")
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def holds(published, value):
    """Whether a value matches the published one, to four decimals or within a bound."""
    sign, number = re.fullmatch(r"([<>]?) ?(\S+)", published).groups()
    numerator, _, denominator = number.partition("/")
    expected = float(numerator) / float(denominator or 1)
    if sign:
        return value < expected if sign == "<" else value > expected
    rounded = re.fullmatch(r"\d\.\d{4}", number)
    return abs(value - expected) <= (5e-5 if rounded else RTOL["float32"])


@pytest.mark.slow
def test_the_command(tmp_path):
    result = subprocess.run(
        [sys.executable, published_figures.__file__, "--quick", "--seeds", "2"]
        + ["--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / "out" / "figures.json").read_text())

    for row in content["errors"] + content["spread"]:
        assert len(row["naive"]) == len(row["exact"]) == 2
        assert max(row["exact"]) < RTOL["float32"], row
    # For each seed, more micro-batches and a larger spread increase the error.
    two, eight, thirty_two = (np.array(row["naive"]) for row in content["errors"])
    assert (two > 1e-3).all()
    assert (eight > 2 * two).all()
    assert (thirty_two > 2 * eight).all()
    equal, ragged = (np.array(row["naive"]) for row in content["spread"])
    assert (equal < RTOL["float32"]).all()
    assert (ragged > 0.5).all()
    assert max(content["errors"][-1]["cosine"]) < 0.9

    distances = [row["naive"] for row in content["trained"]]
    assert [row["k"] for row in content["trained"]] == [2, 8, 32]
    assert 1e-4 < distances[0] < distances[1] < distances[2]
    for row in content["trained"]:
        assert row["naive"] > 100 * row["exact"]
        assert row["exact"] < RTOL["float32"]
        assert row["full_batch_losses"][-1] < row["full_batch_losses"][0]

    fixtures = content["fixtures"]
    for row in fixtures:
        assert holds(row["right"], row["exact"]), row
        assert not holds(row["right"], row["naive"]), row
        if row["source"] not in {"accelerate", "torchtune", "transformers"}:
            assert holds(row["wrong"], row["naive"]), row

    in_docs = list(rows_in_docs())
    assert len(in_docs) == len(fixtures)
    for cells, row in zip(in_docs, fixtures, strict=True):
        source, quantity, right, exact, wrong, naive = cells
        assert row["source"] in source
        assert [quantity, right, wrong] == [
            row[n] for n in ("quantity", "right", "wrong")
        ]
        for shown, value in ((exact, row["exact"]), (naive, row["naive"])):
            assert float(shown) == pytest.approx(value, rel=5e-4, abs=RTOL["float32"])
        assert row["source"] in result.stdout

    picture = (tmp_path / "out" / "the_bug.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_the_picture_in_the_docs_is_small():
    picture = (DOCS / "images" / "the_bug.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 100_000
