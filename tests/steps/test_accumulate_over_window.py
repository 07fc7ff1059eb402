"""`accumulate_over_window`: the window of a function that computes gradients."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    accumulate_over_window,
    pad_window,
    window_value_and_grad,
)

LOSSES = {"sum": helpers.loss_sum_fn, "mean": helpers.loss_mean_fn}
PARAMS = {"w": jnp.asarray([1.0, -2.0], jnp.float32)}


def linear_sum(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * jnp.sum(batch["x"]), jnp.sum(batch["n"])


def linear_mean(params: Any, batch: Any) -> Any:
    loss_sum, n = linear_sum(params, batch)
    return loss_sum / n, n


def grad_fn_of(loss_fn: Any) -> Any:
    return jax.value_and_grad(loss_fn, has_aux=True)


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_gradient_is_that_of_the_full_batch_and_the_naive_one_is_not(
    gradients: str, k: int, maybe_jit: Any
):
    grad_fn = grad_fn_of(LOSSES[gradients])
    f = maybe_jit(accumulate_over_window(grad_fn, gradients=gradients))
    params, batch = helpers.init_params(k), helpers.ragged_batch(k)
    (loss, (num_tokens, aux)), grads = f(params, helpers.stacked(batch, k))
    reference = helpers.float64_gradient(params, batch)
    assert helpers.relative_error(grads, reference) < helpers.RTOL["float32"]
    np.testing.assert_allclose(loss, helpers.loss_mean_fn(params, batch)[0], rtol=1e-6)
    assert float(num_tokens) == batch["mask"].sum()
    assert aux is None
    means = jax.jit(jax.grad(helpers.loss_mean_fn, has_aux=True))
    parts = [means(params, part)[0] for part in helpers.cut(batch, k)]
    naive = jax.tree.map(lambda *gs: sum(gs) / k, *parts)
    assert k == 1 or helpers.relative_error(naive, reference) > 0.01


def test_a_gradient_that_is_changed_before_it_is_added():
    clip = optax.clip_by_global_norm(0.05)

    def clipped(params: Any, batch: Any) -> Any:
        returned, grads = grad_fn_of(helpers.loss_mean_fn)(params, batch)
        return returned, clip.update(grads, clip.init(params))[0]

    params, batch = helpers.init_params(0), helpers.ragged_batch(0)
    f = jax.jit(accumulate_over_window(clipped, gradients="mean"))
    (_, (num_tokens, _)), grads = f(params, helpers.stacked(batch, 4))
    of_part = jax.jit(clipped)
    parts = [of_part(params, part) for part in helpers.cut(batch, 4)]
    expected = jax.tree.map(
        lambda *gs: (
            sum(
                float(n) * np.float64(g)
                for ((_, n), _), g in zip(parts, gs, strict=True)
            )
            / float(num_tokens)
        ),
        *[grads for _, grads in parts],
    )
    assert helpers.relative_error(grads, expected) < helpers.RTOL["float32"]
    unclipped = helpers.float64_gradient(params, batch)
    assert helpers.relative_error(grads, unclipped) > 0.01


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_micro_batches_without_tokens_add_nothing_even_if_nan(
    gradients: str, maybe_jit: Any
):
    grad_fn = grad_fn_of({"sum": linear_sum, "mean": linear_mean}[gradients])
    f = maybe_jit(accumulate_over_window(grad_fn, gradients=gradients))
    x = jnp.asarray([[2.0], [np.nan], [90.0]])
    n = jnp.asarray([[1.0], [0.0], [9.0]])
    (loss, (num_tokens, _)), grads = f(PARAMS, {"x": x, "n": n})
    np.testing.assert_allclose(grads["w"], [9.2, 9.2], rtol=1e-6)  # not 6, 6
    np.testing.assert_allclose(loss, -9.2, rtol=1e-6)
    assert float(num_tokens) == 10.0
    empty = {"x": x[1:2], "n": n[1:2]}
    (loss, (num_tokens, _)), grads = f(PARAMS, empty)
    assert (float(loss), float(num_tokens)) == (0.0, 0.0)
    chex.assert_trees_all_equal(grads, {"w": np.zeros(2)})


def test_aux_keys_and_a_part_of_the_window_are_those_of_window_value_and_grad():
    def loss_fn(params: Any, batch: Any, rng: Any, scale: Any) -> Any:
        noise = jax.random.normal(rng)
        loss_sum, n = linear_sum(params, batch)
        return scale * noise * loss_sum, (n, {"x": batch["x"], "noise": noise})

    micro_batches = {"x": jnp.arange(1.0, 5.0)[:, None], "n": jnp.arange(4.0)[:, None]}
    window = jax.jit(window_value_and_grad(loss_fn, has_aux=True))
    given = jax.jit(accumulate_over_window(grad_fn_of(loss_fn), has_aux=True))
    rng, results = jax.random.key(3), []
    for stop in (None, 3):
        options: Any = dict(rng=rng, num_micro_batches=stop, scale=2.0)
        got, expected = (f(PARAMS, micro_batches, **options) for f in (given, window))
        chex.assert_trees_all_close(got, expected, rtol=1e-6)
        results.append(got)
    (_, (num_tokens, aux)), _ = results[1]
    assert float(num_tokens) == 3.0 and len({*np.asarray(aux["noise"])}) == 4
    np.testing.assert_array_equal(aux["x"], [[1.0], [2.0], [3.0], [0.0]])


def test_all_partial_windows_are_one_program():
    f = jax.jit(accumulate_over_window(grad_fn_of(linear_sum)))
    micro_batches = {"x": jnp.ones((4, 1)), "n": jnp.ones((4, 1))}
    f(PARAMS, micro_batches, num_micro_batches=4)
    with helpers.count_compilations() as compilations:
        for n in range(5):
            (_, (num_tokens, _)), _ = f(PARAMS, micro_batches, num_micro_batches=n)
            assert float(num_tokens) == n
    assert not compilations


def test_a_planned_window_of_several_shapes():
    rows = [np.arange(n) % 7 for n in (3, 14, 5, 2, 15)]
    sequences = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    window = pad_window(
        sequences,
        pad_values={"tokens": 0, "labels": -100},
        max_tokens=32,
        length_buckets=[4, 16],
    )

    def loss_fn(params: Any, batch: Any) -> Any:
        labelled = batch | {"mask": batch["labels"] != -100}
        return helpers.loss_sum_fn(
            params, labelled | {"labels": jnp.maximum(batch["labels"], 0)}
        )

    params = helpers.init_params(0)
    got = jax.jit(accumulate_over_window(grad_fn_of(loss_fn)))(params, window)
    expected = jax.jit(window_value_and_grad(loss_fn))(params, window)
    assert float(got[0][1][0]) == 34.0
    assert helpers.relative_error(got[1], expected[1]) < helpers.RTOL["float32"]


def test_gradients_keep_their_tree_and_dtypes_and_sums_are_wide():
    """300 gradients of 1 in bfloat16 would add up to 256 there."""

    def grad_fn(_: Any, batch: Any) -> Any:
        grads = [jnp.ones((2,), jnp.bfloat16), (jnp.complex64(2j),), None]
        return (jnp.sum(batch), 1), grads

    f = accumulate_over_window(grad_fn)
    (_, (num_tokens, _)), grads = jax.jit(f)(PARAMS, jnp.ones((300, 1)))
    assert float(num_tokens) == 300.0
    expected = [np.ones(2, jnp.bfloat16), (np.complex64(2j),), None]
    chex.assert_trees_all_equal(grads, expected)
    chex.assert_trees_all_equal_dtypes(grads, expected)
    assert sum(300 * [jnp.bfloat16(1)]) == 256

    narrow = accumulate_over_window(grad_fn, accumulator_dtype=jnp.bfloat16)
    _, grads = jax.jit(narrow)(PARAMS, jnp.ones((300, 1)))
    assert float(grads[0][0]) < 1


def test_gradients_of_integers_stay_float0():
    def loss_fn(params: Any, batch: Any) -> Any:
        return linear_sum({"w": params["w"] * params["k"]}, batch)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True, allow_int=True)
    params = PARAMS | {"k": jnp.asarray(3)}
    micro_batches = {"x": jnp.ones((2, 1)), "n": jnp.asarray([[1.0], [3.0]])}
    _, grads = jax.jit(accumulate_over_window(grad_fn))(params, micro_batches)
    np.testing.assert_array_equal(grads["w"], [1.5, 1.5])
    assert grads["k"].dtype == jax.dtypes.float0


def test_vmap_is_a_window_for_each_row():
    f = accumulate_over_window(grad_fn_of(linear_sum))
    x = jnp.asarray([[[2.0], [90.0]], [[1.0], [3.0]]])
    n = jnp.asarray([[[1.0], [9.0]], [[1.0], [1.0]]])
    _, grads = jax.vmap(f, (None, 0))(PARAMS, {"x": x, "n": n})
    np.testing.assert_allclose(grads["w"], [[9.2, 9.2], [2.0, 2.0]], rtol=1e-6)
