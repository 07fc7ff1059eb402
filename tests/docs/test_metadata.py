"""The links of a release, which an index shows outside of the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_links_are_absolute_with_an_address_and_as_written_without():
    pytest.importorskip("hatchling")
    from hatch_build import AddressHook

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
    assert "(https://example.org/o/r/raw/v1.2.3/docs/images/finetune.png)" in released
    assert metadata["urls"]["Source"] == "https://example.org/o/r"
