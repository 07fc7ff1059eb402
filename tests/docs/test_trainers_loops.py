"""Loops of `docs/trainers.md` on ragged data: what each computes, and what ours does.

Each form averages and divides as the original, and is not the original's code.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import split_batch, window_value_and_grad

K = 8
RTOL = helpers.RTOL["float32"]
PARAMS, BATCH = helpers.init_params(0), helpers.ragged_batch(0)
# Floats: XLA turns a product with bools into a select, and a select stops a NaN.
BATCH["mask"] = BATCH["mask"].astype(np.float32)


def masked_sum_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Masks by multiplying, like all four forms, which lets a NaN through."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        helpers.logits_of(params, batch["tokens"]), batch["labels"]
    )
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def summed(loss_fn: Any, params: Any, micro_batches: Any) -> tuple[Any, jax.Array]:
    """Return the sums of gradients, in the parameters' dtype, and of counts."""

    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        added = jax.grad(loss_fn, has_aux=True)(params, micro_batch)
        return jax.tree.map(operator.add, sums, added), None

    zeros = jax.tree.map(jnp.zeros_like, (params, jnp.float32(0)))
    return jax.lax.scan(add, zeros, micro_batches)[0]


def divided(tree: Any, divisor: Any) -> Any:
    return jax.tree.map(lambda x: (x / divisor).astype(x.dtype), tree)


def mean_of_means(mean: Callable[[Any, Any], Any]) -> Any:
    def form(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
        def mean_fn(params: Any, batch: Any) -> Any:
            loss_sum, count = loss_fn(params, batch)
            return mean(loss_sum, count), count

        gradients, _ = summed(mean_fn, params, micro_batches)
        return divided(gradients, len(jax.tree.leaves(micro_batches)[0]))

    return form


def maxtext(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    return divided(*summed(loss_fn, params, micro_batches))


def ours(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    return window_value_and_grad(loss_fn)(params, micro_batches)[1]


FORMS = {
    "written by hand": mean_of_means(lambda loss_sum, n: loss_sum / n),
    "maxtext": maxtext,
    "axlearn": mean_of_means(lambda loss_sum, n: loss_sum / jnp.maximum(n, 1)),
    # 0/0 is replaced after the division.
    "levanter": mean_of_means(lambda loss_sum, n: jnp.where(n != 0, loss_sum / n, 0)),
}


@functools.cache
def program(form: Any) -> Any:
    return jax.jit(functools.partial(form, masked_sum_fn))


@pytest.mark.parametrize(
    "name", [x if x == "maxtext" else helpers.slow(x) for x in FORMS]
)
def test_a_form_next_to_ours(name: str):
    form, micro_batches = program(FORMS[name]), split_batch(BATCH, K)
    expected = helpers.float64_gradient(PARAMS, BATCH)
    exact = program(ours)(PARAMS, micro_batches)
    assert helpers.relative_error(exact, expected) < RTOL
    # On the uncut batch every form is right, so the arithmetic above is fair.
    uncut = form(PARAMS, split_batch(BATCH, 1))
    assert helpers.relative_error(uncut, expected) < RTOL
    error = helpers.relative_error(form(PARAMS, micro_batches), expected)
    assert error < RTOL if name == "maxtext" else error > 0.01, error

    # A micro-batch without tokens: the rows that split_batch puts into micro-batch 0.
    micro_batches["mask"] = micro_batches["mask"].copy()
    micro_batches["mask"][0] = 0
    rows = jax.tree.map(lambda x: np.concatenate(x), micro_batches)
    expected = helpers.float64_gradient(PARAMS, rows)
    exact = program(ours)(PARAMS, micro_batches)
    assert helpers.relative_error(exact, expected) < RTOL
    error = helpers.relative_error(form(PARAMS, micro_batches), expected)
    if name == "maxtext":
        assert error < RTOL
    elif name == "axlearn":
        assert error > 0.01, error  # it is one of the k means
    else:
        assert np.isnan(error), error


@pytest.mark.parametrize(("form", "expected"), [(maxtext, 0.5), (ours, 1.0)])
def test_512_ones_summed_for_a_bfloat16_parameter(form: Any, expected: float):
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w.astype(jnp.float32) * x), jnp.float32(x.size)

    gradient = form(loss_fn, jnp.bfloat16(1), jnp.ones((512, 1)))
    assert (float(gradient), gradient.dtype) == (expected, jnp.bfloat16)
