"""`upstream/`: patches that apply, with which optax's own tests pass, and its table.

    python -m tests.docs.test_upstream

prints the table: what ways to accumulate hold on stacked layers, as compiled. `--tpu`
compiles for one chip of a TPU v5e and needs no TPU, only `pip install libtpu`.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.experimental import aggregating

from benchmarks.chips import CHIPS
from optax_tokenaccum import make_window_step, token_accumulation

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


@pytest.mark.slow
def test_new_cells_of_the_notebook_run(capsys):
    blocks = re.findall(r"(?:^\+(?!\+).*\n)+", PATCHES[0].read_text(), re.MULTILINE)
    added = re.sub(r"^\+", "", max(blocks, key=len), flags=re.MULTILINE)
    cells = json.loads("[" + added.rstrip(",\n") + "]")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    exec("import jax, optax, numpy as np, jax.numpy as jnp\n" + "\n".join(code), {})
    assert len(code) == capsys.readouterr().out.count("relative error") == 2


@pytest.mark.slow
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 8])
def test_patched_aggregating_without_a_count_is_bit_for_bit_the_released(
    patched, k, dtype
):
    def updates(module: Any) -> list[Any]:
        averages = module.average_incrementally_updates(None, k)
        optimizer = module.process(optax.identity(), averages, optax.adam(0.01))
        params, found = jnp.ones(100, dtype), []
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for row in np.random.default_rng(0).normal(size=(2 * k, 100)):
            moved, state = update(jnp.asarray(row, dtype), state, params)
            found.append(moved)
        return found

    path = patched / "optax/experimental/_aggregating.py"
    spec = importlib.util.spec_from_file_location("patched", path)
    new = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(new)
    np.testing.assert_array_equal(updates(new), updates(aggregating))


K, ROWS, LAYERS, WIDTH, INNER = 4, 8, 12, 4096, optax.adamw(1e-3)


@functools.partial(jax.value_and_grad, has_aux=True)
def value_and_grad(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """A residual network of stacked layers; rows of zeros are padding."""
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, params)
    return jnp.sum(x**2), jnp.sum(jnp.any(batch != 0, axis=1))


def table(device: Any = None) -> Iterator[str]:
    """Yield lines: a way, how many sums it keeps, and bytes in gradients."""

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=device), tree)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=device)

    params, batch = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)

    def loop(
        optimizer: Any, *counts: str, gradient: Any = value_and_grad, rows: int = ROWS
    ) -> jax.stages.Lowered:
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, batch: Any) -> Any:
            (_, n), grads = gradient(params, batch)
            count = dict.fromkeys(counts, n)
            updates, state = optimizer.update(grads, state, params, **count)
            return optax.apply_updates(params, updates), state

        state = placed(jax.eval_shape(optimizer.init, params))
        return step.lower(params, state, shape(rows, WIDTH))

    averages = aggregating.average_incrementally_updates(None, K)
    aggregated = aggregating.process(optax.identity(), averages, INNER)
    window_step = make_window_step(value_and_grad.__wrapped__, INNER)
    state = placed(jax.eval_shape(window_step.init, params))
    programs = {
        "gradients alone | 0": jax.jit(value_and_grad).lower(params, batch),
        "`optax.MultiSteps` | 1": loop(optax.MultiSteps(INNER, K)),
        "`token_accumulation` | 1": loop(token_accumulation(INNER, K), "num_tokens"),
        "`optax.experimental.aggregating` | 1": loop(aggregated),
        "`make_window_step` | 0": window_step.lower(state, shape(K, ROWS, WIDTH)),
    }
    if hasattr(optax.microbatching, "token_mean"):  # patches 2 and 3
        mean = optax.microbatching.token_mean()
        gradient = optax.microbatching.microbatch(value_and_grad, 1, ROWS, mean)
        whole = loop(INNER, gradient=gradient, rows=K * ROWS)
        programs["`optax.microbatch`, `token_mean` of patch 2 | 0"] = whole
        counted = loop(aggregated, "num_tokens")
        programs["`aggregating`, `num_tokens` of patch 3 | 1"] = counted
    for way, program in programs.items():
        found = program.compile().memory_analysis()
        held = found.temp_size_in_bytes + found.output_size_in_bytes
        held -= found.alias_size_in_bytes
        yield f"| {way} | {held / (LAYERS * WIDTH * WIDTH * 4):.2f} |"


VERSIONS = f"(jax {jax.__version__}, optax {optax.__version__})"


@pytest.mark.slow
def test_the_page_has_the_table_of_this_version():
    if VERSIONS not in PAGE:
        pytest.skip(f"the page has a table of other versions than {VERSIONS}")
    assert all(line in PAGE for line in table())


if __name__ == "__main__":
    device = None
    if "--tpu" in sys.argv[1:]:
        device = jax.sharding.SingleDeviceSharding(CHIPS["v5e"].devices()[0])
    print("\n".join([*table(device), "", VERSIONS]))
