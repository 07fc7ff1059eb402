"""No program returns one value in several donated buffers: XLA for GPUs loses it.

`python test_donated_buffers.py` compiles for an H200, before jax starts a backend.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.stages import Lowered

from benchmarks import ahead
from benchmarks.chips import CHIPS
from benchmarks.compiled_text import in_several_buffers
from benchmarks.ways import WAYS, apply_sums
from benchmarks.workloads import stacked_layers

WRONG = "sums that are reset in the program that reads them"
OURS = "train step", "window step", "MultiSteps", "token_accumulation"
OPTIMIZERS = {"SGD": optax.sgd(0.1), "AdamW": optax.adamw(0.1)}


@pytest.mark.slow
@pytest.mark.skipif(bool(CHIPS["H200"].missing()), reason="needs what compiles")
def test_programs_ahead_return_no_value_in_several_donated_buffers():
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    wrong = found.pop(WRONG)
    assert len(wrong) == 2  # the layers' matrices have two shapes
    assert all(len(arguments) == 2 for arguments in wrong)
    names = {name.split(", ")[0] for name in found}
    assert names == {*OURS, "pair by hand", "optax.MultiSteps"}
    assert {name: x for name, x in found.items() if x} == {}


def lowered() -> Iterator[tuple[str, Lowered]]:
    """Yield programs, of a model with three layers of one shape."""
    place = ahead.Place(CHIPS["H200"].devices(), None)
    make = functools.partial(stacked_layers, 64, 3, length=16, scanned=False)
    workload = place.workload(make, False)
    window = place.window(workload, 2)
    for optimizer, inner in OPTIMIZERS.items():
        for way in (*OURS, "pair by hand", "optax.MultiSteps"):
            loop = WAYS[way].build(workload, inner, 2)
            if way in ahead.STEPS:
                state = loop.init(workload.params)
            else:
                state = place.state(workload.params, loop.init)
            for name, program in loop.lower(state, window).items():
                yield f"{way}, {optimizer}, {name}", program.lowered

    inner = OPTIMIZERS["SGD"]

    def close(params: Any, opt_state: Any, sums: Any) -> Any:
        updated = apply_sums(inner, params, opt_state, sums)
        return *updated, jax.tree.map(jnp.zeros_like, sums)

    init = WAYS["pair by hand"].build(workload, inner, 2).init
    state = place.state(workload.params, init)
    yield WRONG, jax.jit(close, donate_argnums=(0, 1, 2)).lower(*state)


if __name__ == "__main__":
    found = {
        name: in_several_buffers(program.compile().as_text() or "")
        for name, program in lowered()
    }
    print(json.dumps(found))
