"""`upstream/`: patches that apply, with which optax's own tests pass."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.experimental import aggregating

pytestmark = pytest.mark.slow

UPSTREAM = Path(__file__).parents[2] / "upstream"
PATCHES = sorted(UPSTREAM.glob("*.patch"))
PAGE = (UPSTREAM / "README.md").read_text()


def apply(patch: Path, folder: Path, option: str) -> str:
    """Run `git apply` there, as outside of any repository."""
    command = ["git", "apply", option, str(patch)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    options = {"cwd": folder, "env": environment, "check": True, "text": True}
    return subprocess.run(command, stdout=subprocess.PIPE, **options).stdout


@pytest.fixture(scope="module")
def patched(tmp_path_factory: Any) -> Path:
    """A folder with a copy of the installed optax after the patches."""
    if optax.__version__ != "0.2.8":
        pytest.skip(f"the patches are for optax 0.2.8, not {optax.__version__}")
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(optax.__file__).parent, folder / "optax")
    for patch in PATCHES:  # of what is installed: no notebook, no page
        apply(patch, folder, "--include=optax/*")
    return folder


def test_new_cells_of_the_notebook_run(capsys):
    blocks = re.findall(r"(?:^\+(?!\+).*\n)+", PATCHES[0].read_text(), re.MULTILINE)
    added = re.sub(r"^\+", "", max(blocks, key=len), flags=re.MULTILINE)
    cells = json.loads("[" + added.rstrip(",\n") + "]")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    exec("import jax, optax, numpy as np, jax.numpy as jnp\n" + "\n".join(code), {})
    assert len(code) == capsys.readouterr().out.count("relative error") == 2


def test_the_tests_of_optax_and_of_the_patches_pass(patched):
    command = re.search(r"^python -m (pytest.*?_test\.py)$", PAGE, re.M | re.S)[1]
    done = subprocess.run(
        [sys.executable, "-m", *command.replace("\\\n", "").split()],
        cwd=patched,
        env=os.environ | {"PYTHONPATH": str(patched)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    [passed] = re.findall(r"(\d+) passed", done.stdout)
    assert f"{passed} tests pass" in PAGE


def test_patched_aggregating_without_a_count_is_bit_for_bit_the_released(patched):
    def updates(module: Any) -> list[Any]:
        averages = module.average_incrementally_updates(None, 8)
        optimizer = module.process(optax.identity(), averages, optax.adam(0.01))
        params, found = jnp.ones(100, jnp.bfloat16), []
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for row in np.random.default_rng(0).normal(size=(16, 100)):
            moved, state = update(jnp.asarray(row, jnp.bfloat16), state, params)
            found.append(moved)
        return found

    path = patched / "optax/experimental/_aggregating.py"
    spec = importlib.util.spec_from_file_location("patched", path)
    new = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(new)
    np.testing.assert_array_equal(updates(new), updates(aggregating))
