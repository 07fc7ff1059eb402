"""A whole window: `window_value_and_grad`, `accumulate_over_window`, `split_batch`."""

import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import accumulate_over_window, split_batch, window_value_and_grad

PARAMS = {"w": jnp.asarray([1.0, -2.0], jnp.float32)}


def sum_fn(params: Any, batch: Any) -> Any:
    """Summed loss whose gradient is `sum(batch["x"])` in every entry of `w`."""
    return jnp.sum(params["w"]) * jnp.sum(batch["x"]), jnp.sum(batch["n"])


def of_gradients(loss_fn: Any, **options: Any) -> Any:
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    return accumulate_over_window(grad_fn, **options)


def of_means(loss_fn: Any) -> Any:
    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return loss_sum / n, n

    return of_gradients(mean_fn, gradients="mean")


# From a summed loss to a function of parameters and a window.
WAYS = [window_value_and_grad, of_gradients, of_means]


@pytest.mark.parametrize("way", WAYS)
def test_windows_of_every_size_are_one_program(way: Any):
    f = jax.jit(way(sum_fn))
    window = {"x": np.float32([np.nan, 2, 90, 7]), "n": np.float32([0, 1, 9, 3])}
    means = [0, 0, 2, 9.2, 99 / 13]  # the mean of the means 2 and 10 is 6, not 9.2
    with helpers.count_compilations() as compilations:
        for size, mean in enumerate(means):
            values, grads = f(PARAMS, window, num_micro_batches=size)
            loss, (num_tokens, _) = values
            assert float(num_tokens) == window["n"][:size].sum()
            np.testing.assert_allclose(loss, -mean, rtol=1e-6)
            np.testing.assert_allclose(grads["w"], [mean, mean], rtol=1e-6)
    assert len(compilations) == 1
    # Outside of `jit`, a Python number is a parameter.
    _, grad = way(sum_fn)({"w": -2.0}, jax.tree.map(lambda x: x[:3], window))
    np.testing.assert_allclose(grad["w"], 9.2, rtol=1e-6)
    assert grad["w"].dtype == jax.grad(jnp.square)(-2.0).dtype


@pytest.mark.parametrize("way", [window_value_and_grad, of_gradients])
def test_aux_and_a_key_for_each_micro_batch(way: Any):
    def loss_fn(params: Any, batch: Any, rng: Any, scale: Any) -> Any:
        noise = jax.random.normal(batch["key"])
        loss_sum, n = sum_fn(params, batch)
        key = jax.random.key_data(rng)
        return scale * noise * loss_sum, (n, {"noise": noise, "two": 2.0, "key": key})

    f = jax.jit(way(loss_fn, has_aux=True))
    x, n = np.float32([0, 2, 3, 4]), np.arange(4.0, dtype=np.float32)
    window = {"x": x, "n": n, "key": jax.random.split(jax.random.key(0), 4)}
    seen = set()
    for seed, size in ((1, None), (2, 3)):
        (_, (num_tokens, aux)), grads = f(
            PARAMS, window, rng=jax.random.key(seed), num_micro_batches=size, scale=3.0
        )
        ran = np.arange(4) < (size or 4)
        np.testing.assert_array_equal(aux["two"], 2.0 * ran)
        noise = jax.vmap(jax.random.normal)(window["key"]) * ran
        np.testing.assert_allclose(aux["noise"], noise, rtol=1e-6)
        mean = 3 * np.sum(noise * x) / num_tokens
        np.testing.assert_allclose(grads["w"], [mean, mean], rtol=1e-5)
        seen |= {tuple(key) for key in np.asarray(aux["key"])[ran].tolist()}
    assert len(seen) == 7


def test_gradients_keep_their_tree_and_dtypes_and_sums_are_wide():
    """512 gradients of 1 in bfloat16 would add up to 256 there.

    A GPU need not divide complex numbers exactly, except by powers of two.
    """

    def grad_fn(_: Any, batch: Any) -> Any:
        grads = [jnp.ones((2,), jnp.bfloat16), (jnp.complex64(2j),), None]
        return (jnp.sum(batch), 1), [*grads, np.zeros(2, jax.dtypes.float0)]

    f = accumulate_over_window(grad_fn)
    (_, (num_tokens, _)), grads = f(PARAMS, jnp.ones((512, 1)))
    assert grads.pop().dtype == jax.dtypes.float0
    assert float(num_tokens) == 512.0
    expected = [np.ones(2, jnp.bfloat16), (np.complex64(2j),), None]
    chex.assert_trees_all_equal(grads, expected)
    chex.assert_trees_all_equal_dtypes(grads, expected)

    narrow = accumulate_over_window(grad_fn, accumulator_dtype=jnp.bfloat16)
    _, grads = narrow(PARAMS, jnp.ones((512, 1)))
    assert float(grads[0][0]) < 1


