"""Python in README and in pages runs, and prints what its comments say."""

import contextlib
import io
from pathlib import Path

import platforms
import pytest
from helpers import slow
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(x.relative_to(ROOT).as_posix() for x in ROOT.glob("docs/*.md"))]
# The others take 3 to 20 seconds each.
QUICK = "README quickstart support".split()


class Printed(PythonEvaluator):
    def __call__(self, example: Example) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            super().__call__(example)
        lines = example.parsed.splitlines()
        expected = [line[3:] for line in lines if line.startswith("#>")]
        assert printed.getvalue().splitlines() == expected


PARSER = Sybil([CodeBlockParser("python", Printed()), SkipParser()])


@pytest.mark.parametrize(
    "page", [x if Path(x).stem in QUICK else slow(x) for x in sorted(PAGES)]
)
def test_code_of_pages_prints_what_its_comments_say(page: str):
    if "jax.devices()" in (ROOT / page).read_text():
        platforms.require(devices=8)
    for example in PARSER.parse(ROOT / page).examples():
        example.evaluate()
