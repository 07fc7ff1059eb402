"""A count that is a constant leaves an operation between a gradient and its sum.

Without it, some versions of XLA move the all-reduce of the gradient out of the loop
over a window, and lose most of it. `python test_constant_counts.py` compiles for H200s,
before jax starts a backend.
"""

import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.chips import CHIPS
from optax_tokenaccum import window_value_and_grad

WORDS, WIDTH, ROWS, K = 64, 32, 16, 4


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = params["table"][batch] @ params["kernel"]
    return jnp.sum(jax.nn.logsumexp(hidden, -1)), batch.size


def shapes() -> Any:
    table = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
    kernel = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((K, ROWS, 8), jnp.int32)
    return {"table": table, "kernel": kernel}, tokens


def lowered(*given: Any) -> Any:
    return jax.jit(window_value_and_grad(loss_fn)).lower(*given)


# In the program as JAX hands it to XLA, which drops the operation in the end.
OPERATION = re.compile(r"stablehlo.reduce_precision .*tensor<64x32xf32>")


def test_the_operation_is_between_the_gradient_of_a_table_and_its_sum():
    assert OPERATION.search(lowered(*shapes()).as_text())
    by_hand = jax.value_and_grad(lambda *given: loss_fn(*given)[0])
    params, tokens = shapes()
    one = jax.ShapeDtypeStruct(tokens.shape[1:], tokens.dtype)
    assert not OPERATION.search(jax.jit(by_hand).lower(params, one).as_text())


@pytest.mark.slow
@pytest.mark.skipif(bool(CHIPS["H200"].missing()), reason="needs what compiles")
def test_the_gradient_of_a_table_is_reduced_in_the_loop_compiled_ahead_for_eight_gpus():
    ended = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert OPERATION.search(ended.stdout)
    assert re.search(r"all-reduce.*while/body", ended.stdout)


if __name__ == "__main__":
    mesh = jax.sharding.Mesh(CHIPS["H200"].devices()[:8], "data")

    def placed(x: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params, tokens = shapes()
    program = lowered(jax.tree.map(placed, params), placed(tokens, None, "data"))
    print(program.as_text(), program.compile().as_text())
