"""README and docs: every code block runs, and every public name has an entry."""

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import finetune
import pytest

import optax_tokenaccum

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "upstream/*.md")
    for path in ROOT.glob(pattern)
}
BLOCK = re.compile(r"^```(\S*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page, language, code)
    for page, text in PAGES.items()
    for language, code in BLOCK.findall(text)
]

# Blocks that are not run: Sphinx directives, diffs, and errors.
NOT_CODE = {"{eval-rst}", "{include}", "{toctree}", "diff", "text"}
# tests_keras, tests_tunix and test_trainers_of_others.py.
RUN_BY_THEIR_TESTS = (
    "docs/easydel.md",
    "docs/kauldron.md",
    "docs/keras.md",
    "docs/tunix.md",
)
# Quoted code of other projects; test_own_your_step.py runs its arithmetic instead.
QUOTED = {
    "gradient_accumulation_loss_and_grad(",
    "learner.forward_fn_transformation",
    "grad_fn = microbatched(",
}


def test_there_are_blocks_of_every_kind():
    assert {language for _, language, _ in BLOCKS} == NOT_CODE | {"python", "bash"}


def test_python_runs_as_a_doctest_or_in_a_test_of_its_page():
    others = [
        code
        for page, language, code in BLOCKS
        if language == "python"
        and not code.startswith(">>> ")
        and not page.startswith(RUN_BY_THEIR_TESTS)
    ]
    assert len(others) == len(QUOTED)
    for code in others:
        ast.parse(code)
        assert any(line in code for line in QUOTED)


def commands() -> list[str]:
    """Return the command lines of blocks that start a Python program of this repo."""
    blocks = [code for _, language, code in BLOCKS if language == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = (re.search(r"\bpython (examples/|-m benchmarks).*", line) for line in lines)
    return [match[0] for match in found if match]


def test_commands_are_ones_that_tests_run_or_that_finetune_takes():
    programs = set()
    for command in commands():
        program, *words = shlex.split(command.removeprefix("python "), comments=True)
        if program == "examples/finetune.py":
            finetune.parse_options(words)
        else:
            programs.add(" ".join((program, *words)))
    assert programs == {
        "-m benchmarks --out results",  # test_benchmarks.py, with --quick
    }


def test_the_changelog_has_the_version_and_room_for_the_next():
    headings = re.findall(r"^## (.*)$", PAGES["CHANGELOG.md"], re.MULTILINE)
    released = re.compile(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d").fullmatch
    assert headings[0] == "Unreleased"
    versions = [match[1] for match in map(released, headings[1:]) if match]
    assert len(versions) == len(headings) - 1
    if ".dev" not in optax_tokenaccum.__version__:
        assert versions[0] == optax_tokenaccum.__version__


def test_the_map_of_the_package_has_every_file():
    package = ROOT / "optax_tokenaccum"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    rows = re.findall(r"^\| (`[\w/]+\.py`.*?) \|", PAGES["CONTRIBUTING.md"], re.M)
    names = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
    assert sorted(names) == sorted(x for x in files if not x.endswith("__init__.py"))


def documented() -> list[str]:
    directive = re.compile(r"^\.\. auto(?:function|class):: (\S+?)(?:\(\))?$", re.M)
    return sorted(name for text in PAGES.values() for name in directive.findall(text))


def public() -> list[str]:
    names = [f"optax_tokenaccum.{name}" for name in optax_tokenaccum.__all__]
    for module in (
        "optax_tokenaccum.grain",
        "optax_tokenaccum.linen",
        "optax_tokenaccum.microbatching",
        "optax_tokenaccum.nnx",
    ):
        names += [
            f"{module}.{name}"
            for name, value in vars(importlib.import_module(module)).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module
        ]
    return sorted(names)


def test_every_public_name_has_an_entry_and_every_entry_is_public():
    assert documented() == public()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = BLOCK.sub("", PAGES[page])
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    relative = [target for target in targets if not target.startswith("http")]
    missing = [t for t in relative if not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


def titles() -> list[str]:
    """Return the first heading of every page and notebook of the site."""
    pages = [text for page, text in PAGES.items() if page != "docs/index.md"]
    for path in ROOT.glob("notebooks/*.ipynb"):
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        pages.append("".join(first["source"]))
    return [re.search(r"^# (.*)$", text, re.MULTILINE)[1] for text in pages]


def test_no_title_occurs_twice():
    assert sorted(titles()) == sorted({*titles()})


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 200
