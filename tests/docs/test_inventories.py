"""The names that the documentation links to exist in the newest versions."""

import importlib
from pathlib import Path
from typing import Any

import jax
import pytest

INVENTORIES = sorted((Path(__file__).parents[2] / "docs/inventories").glob("*.txt"))


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


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="has names of jax 0.12")
@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda path: path.stem)
def test_names_exist(inventory: Path):
    address, *lines = inventory.read_text(encoding="utf-8").splitlines()
    assert address.startswith("https://")
    for name, path in map(str.split, lines):
        assert resolved(name) is not None
        assert ".html" in path
