"""Rows of docs/bad_input.md: losses of tokens, and counts on their way."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from mistakes import BATCH, GRADS, PARAMS, SGD, Row, loss_fn

from optax_tokenaccum import (
    audit,
    check_loss_fn,
    reduce_loss,
    split_batch,
    with_num_tokens,
)

LOSSES, MASK = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
IDS = jnp.ones((2, 3), jnp.int32)
NORM = "seq-mean-token-sum-norm"


def run(_: Any, params: Any, micro_batches: Any) -> Any:
    return params


def reduced(*args: Any, mask: Any = MASK, **kwargs: Any) -> Any:
    return lambda _: reduce_loss(LOSSES, mask, *args, **kwargs)


REDUCING: list[Row] = [
    ("an unknown `reduction` of `reduce_loss`", ValueError, [reduced("mean")]),
    (
        '`"seq-mean-token-sum-norm"` without `max_length`, or another reduction with '
        "one",
        ValueError,
        [reduced(NORM), reduced("token-mean", max_length=3)],
    ),
    (
        "a `max_length` that is not positive",
        ValueError,
        [reduced(NORM, max_length=0)],
    ),
    (
        "`count_empty` where sequences without tokens look like padding, or do not "
        "matter",
        ValueError,
        [
            reduced("seq-mean-token-sum", count_empty=True),
            reduced("token-mean", count_empty=True, segment_ids=IDS),
        ],
    ),
    (
        "losses of tokens and a mask of another shape",
        ValueError,
        [
            reduced(mask=MASK[0]),
            reduced(mask=MASK[:, :2]),
            lambda _: reduce_loss(LOSSES[0], MASK[0]),
        ],
    ),
    (
        "`segment_ids` that are not integers, or of another shape",
        ValueError,
        [reduced(segment_ids=IDS[0]), reduced(segment_ids=LOSSES)],
    ),
    (
        "another word in `per` of `check_loss_fn`",
        ValueError,
        [lambda _: check_loss_fn(loss_fn, PARAMS, [BATCH], per="row")],
    ),
    (
        "one micro-batch in place of a list, in `audit` or `check_loss_fn`",
        TypeError,
        [
            lambda _: check_loss_fn(loss_fn, PARAMS, {"x": BATCH}),
            lambda _: audit(run, loss_fn, PARAMS, {"x": BATCH}),
        ],
    ),
    (
        "an `rtol` of `audit` that is not between 0 and 1",
        ValueError,
        [
            lambda _, rtol=rtol: audit(run, loss_fn, PARAMS, [BATCH], rtol=rtol)
            for rtol in (0, -1e-3, 1, np.nan)
        ],
    ),
    (
        "a `tx` without extra arguments in `with_num_tokens`",
        TypeError,
        [lambda _: with_num_tokens(optax.GradientTransformation(*SGD), 3)],
    ),
    (
        "a `tx` that does not accumulate in `with_num_tokens`",
        ValueError,
        [
            lambda keep: with_num_tokens(SGD, 3).update(
                GRADS, keep(SGD.init(PARAMS)), PARAMS
            )
        ],
    ),
    (
        "`pad_values` of `split_batch` for other leaves than those of the batch",
        ValueError,
        [
            lambda _: split_batch(
                {"x": np.ones(5), "mask": np.ones(5)}, 2, pad_values={"x": 0}
            )
        ],
    ),
]
