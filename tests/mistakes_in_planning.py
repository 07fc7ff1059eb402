"""Rows of docs/bad_input.md: sequences, their padding, and planned windows."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from mistakes import BATCH, PARAMS, SGD, Mistake, Row, loss_fn, train_step, window_step

from optax_tokenaccum import (
    MicroBatchPlan,
    make_window_step,
    pad_micro_batch,
    pad_window,
    plan_window,
    window_value_and_grad,
)

SEQUENCES = [{"ids": np.arange(n), "mask": np.ones(n, bool)} for n in (2, 4)]
PLAN = MicroBatchPlan(np.array([1, 0]), 2, 4)
WINDOW = pad_window([np.ones(n) for n in (2, 4)], pad_values=0, max_tokens=4)
TRAIN_STEP, WINDOW_STEP = train_step(SGD, 2), window_step(SGD)
PLANNED_STEP = make_window_step(loss_fn, SGD)
NOISE_STEP = make_window_step(loss_fn, SGD, gradient_noise=True)


def padded(sequences: Any = SEQUENCES, pad_values: Any = 0) -> list[Mistake]:
    """Return calls of both padding functions."""
    return [
        lambda _: pad_micro_batch(sequences, PLAN, pad_values=pad_values),
        lambda _: pad_window(sequences, max_tokens=8, pad_values=pad_values),
    ]


def padded_by(plan: MicroBatchPlan) -> list[Mistake]:
    return [lambda _: pad_micro_batch(SEQUENCES, plan, pad_values=0)]


def changed(**leaves: Any) -> list[Any]:
    """Return the sequences, with other leaves in the second one."""
    return [SEQUENCES[0], SEQUENCES[1] | leaves]


def with_losses_of_rows(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * jnp.sum(batch), (batch.size, batch.sum(1))


PLANNING: list[Row] = [
    (
        "no `pad_values`",
        TypeError,
        [
            lambda _: pad_micro_batch(SEQUENCES, PLAN),
            lambda _: pad_window(SEQUENCES, max_tokens=8),
        ],
    ),
    ("a pad value that its leaf cannot hold", ValueError, padded(pad_values=-100)),
    (
        "`pad_values` of another structure",
        ValueError,
        padded(pad_values={"ids": 0}),
    ),
    ("a pad value that is not a number", TypeError, padded(pad_values="0")),
    ("a batch instead of sequences", TypeError, padded(SEQUENCES[0])),
    ("no sequence", ValueError, padded([])),
    (
        "tokens in a list",
        ValueError,
        padded([{"ids": [1, 2, 3]}, {"ids": [4, 5, 6]}]),
    ),
    (
        "sequences of different structures",
        ValueError,
        padded(changed(ids=[1, 2, 3, 4])),
    ),
    (
        "sequences of different dtypes or shapes",
        ValueError,
        padded(changed(ids=np.ones((4, 1)))),
    ),
    ("sequences of texts", TypeError, padded([{"ids": np.array(["ab"])}])),
    (
        "leaves of different lengths in a sequence",
        ValueError,
        padded(changed(ids=np.arange(3))),
    ),
    (
        "a plan of other sequences",
        ValueError,
        padded_by(PLAN._replace(indices=np.array([2]))),
    ),
    ("a plan of shorter sequences", ValueError, padded_by(PLAN._replace(length=3))),
    (
        "a plan with more sequences than rows",
        ValueError,
        padded_by(PLAN._replace(num_rows=1)),
    ),
    (
        "a sequence longer than every bucket",
        ValueError,
        [
            lambda _: plan_window([2, 4], max_tokens=8, length_buckets=[2]),
            lambda _: pad_window(
                SEQUENCES, max_tokens=8, length_buckets=[2], pad_values=0
            ),
        ],
    ),
    (
        "a window of more than `max_sequences`",
        ValueError,
        [lambda _: pad_window(SEQUENCES, pad_values=0, max_tokens=8, max_sequences=1)],
    ),
    (
        "`num_micro_batches` with a `PlannedWindow`",
        ValueError,
        [
            lambda keep: PLANNED_STEP(
                keep(PLANNED_STEP.init(PARAMS)), WINDOW, num_micro_batches=1
            ),
            lambda _: window_value_and_grad(loss_fn)(
                PARAMS, WINDOW, num_micro_batches=1
            ),
        ],
    ),
    (
        "a `PlannedWindow` in a train step",
        TypeError,
        [
            lambda keep: TRAIN_STEP(keep(TRAIN_STEP.init(PARAMS)), WINDOW),
            lambda keep: TRAIN_STEP.accumulate(keep(TRAIN_STEP.init(PARAMS)), WINDOW),
        ],
    ),
    (
        "`gradient_noise` with `every_k_schedule=1`",
        ValueError,
        [lambda _: train_step(SGD, 1, gradient_noise=True)],
    ),
    (
        "`gradient_noise` with a `PlannedWindow`",
        ValueError,
        [lambda keep: NOISE_STEP(keep(NOISE_STEP.init(PARAMS)), WINDOW)],
    ),
    (
        "`aux` of another shape for another length",
        ValueError,
        [
            lambda _: window_value_and_grad(with_losses_of_rows, has_aux=True)(
                PARAMS, WINDOW
            )
        ],
    ),
    (
        "one batch given to `step.compile`",
        TypeError,
        [
            lambda keep, step=step, batch=batch: step.compile(
                keep(step.init(PARAMS)), batch
            )
            for step in (TRAIN_STEP, WINDOW_STEP)
            for batch in (BATCH, {"x": BATCH}, WINDOW)
        ],
    ),
]
