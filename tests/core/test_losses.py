"""The sum and the count use the same mask."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from optax_tokenaccum import softmax_cross_entropy_sum, window_value_and_grad

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 5, 7)).astype(np.float32)
LABELS = RNG.integers(0, 7, (3, 5))
MASK = np.arange(5) < np.array([2, 5, 0])[:, None]
LOSSES = np.asarray(
    optax.losses.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS), np.float64
)
IN_JIT = jax.jit(softmax_cross_entropy_sum, static_argnames="ignore_index")
IGNORED = np.where(np.arange(5) % 2 == 0, LABELS, -100)


@pytest.mark.parametrize(
    ("mask", "labels", "weights"),
    [
        (None, LABELS, np.ones((3, 5))),
        (MASK, LABELS, MASK),
        (1.5 * MASK, LABELS, 1.5 * MASK),
        (MASK, IGNORED, MASK & (IGNORED != -100)),
        (0 * MASK, LABELS, 0 * MASK),
    ],
    ids=["none", "bool", "weights", "ignored", "all masked"],
)
def test_sum_and_count_come_from_one_mask(mask: Any, labels: Any, weights: Any):
    for function in (softmax_cross_entropy_sum, IN_JIT):
        options = {} if labels is LABELS else {"ignore_index": -100}
        loss_sum, num_tokens = function(LOGITS, labels, mask, **options)
        assert float(num_tokens) == weights.sum()
        np.testing.assert_allclose(loss_sum, (weights * LOSSES).sum(), rtol=1e-6)


def test_logits_that_do_not_count_never_matter():
    @jax.jit
    @jax.value_and_grad
    def loss(logits: Any) -> Any:
        labels = np.where(MASK, LABELS, 10**6)
        return softmax_cross_entropy_sum(logits, labels, MASK)[0]

    for bad in (np.nan, np.inf, -np.inf):
        value, gradient = loss(np.where(MASK[..., None], LOGITS, np.float32(bad)))
        np.testing.assert_allclose(value, (MASK * LOSSES).sum(), rtol=1e-6)
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[~MASK].any()


def test_label_outside_the_vocabulary_is_loud_where_it_counts():
    for label in (-1, -100, 7):
        labels = LABELS.copy()
        labels[1, 1] = label
        assert np.isnan(softmax_cross_entropy_sum(LOGITS, labels)[0])


@pytest.mark.parametrize("weight", [-2.0, np.nan])
def test_a_weight_that_is_not_a_weight_is_loud_where_it_counts(weight: float):
    weights = np.where(MASK, np.float32(1.5), 0)
    weights[1, 1] = weight
    for rows in (slice(None), ([1], [1])):  # alone, it is no micro-batch without tokens
        loss_sum, num_tokens = softmax_cross_entropy_sum(
            LOGITS[rows], LABELS[rows], weights[rows]
        )
        assert np.isnan(loss_sum) and num_tokens > 0
    labels = LABELS.copy()
    labels[1, 1] = -100  # not counted, whatever its weight
    found = softmax_cross_entropy_sum(LOGITS, labels, weights, ignore_index=-100)
    expected = 1.5 * np.sum(LOSSES, where=MASK & (labels != -100))
    np.testing.assert_allclose(found, (expected, 1.5 * 6), rtol=1e-6)


INTEGERS = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()


@pytest.mark.parametrize("function", [IN_JIT, jax.jit(softmax_cross_entropy_sum)])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_of_every_dtype_mean_what_they_say(dtype: str, function: Any):
    most = np.iinfo(dtype).max
    with jax.enable_x64(dtype in ("int64", "uint64")):
        for vocabulary in (200, 66_000):
            last = min(vocabulary - 1, most)
            # -100 and -1 would be 156, 65436, 255 and 65535 in unsigned dtypes.
            held = np.array([3, 156, 255, 65_436, 65_535, last, last - 3])
            labels = held[held <= last].astype(dtype)
            logits = np.resize(np.arange(5.0), (len(labels), vocabulary))
            own = logits[np.arange(len(labels)), labels.astype(int)]
            losses = np.log(np.exp(logits).sum(1)) - own
            for ignore_index in (-100, -1, last - 3):
                counts = labels.astype(object) != ignore_index
                found = function(logits, labels, ignore_index=ignore_index)
                expected = losses[counts].sum(), counts.sum()
                np.testing.assert_allclose(found, expected, rtol=1e-6)
                labels[0] = most
                loss_sum, _ = function(logits, labels, ignore_index=ignore_index)
                assert np.isnan(loss_sum) == (most >= vocabulary)
                labels[0] = 3


def test_logits_spread_over_the_vocabulary_on_an_explicit_mesh():
    logits, labels = np.tile(LOGITS, (2, 1, 8)), np.tile(LABELS + 7, (2, 1))
    mesh = make_mesh((2, 4), "explicit")
    spread = (
        jax.device_put(logits, NamedSharding(mesh, P("data", None, "model"))),
        jax.device_put(labels, NamedSharding(mesh, P("data", None))),
    )
    function = jax.jit(jax.value_and_grad(softmax_cross_entropy_sum, has_aux=True))
    with jax.set_mesh(mesh):
        found = function(*spread)
    chex.assert_trees_all_close(found, function(logits, labels), rtol=1e-6)


def test_a_small_loss_next_to_large_logits():
    logits = np.float32([[40, 28, 20]])
    loss_sum, _ = softmax_cross_entropy_sum(logits, np.array([0]))
    expected = np.log1p(np.exp(-12.0) + np.exp(-20.0))
    np.testing.assert_allclose(loss_sum, expected, rtol=0.02)
    naive = jax.nn.logsumexp(logits) - logits[0, 0]
    assert abs(float(naive) / expected - 1) > 0.1


def test_computed_in_float32_whatever_the_logits():
    logits = jnp.zeros((1, 4096, 64), jnp.bfloat16)
    loss_sum, num_tokens = IN_JIT(logits, jnp.zeros((1, 4096), int))
    assert loss_sum.dtype == num_tokens.dtype == jnp.float32
    np.testing.assert_allclose(loss_sum / num_tokens, np.log(64), rtol=1e-6)
    naive = np.add.accumulate(np.full(4096, np.log(64), jnp.bfloat16))
    assert abs(float(naive[-1]) / 4096 / np.log(64) - 1) > 0.01


def test_z_loss_and_label_smoothing_do_not_depend_on_the_cut():
    z_loss, smoothing = 0.1, 0.2

    def mean_in_float64(logits: Any, mask: Any = MASK, labels: Any = LABELS) -> Any:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 7), smoothing)
        losses = optax.losses.softmax_cross_entropy(logits, targets)
        losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask)

    def loss_fn(logits: Any, rows: Any) -> Any:
        labels, mask = (jnp.asarray(x)[rows] for x in (LABELS, MASK))
        logits = jnp.where(mask[..., None], logits[rows], jnp.nan)
        return softmax_cross_entropy_sum(
            logits, labels, mask, z_loss=z_loss, label_smoothing=smoothing
        )

    rows = np.arange(3)[:, None]  # of 2, 5 and no tokens
    (loss, _), grads = jax.jit(window_value_and_grad(loss_fn))(LOGITS, rows)
    with jax.enable_x64(True):
        wide = jnp.asarray(LOGITS, jnp.float64)
        expected = jax.jit(jax.value_and_grad(mean_in_float64))(wide)
        expected = jax.tree.map(np.asarray, expected)
        mean = jax.jit(mean_in_float64)
        means = [float(mean(wide[i], MASK[i], LABELS[i])) for i in range(2)]
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-5, atol=1e-8)
    assert abs(np.mean(means) / expected[0] - 1) > 0.01
    plain = softmax_cross_entropy_sum(LOGITS, LABELS, MASK)[0]
    assert abs(float(loss) * MASK.sum() / float(plain) - 1) > 0.01


def test_a_masked_vocabulary_and_a_traced_weight():
    logits = np.concatenate([LOGITS, np.full((3, 5, 2), -np.inf, np.float32)], -1)
    f = jax.jit(lambda z: softmax_cross_entropy_sum(logits, LABELS, MASK, z_loss=z)[0])
    expected = LOSSES + 0.1 * jax.nn.logsumexp(LOGITS, axis=-1) ** 2
    np.testing.assert_allclose(f(0.1), (MASK * expected).sum(), rtol=1e-6)
    z_loss = np.float64(0.1)
    loss_sum, _ = softmax_cross_entropy_sum(logits, LABELS, MASK, z_loss=z_loss)
    assert loss_sum.dtype == jnp.float32
    np.testing.assert_allclose(loss_sum, f(0.1), rtol=1e-6)


def test_errors_say_what_does_not_fit():
    for options in ({"z_loss": -1.0}, {"label_smoothing": 1.0}):
        with pytest.raises(ValueError, match="label_smoothing from 0 to less than 1"):
            softmax_cross_entropy_sum(LOGITS, LABELS, **options)
    with pytest.raises(ValueError, match=r"logits \(3, 5, 7\) and labels \(3, 4\)"):
        softmax_cross_entropy_sum(LOGITS, LABELS[:, :4])
    with pytest.raises(ValueError, match=r"mask \(3,\) and labels \(3, 5\)"):
        softmax_cross_entropy_sum(LOGITS, LABELS, np.ones(3))
    with pytest.raises(
        TypeError, match="labels, which follow logits, must be integers"
    ):
        softmax_cross_entropy_sum(LOGITS, LABELS.astype(np.float32))
