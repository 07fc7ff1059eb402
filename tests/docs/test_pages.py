"""README and docs: blocks that run, links that lead somewhere, names that exist."""

import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import finetune
import jax
import pytest

import optax_tokenaccum
from hatch_build import AddressHook
from optax_tokenaccum import debug, losses, ragged

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "notebooks/*.md", "upstream/*.md")
    for path in sorted(ROOT.glob(pattern))
}
BLOCK = re.compile(r"^```(\S*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page, language, code)
    for page, text in PAGES.items()
    for language, code in BLOCK.findall(text)
]

# Blocks that are not run: Sphinx directives, diffs, and errors.
NOT_CODE = {"{eval-rst}", "{include}", "{toctree}", "diff", "text"}


def test_there_are_blocks_of_every_kind():
    assert {language for _, language, _ in BLOCKS} == NOT_CODE | {"python", "bash"}


def test_commands_are_ones_that_tests_run_or_that_finetune_takes():
    blocks = [code for _, language, code in BLOCKS if language == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ")
    programs = set()
    for command in re.findall(r"\bpython (examples/.*|-m benchmarks.*)", lines):
        program, *words = shlex.split(command, comments=True)
        if program == "examples/finetune.py":
            finetune.parse_options(words)
        else:
            programs.add(" ".join((program, *words)))
    assert programs == {"-m benchmarks --out results"}  # test_benchmarks.py, --quick


def test_the_changelog_has_the_version_and_room_for_the_next():
    headings = re.findall(r"^## (.*)$", PAGES["CHANGELOG.md"], re.MULTILINE)
    released = re.compile(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d").fullmatch
    assert headings[0] == "Unreleased"
    versions = [match[1] for match in map(released, headings[1:]) if match]
    assert len(versions) == len(headings) - 1
    if ".dev" not in optax_tokenaccum.__version__:
        assert versions[0] == optax_tokenaccum.__version__
    cited = "version: {}\ndate-released: {}\n".format(*headings[1].split(" - "))
    assert cited in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def public() -> list[str]:
    names = [f"optax_tokenaccum.{name}" for name in optax_tokenaccum.__all__]
    for module in (debug, losses, ragged):
        names += [f"{module.__name__}.{name}" for name in module.__all__]
    for module in ("linen", "nnx"):
        module = f"optax_tokenaccum.{module}"
        names += [
            f"{module}.{name}"
            for name, value in vars(importlib.import_module(module)).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module
        ]
    return sorted(names)


def test_the_api_page_says_in_a_line_what_each_name_is():
    lines = [
        f"| `{name.removeprefix('optax_tokenaccum.')}` | {summary(name)} |"
        for name in public()
    ]
    assert "\n".join(lines) in PAGES["docs/api.md"], "\n".join(lines)


def summary(name: str) -> str:
    return " ".join(inspect.getdoc(resolved(name)).split("\n\n")[0].split())


def resolved(name: str) -> Any:
    """The object of a dotted name, in the longest module that can be imported."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def test_every_public_name_has_an_entry_and_every_entry_is_public():
    directive = re.compile(r"^\.\. auto(?:function|class):: (\S+?)(?:\(\))?$", re.M)
    found = [name for text in PAGES.values() for name in directive.findall(text)]
    assert sorted(found) == public()


def test_every_public_name_has_an_example_that_the_suite_runs():
    docs = {x: inspect.cleandoc(resolved(x).__doc__ or "") for x in public()}
    assert [x for x, doc in docs.items() if "\n  >>> " not in doc] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = BLOCK.sub("", PAGES[page])
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    relative = [target for target in targets if not target.startswith("http")]
    missing = [t for t in relative if not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


def test_no_title_of_a_page_or_notebook_occurs_twice():
    pages = [text for page, text in PAGES.items() if page != "docs/index.md"]
    for path in ROOT.glob("notebooks/*.ipynb"):
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        pages.append("".join(first["source"]))
    titles = [re.search(r"^# (.*)$", text, re.MULTILINE)[1] for text in pages]
    assert sorted(titles) == sorted({*titles})


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 130


def test_links_of_a_release_are_absolute_and_as_written_without_an_address():
    readmes = []
    for address in ("", "https://example.org/o/r/"):
        metadata = {"version": "1.2.3"}
        AddressHook(str(ROOT), {"address": address}).update(metadata)
        readmes.append(metadata["readme"]["text"])
    written, released = readmes
    assert written == (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", released)
    assert all(link.startswith("https://") for link in links)
    assert "(https://example.org/o/r/blob/v1.2.3/docs/quickstart.md)" in released
    assert "(https://example.org/o/r/raw/v1.2.3/docs/images/curves.png)" in released
    assert metadata["urls"]["Source"] == "https://example.org/o/r"


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="has names of jax 0.12")
@pytest.mark.parametrize(
    "inventory", sorted(ROOT.glob("docs/inventories/*.txt")), ids=lambda path: path.stem
)
def test_names_that_pages_link_to_exist_in_the_newest_versions(inventory: Path):
    address, *lines = inventory.read_text(encoding="utf-8").splitlines()
    assert address.startswith("https://")
    for name, path in map(str.split, lines):
        assert resolved(name) is not None
        assert ".html" in path
