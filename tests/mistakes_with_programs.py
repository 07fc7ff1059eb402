"""Rows of docs/bad_input.md: reading a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mistakes import BATCH, PARAMS, SGD, Row, eager, train_step

from optax_tokenaccum import collectives

STEP = train_step(SGD, 2)
LOWERED = STEP.accumulate.lower(jax.eval_shape(STEP.init, PARAMS), BATCH)
OVER_DATA = NamedSharding(Mesh(np.array(jax.devices()[:1]), "data"), PartitionSpec())
PLACED = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=OVER_DATA)
REPORTS = [
    collectives(jax.jit(jnp.sum).lower(x).compile()) for x in (PLACED, jnp.ones(2))
]

READING: list[Row] = [
    (
        "a program that is not compiled, given to `collectives`",
        TypeError,
        [
            lambda _, given=given: collectives(given)
            for given in (STEP, LOWERED, jax.jit(eager), LOWERED.compile().as_text())
        ],
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
]
