"""The sum and the count use the same mask."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import softmax_cross_entropy_sum

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 5, 7)).astype(np.float32)
LABELS = RNG.integers(0, 7, (3, 5))
MASK = np.arange(5) < np.array([2, 5, 0])[:, None]
LOSSES = np.asarray(
    optax.losses.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS), np.float64
)


@pytest.mark.parametrize(
    ("mask", "weights"),
    [
        (None, np.ones((3, 5))),
        (MASK, MASK),
        (MASK.astype(np.int32), MASK),
        (0.25 * MASK, 0.25 * MASK),
        (np.where(MASK, 1.5, -2.0), 1.5 * MASK),
    ],
    ids=["none", "bool", "int", "weights", "negative is none"],
)
def test_sum_and_count_come_from_one_mask(mask: Any, weights: Any):
    for function in (softmax_cross_entropy_sum, jax.jit(softmax_cross_entropy_sum)):
        loss_sum, num_tokens = function(LOGITS, LABELS, mask)
        assert float(num_tokens) == weights.sum()
        np.testing.assert_allclose(loss_sum, (weights * LOSSES).sum(), rtol=1e-6)


def test_ignore_index_and_mask_both_apply():
    labels = np.where(np.arange(5) % 2 == 0, LABELS, -100)
    counts = MASK & (labels != -100)
    loss_sum, num_tokens = softmax_cross_entropy_sum(
        LOGITS, labels, MASK, ignore_index=-100
    )
    assert float(num_tokens) == counts.sum() == 4
    np.testing.assert_allclose(loss_sum, (counts * LOSSES).sum(), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_logits_that_do_not_count_never_matter(bad: float):
    logits = np.where(MASK[..., None], LOGITS, bad)
    labels = np.where(MASK, LABELS, 10**6)

    def loss(logits: Any) -> Any:
        return softmax_cross_entropy_sum(logits, labels, MASK)[0]

    value, gradient = jax.value_and_grad(loss)(logits)
    np.testing.assert_allclose(value, (MASK * LOSSES).sum(), rtol=1e-6)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~MASK].any()


def test_everything_masked_is_zero_over_zero_tokens():
    loss_sum, num_tokens = softmax_cross_entropy_sum(LOGITS, LABELS, np.zeros((3, 5)))
    assert (float(loss_sum), float(num_tokens)) == (0.0, 0.0)


@pytest.mark.parametrize("label", [-1, -100, 7])
def test_label_outside_the_vocabulary_is_loud_where_it_counts(label: int):
    labels = LABELS.copy()
    labels[1, 1] = label
    assert np.isnan(softmax_cross_entropy_sum(LOGITS, labels)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_computed_in_float32_whatever_the_logits(dtype: Any):
    logits = jnp.zeros((1, 4096, 64), dtype)
    loss_sum, num_tokens = softmax_cross_entropy_sum(logits, jnp.zeros((1, 4096), int))
    assert loss_sum.dtype == num_tokens.dtype == jnp.float32
    np.testing.assert_allclose(loss_sum / num_tokens, np.log(64), rtol=1e-6)
    if dtype == "bfloat16":
        naive = jnp.cumsum(-jax.nn.log_softmax(logits)[0, :, 0])[-1]
        assert abs(float(naive) / 4096 / np.log(64) - 1) > 0.01


def test_gradient_is_that_of_the_full_batch_in_float64():
    params, batch = helpers.init_params(3), helpers.ragged_batch(3)
    grads, n = jax.grad(helpers.loss_sum_fn, has_aux=True)(params, batch)
    grads = jax.tree.map(lambda g: g / n, grads)
    reference = helpers.float64_gradient(params, batch)
    assert helpers.relative_error(grads, reference) < helpers.RTOL["float32"]


def test_errors_say_what_does_not_fit():
    with pytest.raises(ValueError, match=r"logits \(3, 5, 7\) and labels \(3, 4\)"):
        softmax_cross_entropy_sum(LOGITS, LABELS[:, :4])
    with pytest.raises(ValueError, match=r"mask \(3,\) and labels \(3, 5\)"):
        softmax_cross_entropy_sum(LOGITS, LABELS, np.ones(3))
    with pytest.raises(TypeError, match="labels must be integers"):
        softmax_cross_entropy_sum(LOGITS, LABELS.astype(np.float32))
