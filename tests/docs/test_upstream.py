"""`docs/upstream.md`: patches that apply and are exact, its table, the bug report."""

import importlib.util
import json
import operator
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import upstream_bytes
from optax.experimental import aggregating

DOCS = Path(__file__).parents[2] / "docs"
PATCHES = sorted(DOCS.glob("upstream/*.patch"))
K, PARAMS, BATCH = 4, helpers.init_params(0), helpers.ragged_batch(0)
EXPECTED = helpers.float64_gradient(PARAMS, BATCH)


def apply(patch: Path, folder: Path, option: str) -> str:
    """Run `git apply` there, as outside of any repository."""
    command = ["git", "apply", option, str(patch)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    options = {"cwd": folder, "env": environment, "check": True, "text": True}
    return subprocess.run(command, stdout=subprocess.PIPE, **options).stdout


@pytest.fixture(scope="module")
def patched(tmp_path_factory: Any) -> Callable[[str], ModuleType]:
    """Load a file of the installed optax after the patches, from a copy."""
    if optax.__version__ != "0.2.8":
        pytest.skip(f"the patches are for optax 0.2.8, not {optax.__version__}")
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(optax.__file__).parent, folder / "optax")
    for patch in PATCHES:  # of what is installed: no notebook, no page
        apply(patch, folder, "--include=optax/*")

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location("patched", folder / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_patches_are_well_formed_and_end_in_their_tests(tmp_path):
    assert [patch.name[:5] for patch in PATCHES] == ["0001-", "0002-", "0003-"]
    files = [apply(patch, tmp_path, "--numstat").split()[2::3] for patch in PATCHES]
    notebook = "examples/gradient_accumulation.ipynb"
    assert files[0] == [notebook, "optax/transforms/_accumulation.py"]
    assert all(names[-1].endswith("_test.py") for names in files[1:])


def test_new_cells_of_the_notebook_run(capsys):
    blocks = re.findall(r"(?:^\+(?!\+).*\n)+", PATCHES[0].read_text(), re.MULTILINE)
    added = re.sub(r"^\+", "", max(blocks, key=len), flags=re.MULTILINE)
    cells = json.loads("[" + added.rstrip(",\n") + "]")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    exec("import jax, optax, numpy as np, jax.numpy as jnp\n" + "\n".join(code), {})
    assert len(code) == capsys.readouterr().out.count("relative error") == 2


def test_patched_microbatching_is_exact_and_mean_is_not(patched):
    def error(module: ModuleType, loss_fn: Any, accumulator: Any) -> float:
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        rows = helpers.ROWS // K
        gradient = module.microbatch(value_and_grad, 1, rows, accumulator)
        return helpers.relative_error(gradient(PARAMS, BATCH)[1], EXPECTED)

    new = patched("optax/microbatching/_microbatching.py")
    exact = error(new, helpers.loss_sum_fn, new.token_mean())
    assert exact < helpers.RTOL["float32"]
    types = optax.microbatching.AccumulationType
    mean = (types.MEAN, types.SUM), types.MEAN
    assert error(optax.microbatching, helpers.loss_mean_fn, mean) > 0.01


def test_patched_micro_vmap_sums_in_float32_and_sum_does_not(patched):
    def mean(module: ModuleType, accumulator: Any) -> Any:
        def of_row(x: Any) -> Any:
            return (x, x), x

        options = {"microbatch_size": 257, "accumulator": accumulator}
        return module.micro_vmap(of_row, **options)(jnp.ones(771, jnp.bfloat16))[1]

    new = patched("optax/microbatching/_microbatching.py")
    assert mean(new, new.token_mean()) == 1
    assert mean(optax.microbatching, optax.microbatching.AccumulationType.SUM) != 771


def test_patched_aggregating_is_exact_and_the_released_is_not(patched):
    def gradient(module: ModuleType, counted: bool) -> Any:
        averages = module.average_incrementally_updates(None, K)
        optimizer = module.process(optax.identity(), averages, optax.sgd(1.0))
        state = optimizer.init(PARAMS)
        for batch in helpers.cut(BATCH, K):
            grads, n = jax.grad(helpers.loss_mean_fn, has_aux=True)(PARAMS, batch)
            count = {"num_tokens": n} if counted else {}
            updates, state = optimizer.update(grads, state, PARAMS, **count)
        return jax.tree.map(operator.neg, updates)

    new = patched("optax/experimental/_aggregating.py")
    exact = gradient(new, counted=True)
    assert helpers.relative_error(exact, EXPECTED) < helpers.RTOL["float32"]
    released = gradient(aggregating, counted=False)
    assert helpers.relative_error(released, EXPECTED) > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 8])
def test_patched_aggregating_without_a_count_is_bit_for_bit_the_released(
    patched, k, dtype
):
    def updates(module: ModuleType) -> list[Any]:
        averages = module.average_incrementally_updates(None, k)
        optimizer = module.process(optax.identity(), averages, optax.adam(0.01))
        params = jnp.ones(100, dtype)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        rows = np.random.default_rng(0).normal(size=(2 * k, 100))
        found = []
        for row in rows:
            moved, state = update(jnp.asarray(row, dtype), state, params)
            found.append(moved)
        return found

    new = patched("optax/experimental/_aggregating.py")
    np.testing.assert_array_equal(updates(new), updates(aggregating))


@pytest.mark.parametrize("k", [1, 2])
def test_patched_aggregating_raises_for_a_misspelled_count(patched, k):
    new = patched("optax/experimental/_aggregating.py")
    anything = optax.chain(optax.identity())  # takes any extra argument
    averages = new.average_incrementally_updates(None, k)
    optimizer = new.process(anything, averages, optax.sgd(1.0))
    params = jnp.ones(3)
    state = optimizer.init(params)
    optimizer.update(params, state, params, num_tokens=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_token'"):
        optimizer.update(params, state, params, num_token=2)


def test_the_report_prints_what_it_says(capsys):
    report = (DOCS / "reports/optax_notebook.md").read_text()
    blocks = r"```python\n(.*?)```.*?```text\n(.*?)```"
    program, printed = re.search(blocks, report, re.DOTALL).groups()
    exec(program, {})
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_the_page_has_the_table_of_this_version(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["upstream_bytes.py"])
    upstream_bytes.main()
    *table, versions = capsys.readouterr().out.strip().splitlines()
    page = (DOCS / "upstream.md").read_text()
    if versions not in page:
        pytest.skip(f"the page has a table of other versions than {versions}")
    assert all(line in page.split(versions)[0] for line in table)
