"""Gives every test 8 devices on any number of cores, and fast compilation."""

import os
from pathlib import Path

import jax
import pytest

collect_ignore_glob = ["docs/*.py"]  # need Sphinx, which the tests do not use

flags = {"xla_force_host_platform_device_count": 8}
# Tests spend most of their time compiling, and few depend on how fast a program runs.
# Every supported jax knows these flags; an unknown flag would end the process.
if not os.environ.get("COMPILE_AS_USERS"):
    flags |= {
        "xla_backend_optimization_level": 0,
        "xla_cpu_parallel_codegen_split_count": 1,
        "xla_llvm_disable_expensive_passes": True,
    }
    if jax.__version_info__ < (0, 11):  # halves compile time; not in newer jax
        flags["xla_cpu_use_fusion_emitters"] = False
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added])
os.environ.setdefault("NPROC", "32")  # otherwise 8 devices on 2 cores may deadlock


RECIPES = Path(__file__).parent / "docs" / "recipes"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the code blocks of the recipes as slow, like the tests of the recipes."""
    for item in items:
        if item.path.is_relative_to(RECIPES):
            item.add_marker(pytest.mark.slow)
