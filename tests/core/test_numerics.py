"""Unusual dtypes and trees, through every entry point, against NumPy in float64."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import slow

from optax_tokenaccum import token_accumulation

# A batch is (x, num_tokens). The loss is linear, so x is its gradient, and `identity`
# as the inner optimizer turns zero parameters into the window's gradient.
Batch = tuple[Any, Any]


def loss_fn(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
    x, num_tokens = batch

    def of_leaf(p: jax.Array, x: jax.Array) -> jax.Array:
        product = jnp.sum((p * x).real)
        return product.astype(f"float{max(32, 8 * product.dtype.itemsize)}")

    return sum(jax.tree.leaves(jax.tree.map(of_leaf, params, x)), 0.0), num_tokens


def gradient(way: str, params: Any, batches: list[Batch], **options: Any) -> Any:
    """The gradient of the window that the inner optimizer is given."""
    if way == "transformation":
        optimizer = token_accumulation(optax.identity(), len(batches), **options)
        step = helpers.micro_step(optimizer, loss_fn)
        state = optimizer.init(params)
        for batch in batches:
            params, state = step(params, state, batch)
        return params
    options |= {"loss_fn": loss_fn, "k": len(batches), "data_axes": None}
    step = meshes.make_step(way, optax.identity(), None, **options)
    calls = [helpers.stack(batches)] if way == "window" else batches
    return helpers.run_step(step, step.init(params), calls)[0].params


every_way = pytest.mark.parametrize(
    "way", ["transformation", "two programs", slow("window")]
)


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size)


@every_way
def test_narrow_gradients_are_summed_in_float32(way: str):
    """optax.microbatch, levanter, MaxText: sums have the dtype of the terms."""
    dtype = jnp.bfloat16
    one, zero = jnp.asarray(0.01, dtype), jnp.zeros((), dtype)
    batches = [(one, jnp.float32(1 / 1024))] * 1024
    got = gradient(way, zero, batches)
    # The sum over a count of 1, rounded to the dtype: 10; bfloat16 sums stop at 4.
    assert got == jnp.asarray(1024 * np.float64(one), dtype)
    naive = jax.lax.fori_loop(0, 1024, lambda _, total: total + one, zero)
    assert naive < got / 1.2
    assert gradient(way, zero, batches, accumulator_dtype=dtype) == naive


@every_way
def test_fractional_weights_beside_float64_parameters(way: str):
    """A float32 count would round 0.1 by 1.5e-8, and the update with it."""
    weights = np.random.default_rng(2).uniform(0.1, 1.0, 8)
    with jax.enable_x64(True):
        x = numbers(40).reshape(8, 5)
        rows = [(jnp.asarray(row), w) for row, w in zip(x, weights, strict=True)]
        got = gradient(way, jnp.zeros(5, jnp.float64), rows)
        assert got.dtype == jnp.float64
        expected = x.sum(0) / weights.sum()
        assert helpers.relative_error(got, expected) < helpers.RTOL["float64"]
        in_float32 = x.sum(0) / np.float64(np.float32(weights).sum())
        sums_in_float32 = np.float32(x).sum(0) / weights.sum()
        for rounded in (in_float32, sums_in_float32):
            error = helpers.relative_error(rounded, expected)
            assert error > 1e3 * helpers.RTOL["float64"]


@every_way
def test_strict_dtype_promotion(way: str):
    """Every promotion of two dtypes is explicit."""
    x = {dtype: jnp.ones(3, dtype) for dtype in ("bfloat16", "complex64", "float32")}
    batches = [(jax.tree.map(lambda x: 2 * x, x), jnp.float32(2))] * 2
    params = jax.tree.map(jnp.zeros_like, x)
    with jax.numpy_dtype_promotion("strict"):
        got = gradient(way, params, batches, **helpers.SKIPS)
    chex.assert_trees_all_equal(got, x)


@every_way
def test_trees_of_complex_and_narrow_numbers_and_with_little_in_them(way: str):
    """Sums that float8 and float16 cannot hold; `None`; no rows; no leaves."""
    x = {
        "complex64": (numbers(12) + 1j * numbers(12, 1)).reshape(4, 3),
        "float8_e4m3fn": np.array([[16.0], [0.5], [0.5], [0.5]]),
        "float16": np.full((4, 2), 60_000.0),
        "float32": np.zeros((4, 0, 3)),
    }
    x = {dtype: jnp.asarray(terms, dtype) for dtype, terms in x.items()}
    rows = [
        [{dtype: terms[i] for dtype, terms in x.items()}, None, {}, optax.MaskedNode()]
        for i in range(4)
    ]
    params = jax.tree.map(jnp.zeros_like, rows[0])
    got, *rest = gradient(way, params, [(row, jnp.float32(1)) for row in rows])
    assert rest == [None, {}, optax.MaskedNode()]
    chex.assert_trees_all_equal_shapes_and_dtypes([got], params[:1])
    expected = np.complex128(x["complex64"]).mean(0)
    error = np.linalg.norm(got["complex64"] - expected) / np.linalg.norm(expected)
    assert error < helpers.RTOL["float32"]
    for dtype in ("float8_e4m3fn", "float16"):
        terms = x[dtype]
        mean = jnp.asarray(np.float64(terms).mean(0), dtype)
        np.testing.assert_array_equal(got[dtype], mean)
        assert ((terms[0] + terms[1] + terms[2] + terms[3]) / 4 != mean).all()
    assert gradient(way, {}, [({}, jnp.float32(1))]) == {}


def test_updates_are_not_rounded_to_the_accumulators():
    """Updates reuse the buffers of the sums only where these hold them exactly."""
    optimizer = token_accumulation(optax.sgd(0.1), 1, accumulator_dtype=jnp.bfloat16)
    params = jnp.ones(3)
    state = optimizer.init(params)
    updates, state = jax.jit(optimizer.update)(params, state, params, num_tokens=1)
    assert jnp.float32(0.1).astype(jnp.bfloat16) != jnp.float32(0.1)
    np.testing.assert_array_equal(updates, np.full(3, -0.1, np.float32))
    assert state.grad_sums.dtype == jnp.bfloat16