def test_a_function_of_gradients_may_assign_to_its_keywords():
    def halved(w: Any, x: Any, *, config: Any) -> Any:
        config["scale"] /= 2
        return jax.value_and_grad(
            lambda w: (config["scale"] * jnp.sum(w * x), x.size), has_aux=True
        )(w)

    f = jax.jit(
        functools.partial(accumulate_over_window(halved), config={"scale": 1.0})
    )
    assert f(1.0, jnp.full((3, 4), 2.0))[1] == 1


def test_the_window_of_a_function_of_gradients_has_reverse_mode_derivatives():
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(w**3 * x), x.size

    def penalty(w: Any) -> jax.Array:
        _, gradient = of_gradients(loss_fn)(w, jnp.ones((3, 4)))
        return gradient**2  # (3 w^2)^2, whose derivative is 36 w^3

    assert jax.grad(penalty)(2.0) == 288.0


def test_what_is_not_a_window_is_named_where_the_loss_fails():
    """The loss raises the error, with a note on the shapes that it was given."""

    def loss_sum_of_rows(w: Any, batch: Any) -> Any:
        return jnp.sum(batch["x"] @ w - batch["y"]), len(batch["y"])

    def notes_of(batch: Any) -> str:
        with pytest.raises((ValueError, TypeError)) as raised:
            window_value_and_grad(loss_sum_of_rows)(jnp.zeros(3), batch)
        return "".join(raised.value.__notes__)  # jax adds notes, too

    batch = {"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)}
    notes = notes_of(batch)
    assert notes.count("split_batch(batch, k)") == 1
    assert "got shape (3,) at ['x'], () at ['y']." in notes
    for n in (1, 8):
        listed = [batch, jax.tree.map(lambda x, n=n: x[:n], batch)]
        assert notes_of(listed).count("must be stacked into one tree") == 1


def test_split_batch_keeps_every_row_once_and_each_device_its_rows():
    batch = {"x": np.arange(24).reshape(12, 2), "y": jnp.arange(12)}
    split = split_batch(batch, 3)
    assert split["x"].shape == (3, 4, 2) and split["y"].shape == (3, 4)
    assert sorted(np.asarray(split["y"]).ravel().tolist()) == list(range(12))
    np.testing.assert_array_equal(split["x"][..., 0], 2 * np.asarray(split["y"]))
    # The first half of the rows becomes the first half of every micro-batch.
    assert np.asarray(split["y"])[:, :2].max() < 6
    assert isinstance(split["x"], np.ndarray)
    chex.assert_trees_all_equal(jax.jit(lambda x: split_batch(x, 3))(batch), split)
    # Missing rows hold the pad values.
    part = jax.tree.map(lambda x: x[:7], batch)
    padded = split_batch(part, 3, pad_values={"x": 0, "y": -100})
    for name, pad in (("x", 0), ("y", -100)):
        assert isinstance(padded[name], type(batch[name]))
        assert padded[name].dtype == batch[name].dtype
        back = np.swapaxes(padded[name], 0, 1).reshape(9, *batch[name].shape[1:])
        np.testing.assert_array_equal(back[:7], part[name])
        assert (back[7:] == pad).all()


def test_a_window_lowers_neither_a_second_forward_pass_nor_a_conditional():
    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(jnp.tanh(batch @ params["w"])), len(batch)

    batch = jnp.ones((4, 2))
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True)).lower(PARAMS, batch)
    window = jax.jit(window_value_and_grad(loss_fn)).lower(PARAMS, batch[None])
    of_gradient, of_window = gradient.as_text(), window.as_text()
    assert of_window.count("stablehlo.tanh") == of_gradient.count("stablehlo.tanh") > 0
    assert "stablehlo.case" not in of_window
