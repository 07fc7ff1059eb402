"""The recipes of `docs/own_your_step.md`: what each form computes, and what ours does.

Each of the four forms has the arithmetic of the original in the fewest lines: what it
averages, in which dtype, and what it divides by. None of them is the original's code.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import chex
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
NUM_TOKENS = float(BATCH["mask"].sum())


@functools.cache
def reference() -> Any:
    return helpers.float64_gradient(PARAMS, BATCH)


def masked_sum_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Masks by multiplying, like all four forms, which lets a NaN through."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        helpers.logits_of(params, batch["tokens"]), batch["labels"]
    )
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def scanned(
    loss_fn: Callable[..., Any], params: Any, micro_batches: Any, sums_like: Any
) -> tuple[Any, jax.Array, int]:
    """Return summed gradients and counts, and the number of micro-batches."""

    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        added = jax.grad(loss_fn, has_aux=True)(params, micro_batch)
        return jax.tree.map(operator.add, sums, added), None

    zeros = jax.tree.map(jnp.zeros_like, (sums_like, jnp.float32(0)))
    (gradients, counts), _ = jax.lax.scan(add, zeros, micro_batches)
    return gradients, counts, len(jax.tree.leaves(micro_batches)[0])


def divided(tree: Any, divisor: Any) -> Any:
    return jax.tree.map(lambda x: (x / divisor).astype(x.dtype), tree)


def hand_written(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    """The mean of means, each over the tokens of its micro-batch."""

    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, count = loss_fn(params, batch)
        return loss_sum / count, count

    gradients, _, k = scanned(mean_fn, params, micro_batches, params)
    return divided(gradients, k)


def maxtext(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    """Sums in the parameters' dtype, divided by the window's tokens."""
    gradients, counts, _ = scanned(loss_fn, params, micro_batches, params)
    return divided(gradients, counts)


def axlearn(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    """The mean of means in float32, each over at least one token."""

    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, count = loss_fn(params, batch)
        return loss_sum / jnp.maximum(count, 1), count

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    gradients, _, k = scanned(mean_fn, params, micro_batches, wide)
    return divided(gradients, k)


def levanter(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    """The mean of means, where 0/0 is replaced after the division."""

    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, count = loss_fn(params, batch)
        return jnp.where(count != 0, loss_sum / count, 0), count

    gradients, _, k = scanned(mean_fn, params, micro_batches, params)
    return divided(gradients, k)


def ours(loss_fn: Any, params: Any, micro_batches: Any) -> Any:
    return window_value_and_grad(loss_fn)(params, micro_batches)[1]


FORMS = [hand_written, maxtext, axlearn, levanter]


@functools.cache
def program(form: Any) -> Any:
    return jax.jit(functools.partial(form, masked_sum_fn))


@pytest.mark.parametrize("form", FORMS)
def test_ours_is_the_full_batch_and_a_mean_of_means_is_not(form: Any):
    micro_batches = split_batch(BATCH, K)
    exact = program(ours)(PARAMS, micro_batches)
    assert helpers.relative_error(exact, reference()) < RTOL
    # On the uncut batch every form is right, so the arithmetic above is fair.
    uncut = program(form)(PARAMS, split_batch(BATCH, 1))
    assert helpers.relative_error(uncut, reference()) < RTOL
    theirs = program(form)(PARAMS, micro_batches)
    error = helpers.relative_error(theirs, reference())
    assert error < RTOL if form is maxtext else error > 0.01, error


@pytest.mark.parametrize("form", FORMS)
def test_a_micro_batch_without_tokens(form: Any):
    mask = BATCH["mask"].copy()
    mask[::K] = 0  # the rows that split_batch puts into micro-batch 0
    batch = BATCH | {"mask": mask}
    expected = helpers.float64_gradient(PARAMS, batch)
    micro_batches = split_batch(batch, K)
    assert not micro_batches["mask"][0].any()
    exact = program(ours)(PARAMS, micro_batches)
    assert helpers.relative_error(exact, expected) < RTOL
    error = helpers.relative_error(program(form)(PARAMS, micro_batches), expected)
    if form is maxtext:
        assert error < RTOL
    elif form is axlearn:
        assert error > 0.01, error  # it is one of the k means
    else:
        assert np.isnan(error), error


def test_window_without_tokens_is_0_where_the_quotient_of_sums_is_nan():
    batch = BATCH | {"mask": np.zeros_like(BATCH["mask"])}
    micro_batches = split_batch(batch, K)
    theirs = program(maxtext)(PARAMS, micro_batches)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(theirs))
    exact = program(ours)(PARAMS, micro_batches)
    chex.assert_trees_all_equal(exact, jax.tree.map(np.zeros_like, PARAMS))


@pytest.mark.parametrize(("form", "expected"), [(maxtext, 0.5), (ours, 1.0)])
def test_512_ones_summed_for_a_bfloat16_parameter(form: Any, expected: float):
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w.astype(jnp.float32) * x), jnp.float32(x.size)

    gradient = form(loss_fn, jnp.bfloat16(1), jnp.ones((512, 1)))
    assert (float(gradient), gradient.dtype) == (expected, jnp.bfloat16)


def test_dropout_keys_differ_after_a_micro_batch_without_tokens():
    def loss_fn(w: Any, batch: Any, *, rng: Any) -> Any:
        return jnp.sum(w * batch), (jnp.sum(batch), jax.random.key_data(rng))

    tokens, key = jnp.asarray([[3.0], [0.0], [5.0], [2.0]]), jax.random.key(0)
    f = window_value_and_grad(loss_fn, has_aux=True)
    (_, (_, keys)), _ = f(jnp.float32(1), tokens, rng=key)
    assert len(np.unique(keys, axis=0)) == 4
    # Folded with the token count so far, as in MaxText, two of the keys are equal.
    so_far = jnp.cumsum(tokens[:, 0]) - tokens[:, 0]
    theirs = jax.vmap(lambda n: jax.random.fold_in(key, n))(so_far.astype(jnp.int32))
    assert len(np.unique(jax.random.key_data(theirs), axis=0)) == 3


# A small regression: the weight of an auxiliary loss does not depend on the model.
WEIGHTS = {"w": jnp.asarray(np.linspace(0.5, 1.0, helpers.MAX_LENGTH), jnp.float32)}


def squares(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    errors = (params["w"] - batch["labels"] / helpers.VOCABULARY) ** 2
    return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])


def penalty(params: Any, batch: Any) -> jax.Array:
    """An auxiliary loss that does not depend on the batch."""
    return jnp.mean(params["w"] ** 2)


def token_mean(params: Any, batch: Any) -> jax.Array:
    """A mean over the tokens of the loss sum, like a z-loss."""
    outputs = (params["w"] * batch["tokens"]) ** 2
    return jnp.sum(outputs * batch["mask"]) / jnp.sum(batch["mask"])


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("auxiliary", [penalty, token_mean])
def test_scale_of_an_auxiliary_loss(auxiliary: Any, k: int):
    def times_tokens(params: Any, batch: Any) -> Any:
        loss_sum, num_tokens = squares(params, batch)
        return loss_sum + 0.1 * auxiliary(params, batch) * num_tokens, num_tokens

    def as_it_is(params: Any, batch: Any) -> Any:
        """What MaxText adds: the auxiliary loss is divided by the tokens."""
        loss_sum, num_tokens = squares(params, batch)
        return loss_sum + 0.1 * auxiliary(params, batch), num_tokens

    def k_times(params: Any, batch: Any) -> Any:
        """What the Trainer of transformers adds: all of it in every micro-batch."""
        loss_sum, num_tokens = squares(params, batch)
        return loss_sum + 0.1 * auxiliary(params, batch) * NUM_TOKENS, num_tokens

    @jax.jit
    def gradients(micro_batches: Any) -> Any:
        return [
            window_value_and_grad(f)(WEIGHTS, micro_batches)[1]
            for f in (times_tokens, as_it_is, k_times, squares)
        ]

    right, wrong, too_often, without = gradients(split_batch(BATCH, k))
    share = jax.grad(lambda params: 0.1 * auxiliary(params, BATCH))(WEIGHTS)
    expected = jax.tree.map(operator.add, without, share)
    assert helpers.relative_error(right, expected) < RTOL
    assert helpers.relative_error(wrong, expected) > 0.01
    assert (helpers.relative_error(too_often, expected) > 0.01) == (k > 1)
    if auxiliary is penalty:  # too small by a factor of a micro-batch's tokens
        seen = jax.tree.map(operator.sub, wrong, without)
        seen = jax.tree.map(lambda x: x * (NUM_TOKENS / k), seen)
        assert helpers.relative_error(seen, share) < 1e-2


def test_evaluation_adds_sums_and_counts_and_divides_once():
    # Sorted by length, as evaluation data often is, in batches of 12, 12 and 8 rows.
    rows = np.argsort(BATCH["mask"].sum(1), stable=True)
    batches = [
        {name: leaf[chosen] for name, leaf in BATCH.items()}
        for chosen in (rows[:12], rows[12:24], rows[24:])
    ]
    eval_step = jax.jit(squares)
    sums = [eval_step(WEIGHTS, batch) for batch in batches]
    loss = sum(loss_sum for loss_sum, _ in sums) / sum(n for _, n in sums)
    loss_sum, num_tokens = squares(WEIGHTS, BATCH)
    np.testing.assert_allclose(loss, loss_sum / num_tokens, rtol=1e-6)
    mean_of_means = np.mean([loss_sum / n for loss_sum, n in sums])
    assert abs(mean_of_means / loss - 1) > 0.01


def test_partial_window_of_stacked_micro_batches_and_of_a_padded_batch():
    k, rows = 4, 12  # of 16 rows: the last of 4 micro-batches of 4 rows is missing
    batch = {name: leaf[:rows] for name, leaf in BATCH.items()}
    padded = {
        name: np.concatenate([leaf, np.zeros_like(leaf[:4])])
        for name, leaf in batch.items()
    }
    stacked = {name: leaf.reshape(k, 4, -1) for name, leaf in padded.items()}
    f = jax.jit(window_value_and_grad(squares))

    def mean(params: Any) -> jax.Array:
        loss_sum, num_tokens = squares(params, batch)
        return loss_sum / num_tokens

    expected, num_tokens = jax.grad(mean)(WEIGHTS), batch["mask"].sum()
    for micro_batches, n in ((stacked, 3), (split_batch(padded, k), k)):
        (_, (counted, _)), got = f(WEIGHTS, micro_batches, num_micro_batches=n)
        assert helpers.relative_error(got, expected) < RTOL
        assert float(counted) == num_tokens
    # `split_batch` spreads padding over all k, so running fewer would drop real rows.
    (_, (counted, _)), _ = f(WEIGHTS, split_batch(padded, k), num_micro_batches=3)
    assert float(counted) < num_tokens
