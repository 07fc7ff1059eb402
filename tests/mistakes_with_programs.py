"""Rows of docs/bad_input.md: reading a compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mistakes import BATCH, PARAMS, SGD, Row, eager, train_step

import optax_tokenaccum.nnx
from optax_tokenaccum import (
    collectives,
    largest_micro_batch,
    memory,
    token_accumulation,
)

STEP = train_step(SGD, 2)
NNX_STEP = optax_tokenaccum.nnx.make_train_step(lambda model, x: (model(x), len(x)))
MODEL = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
OPTIMIZER = nnx.Optimizer(MODEL, token_accumulation(SGD, 2), wrt=nnx.Param)
STATE = jax.eval_shape(STEP.init, PARAMS)
LOWERED = STEP.accumulate.lower(STATE, BATCH)
OVER_DATA = NamedSharding(Mesh(np.array(jax.devices()[:1]), "data"), PartitionSpec())
PLACED = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=OVER_DATA)
REPORTS = [
    collectives(jax.jit(jnp.sum).lower(x).compile()) for x in (PLACED, jnp.ones(2))
]


def batch_of(rows: int) -> list[Any]:
    return [
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), BATCH
        )
    ]


def fit(batch_of: Any, limit_bytes: float = 10) -> Any:
    return largest_micro_batch(STEP, STATE, batch_of, limit_bytes=limit_bytes)


def not_counted(keep: Any) -> None:
    x, closed_over = jnp.zeros(1000), jax.random.normal(jax.random.key(0), 1000)
    as_constant = jax.jit(lambda x: x + closed_over).lower(x)
    as_argument = jax.jit(lambda x, y: x + y).lower(x, closed_over)
    assert memory(as_constant.compile()).peak == 2 * x.nbytes
    assert memory(as_argument.compile()).peak == 3 * x.nbytes


READING: list[Row] = [
    (
        "a program that is not compiled, given to `collectives` or `memory`",
        TypeError,
        [
            lambda _, given=given, report=report: report(given)
            for report in (collectives, memory)
            for given in (STEP, LOWERED, jax.jit(eager), LOWERED.compile().as_text())
        ],
    ),
    (
        "something else than a step, given to `largest_micro_batch`",
        TypeError,
        [lambda _: largest_micro_batch(STEP.accumulate, STATE, batch_of)],
    ),
    (
        "a `limit_bytes` that is not a number",
        TypeError,
        [lambda _: largest_micro_batch(STEP, STATE, batch_of, limit_bytes="2GB")],
    ),
    (
        "a `limit_bytes` that is not finite",
        TypeError,
        [lambda _: fit(batch_of, float("inf"))],
    ),
    (
        "something else than a function, given as `batch_of`",
        TypeError,
        [
            lambda _: largest_micro_batch(STEP, batch_of, STATE),
            lambda _: largest_micro_batch(STEP, STATE, [BATCH]),
        ],
    ),
    (
        "something else than a model and its optimizer, given to "
        "`largest_micro_batch` with a step for NNX",
        TypeError,
        [
            lambda _: largest_micro_batch(NNX_STEP, MODEL, batch_of),
            lambda _: largest_micro_batch(NNX_STEP, (OPTIMIZER, MODEL), batch_of),
            lambda _: largest_micro_batch(NNX_STEP, (MODEL, OPTIMIZER, 0), batch_of),
            lambda _: largest_micro_batch(
                NNX_STEP, nnx.state((MODEL, OPTIMIZER)), batch_of
            ),
        ],
    ),
    (
        "`multiple_of` below 1",
        ValueError,
        [lambda _: largest_micro_batch(STEP, STATE, batch_of, multiple_of=0)],
    ),
    (
        "a `multiple_of` that is not an integer",
        TypeError,
        [lambda _: largest_micro_batch(STEP, STATE, batch_of, multiple_of=2.0)],
    ),
    (
        "a `batch_of` that returns one batch",
        TypeError,
        [lambda _: fit(lambda n: batch_of(n)[0]), lambda _: fit(lambda n: {"x": n})],
    ),
    (
        "a `batch_of` that returns no batch",
        ValueError,
        [lambda _: fit(lambda n: [])],
    ),
    (
        "a `batch_of` that returns the same shapes for other sizes",
        ValueError,
        [
            lambda _: fit(lambda n: batch_of(9)),
            lambda _: fit(lambda n: batch_of(n // 8)),
            lambda _: fit(lambda n: batch_of(min(n, 9)), 10**9),
        ],
    ),
    (
        "no micro-batch that fits",
        ValueError,
        [lambda _: fit(batch_of)],
    ),
    (
        "no `limit_bytes` on a CPU",
        ValueError,
        [lambda _: largest_micro_batch(STEP, STATE, batch_of)],
    ),
    (
        "`bytes` of an axis that the mesh does not have",
        ValueError,
        [lambda _: REPORTS[0].bytes(axes="model")],
    ),
    (
        "`bytes` of an axis of a program without a mesh",
        ValueError,
        [lambda _: REPORTS[1].bytes(axes="data")],
    ),
    (
        "an array that a program closes over, in `memory`",
        None,
        [not_counted],
    ),
]
