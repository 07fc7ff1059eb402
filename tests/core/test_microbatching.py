"""`token_mean` makes `optax.microbatching` exact."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.microbatching import AccumulationType, micro_vmap, microbatch

from optax_tokenaccum.microbatching import token_mean

K = 8
PARAMS = helpers.init_params(0)
WINDOW = helpers.ragged_batch(0)
ROWS = len(WINDOW["mask"])


def microbatched(loss_fn: Any, accumulator: Any, **options: Any) -> Any:
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    return jax.jit(microbatch(gradient, 1, ROWS // K, accumulator, **options))


@pytest.mark.parametrize(
    "real", [helpers.slow(None), 3], ids=["all", "the first three"]
)
def test_the_gradient_is_that_of_the_full_batch(real: int | None):
    f = microbatched(helpers.loss_sum_fn, token_mean(), num_real_microbatches=real)
    (loss, n), grads = f(PARAMS, WINDOW)
    # Row j is in micro-batch j % K.
    rows = np.arange(ROWS) % K < (real or K)
    part = jax.tree.map(lambda x: x[rows], WINDOW)
    exact = helpers.float64_gradient(PARAMS, part)
    assert helpers.relative_error(grads, exact) < helpers.RTOL["float32"]
    assert float(n) == part["mask"].sum()
    total, _ = helpers.loss_sum_fn(PARAMS, part)
    np.testing.assert_allclose(loss, total / n, rtol=1e-6)


def test_the_mean_of_means_is_another_gradient():
    mean_fn = jax.value_and_grad(lambda p, b: helpers.loss_mean_fn(p, b)[0])
    means = microbatch(mean_fn, 1, ROWS // K, AccumulationType.MEAN)
    _, naive = jax.jit(means)(PARAMS, WINDOW)
    exact = helpers.float64_gradient(PARAMS, WINDOW)
    assert helpers.relative_error(naive, exact) > 1e-3


def test_a_micro_batch_without_tokens_adds_nothing():
    def loss_fn(w: Any, batch: Any) -> Any:
        n = jnp.sum(batch["mask"])
        # The gradient of a micro-batch without tokens is NaN.
        return jnp.sum(w * batch["x"] * batch["mask"]) * (n / n), n

    f, x = microbatched(loss_fn, token_mean()), np.arange(1.0, ROWS + 1)
    for first in (0, 1):
        mask = np.arange(ROWS) % K != first
        (_, n), grad = f(jnp.ones(()), {"x": x, "mask": mask})
        np.testing.assert_allclose(grad, (x * mask).sum() / mask.sum(), rtol=1e-6)
        assert float(n) == mask.sum()
    (loss, n), grad = f(jnp.ones(()), {"x": x, "mask": 0 * mask})
    assert (float(loss), float(n), float(grad)) == (0, 0, 0)


def test_sums_of_bfloat16_are_float32():
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w * x), x.size

    x = jnp.full(512, 1 + 2**-7, jnp.bfloat16)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    f = jax.jit(microbatch(gradient, 1, 1, token_mean()))
    _, grad = f(jnp.ones((), jnp.bfloat16), x)
    assert grad.dtype == jnp.float32
    assert float(grad) == 1 + 2**-7
    _, rounded = jax.jit(microbatch(gradient, 1, 1))(jnp.ones((), jnp.bfloat16), x)
    assert float(rounded) / 512 != 1 + 2**-7


def test_rows_by_micro_vmap():
    """Rows of bfloat16, every other one without a token and with a NaN."""

    def of_row(x: Any, n: Any) -> Any:
        return (x, n), x

    def mapped(accumulator: Any, x: Any) -> Any:
        f = micro_vmap(of_row, (0, 0), microbatch_size=514, accumulator=accumulator)
        return f(x, n)

    n = jnp.tile(jnp.array([1, 0], jnp.bfloat16), 771)
    with_nan = jnp.where(n > 0, n, jnp.nan)
    (loss, total), grad = mapped(token_mean(), with_nan)
    assert (float(loss), float(total), float(grad)) == (1, 771, 1)
    assert loss.dtype == total.dtype == grad.dtype == jnp.float32
    _, rounded = mapped(AccumulationType.SUM, n)
    assert float(rounded) != 771


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss, n, grads: (loss, grads),
        lambda loss, n, grads: ((loss, (n, grads)), grads),
        lambda loss, n, grads: ((loss, jnp.ones(3)), grads),
        lambda loss, n, grads: loss,
    ],
    ids=["no count", "aux", "a count for each row", "loss alone"],
)
def test_a_function_that_returns_something_else(returned: Any):
    def f(w: Any, x: Any) -> Any:
        return returned(jnp.sum(w * x), jnp.float32(x.size), jnp.sum(x))

    with pytest.raises(TypeError, match=r"\(\(loss_sum, num_tokens\), grads\)"):
        jax.eval_shape(microbatch(f, 1, 2, token_mean()), jnp.ones(()), jnp.ones(8))
