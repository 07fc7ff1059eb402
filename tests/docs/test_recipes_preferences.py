"""The recipe of `docs/recipes/preference_loss.md`: weighted pairs of sequences."""

import functools
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import check_loss_fn, make_train_step

pytestmark = pytest.mark.slow

K = 8
RTOL = helpers.RTOL["float32"]
PARAMS, REFERENCE = helpers.init_params(0), helpers.init_params(1)
# Keeps the gradient that it receives, see tests/core/test_exactness.py.
SGD = optax.sgd(1.0, momentum=0.0)


def log_probs(params: Any, sequences: Any) -> jax.Array:
    """Return the log-probability of each sequence, summed over its tokens."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        helpers.logits_of(params, sequences["tokens"]), sequences["labels"]
    )
    return -jnp.sum(jnp.where(sequences["mask"], losses, 0), axis=-1)


def pairs(rows: int = helpers.ROWS) -> dict[str, Any]:
    """Return pairs of ragged sequences, each with a weight and a reference."""
    chosen, rejected = (helpers.ragged_batch(seed, rows) for seed in (0, 1))
    reference = [np.asarray(log_probs(REFERENCE, x)) for x in (chosen, rejected)]
    return {
        "chosen": chosen,
        "rejected": rejected,
        "reference": reference[0] - reference[1],
        "weight": np.random.default_rng(2).uniform(0.1, 1, rows).astype(np.float32),
    }


def weighted(batch: Any, losses: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(batch["weight"] * losses), jnp.sum(batch["weight"])


def gain(params: Any, batch: Any) -> jax.Array:
    return log_probs(params, batch["chosen"]) - log_probs(params, batch["rejected"])


def reference_in_the_batch(params: Any, batch: Any) -> Any:
    margin = gain(params, batch) - batch["reference"]
    return weighted(batch, -jax.nn.log_sigmoid(0.1 * margin))


def reference_as_a_keyword(params: Any, batch: Any, *, frozen: Any = REFERENCE) -> Any:
    margin = gain(params, batch) - gain(frozen, batch)
    return weighted(batch, -jax.nn.log_sigmoid(0.1 * margin))


def divided_by_lengths(params: Any, batch: Any) -> Any:
    chosen, rejected = (
        log_probs(params, batch[name]) / jnp.sum(batch[name]["mask"], axis=-1)
        for name in ("chosen", "rejected")
    )
    return weighted(batch, -jax.nn.log_sigmoid(2 * (chosen - rejected)))


def mean_over_the_micro_batch(params: Any, batch: Any) -> Any:
    """Compares each pair with the micro-batch's average gain, like KTO."""
    margin = gain(params, batch) - batch["reference"]
    return weighted(batch, jax.nn.sigmoid(0.1 * (jnp.mean(margin) - margin)))


def mean_in_the_batch(params: Any, batch: Any) -> Any:
    margin = gain(params, batch) - batch["reference"]
    return weighted(batch, jax.nn.sigmoid(0.1 * (batch["baseline"] - margin)))


def counted_in_tokens(params: Any, batch: Any) -> Any:
    loss_sum, _ = reference_in_the_batch(params, batch)
    return loss_sum, jnp.sum(batch["chosen"]["mask"])


def mean_of(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], jax.Array]:
    def mean_fn(params: Any, batch: Any) -> jax.Array:
        loss_sum, weight = loss_fn(params, batch)
        return loss_sum / weight

    return mean_fn


@functools.cache
def full_batch_gradient(loss_fn: Any) -> Any:
    return helpers.in_float64(jax.grad(mean_of(loss_fn)))(PARAMS, pairs())


def accumulated(loss_fn: Any, batch: Any, **loss_kwargs: Any) -> tuple[Any, Any]:
    """Return the gradient behind a window's update, and the window's metrics."""
    step = make_train_step(loss_fn, SGD, K)
    state = step.init(PARAMS)
    for micro_batch in helpers.cut(batch, K):
        state, metrics = step(state, micro_batch, **loss_kwargs)
    return optax.tree.get(state.opt_state, "trace"), metrics


def naive(loss_fn: Any, batch: Any) -> Any:
    optimizer, grad_fn = optax.MultiSteps(SGD, K), jax.jit(jax.grad(mean_of(loss_fn)))
    state = optimizer.init(PARAMS)
    for micro_batch in helpers.cut(batch, K):
        _, state = optimizer.update(grad_fn(PARAMS, micro_batch), state, PARAMS)
    return optax.tree.get(state, "trace")


@pytest.mark.parametrize(
    ("loss_fn", "loss_kwargs"),
    [
        (reference_in_the_batch, {}),
        (reference_as_a_keyword, {"frozen": REFERENCE}),
        (divided_by_lengths, {}),
    ],
    ids=["in the batch", "as a keyword", "divided by lengths"],
)
def test_the_weights_are_what_is_counted(loss_fn: Any, loss_kwargs: Any):
    batch, expected = pairs(), full_batch_gradient(loss_fn)
    exact, metrics = accumulated(loss_fn, batch, **loss_kwargs)
    assert helpers.relative_error(exact, expected) < RTOL
    assert helpers.relative_error(naive(loss_fn, batch), expected) > 0.02
    np.testing.assert_allclose(metrics.num_tokens, batch["weight"].sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics.loss, mean_of(loss_fn)(PARAMS, batch), rtol=1e-6)


def test_a_count_of_tokens_divides_the_gradient_by_tokens():
    batch, expected = pairs(), full_batch_gradient(reference_in_the_batch)
    too_small, _ = accumulated(counted_in_tokens, batch)
    factor = batch["chosen"]["mask"].sum() / batch["weight"].sum()
    assert factor > 10
    scaled = jax.tree.map(lambda x: x * factor, too_small)
    assert helpers.relative_error(scaled, expected) < RTOL


def test_pairs_of_weight_0_change_nothing():
    rng, batch = np.random.default_rng(3), pairs()
    garbage = jax.tree.map(lambda x: rng.permuted(x, axis=-1), batch)
    garbage["weight"] = np.zeros_like(batch["weight"])
    padded = jax.tree.map(lambda *xs: np.concatenate(xs), batch, garbage)
    # Micro-batches that mix pairs with and without weight.
    order = rng.permutation(2 * helpers.ROWS)
    padded = jax.tree.map(lambda x: x[order], padded)
    exact, metrics = accumulated(reference_in_the_batch, padded)
    expected = full_batch_gradient(reference_in_the_batch)
    assert helpers.relative_error(exact, expected) < RTOL
    padded["weight"] = np.ones_like(padded["weight"])
    counted, _ = accumulated(reference_in_the_batch, padded)
    assert helpers.relative_error(counted, expected) > 0.02


def test_a_mean_over_pairs_is_exact_only_where_it_is_made_for_the_window():
    batch = pairs()
    margin = np.asarray(gain(PARAMS, batch)) - batch["reference"]
    batch["baseline"] = np.full_like(margin, margin.mean())
    expected = helpers.in_float64(jax.grad(mean_of(mean_in_the_batch)))(PARAMS, batch)
    exact, _ = accumulated(mean_in_the_batch, batch)
    assert helpers.relative_error(exact, expected) < RTOL
    of_the_cut, _ = accumulated(mean_over_the_micro_batch, batch)
    assert helpers.relative_error(of_the_cut, expected) > 0.02
    assert check_loss_fn(mean_in_the_batch, PARAMS, [batch]).passed
    assert not check_loss_fn(mean_over_the_micro_batch, PARAMS, [batch]).passed
