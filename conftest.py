"""Gives every test 8 devices on any number of cores, and fast compilation."""

from pathlib import Path

import pytest
import xla_flags

collect_ignore_glob = ["docs/*.py"]  # need Sphinx, which the tests do not use

xla_flags.set_flags()

RECIPES = Path(__file__).parent / "docs" / "recipes"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the code blocks of the recipes as slow, like the tests of the recipes."""
    for item in items:
        if item.path.is_relative_to(RECIPES):
            item.add_marker(pytest.mark.slow)
