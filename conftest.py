"""Gives every test its devices, what it needs checked, and fast compilation."""

import os
from pathlib import Path

import jax
import platforms
import pytest

collect_ignore_glob = ["docs/*.py"]  # need Sphinx, which the tests do not use

platforms.choose()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        platforms.require(**mark.kwargs)


def pytest_configure(config: pytest.Config) -> None:
    """Compiles no program twice in a worker, or in its later runs.

    Each worker has a cache of its own: jax warns if it reads what another has half
    written, and compiles again.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None and hasattr(config, "cache"):
        directory = str(config.cache.mkdir("compiled"))
    if directory is None:
        return
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        directory = str(Path(directory, worker))
    options = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for workers and other processes
