"""`gradient_noise`: exact for each window, unbiased over many, wherever arrays lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from optax_tokenaccum import gradient_noise
from optax_tokenaccum.ragged import pad_window

K, ROWS, DIM = 4, 32, 8


def loss_fn(params: Any, batch: Any) -> Any:
    """Its gradient for a token is `params - x`."""
    losses = jnp.sum((params["w"] - batch["x"]) ** 2, -1) / 2
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def window_of(seed: int) -> dict[str, np.ndarray]:
    """Micro-batches with different numbers of tokens."""
    rng = np.random.default_rng(seed)
    x = rng.normal(1, 3, (K, ROWS, DIM)).astype(np.float32)
    mask = rng.uniform(size=(K, ROWS)) < rng.uniform(0.2, 0.9, (K, 1))
    return {"x": x, "mask": mask.astype(np.float32)}


def expected(window: Any) -> tuple[float, float]:
    """The formulas, at parameters of 0, in float64."""
    parts = [
        (-np.float64(x)[mask > 0].sum(0), mask.sum())
        for x, mask in zip(window["x"], window["mask"], strict=True)
        if mask.any()
    ]
    total, n = (np.sum(x, 0) for x in zip(*parts, strict=True))
    within = sum(g @ g / n for g, n in parts)
    trace = (within - total @ total / n) / (len(parts) - 1)
    return trace, (total @ total - n * trace) / n**2


@jax.jit
def measured(params: Any, window: Any) -> Any:
    return gradient_noise(loss_fn, params, window)


PARAMS = {"w": jnp.zeros(DIM)}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("auto", P()), ("auto", P("data")), ("explicit", P()), (None, P())],
    ids=["auto", "FSDP", "explicit", "one device"],
)
def test_a_window_has_the_noise_of_all_its_norms(kind: str | None, spec: P):
    params, window = PARAMS, window_of(0)
    # The variance of micro-batches' means takes all of them to have as many tokens.
    means = [
        np.float64(x)[mask > 0].mean(0)
        for x, mask in zip(window["x"], window["mask"], strict=True)
    ]
    naive = np.var(means, axis=0, ddof=1).sum() * window["mask"].sum() / K
    assert abs(naive / expected(window)[0] - 1) > 0.05
    if kind is not None:
        mesh = make_mesh((8,), kind)
        params = jax.device_put(params, NamedSharding(mesh, spec))
        rows = NamedSharding(mesh, P(None, "data"))
        window = jax.device_put(window, rows)
    got = measured(params, window)
    np.testing.assert_allclose(got, expected(jax.device_get(window)), rtol=1e-4)
    assert got.scale == got.trace / got.squared_norm


def test_micro_batches_without_tokens_do_not_count():
    window = window_of(1)
    empty = {"x": np.full((2, ROWS, DIM), np.nan), "mask": np.zeros((2, ROWS))}
    more = {name: np.concatenate([empty[name], x]) for name, x in window.items()}

    def masked_loss_fn(params: Any, batch: Any) -> Any:
        x = jnp.where(batch["mask"].any(), batch["x"], jnp.nan)
        return loss_fn(params, batch | {"x": x})

    got = gradient_noise(masked_loss_fn, PARAMS, more)
    np.testing.assert_allclose(got, expected(window), rtol=1e-4)
    one = {name: np.concatenate([empty[name], x[:1]]) for name, x in window.items()}
    assert np.isnan(gradient_noise(masked_loss_fn, PARAMS, one)).all()


@pytest.mark.slow
def test_unbiased_where_counts_vary_a_hundred_times():
    dim, windows, k = 512, 4000, 8

    def sum_of_normals(params: Any, batch: Any) -> Any:
        """Its gradient is the sum of `n` normal vectors, with means of 0.05."""
        n, x = batch["n"], batch["x"]
        return jnp.sum(params["w"] * (0.05 * n + jnp.sqrt(n) * x)), n

    def run_window(key: jax.Array) -> Any:
        size, values = jax.random.split(key)
        n = jnp.floor(10 ** jax.random.uniform(size, (k,), minval=0, maxval=2))
        window = {"n": n, "x": jax.random.normal(values, (k, dim))}
        return gradient_noise(sum_of_normals, {"w": jnp.zeros(dim)}, window)

    keys = jax.random.split(jax.random.key(0), windows)
    noise = jax.jit(lambda keys: jax.lax.map(run_window, keys))(keys)
    standard_errors = np.std(noise, axis=1) / windows**0.5
    true = np.array([dim, dim * 0.05**2])
    assert (3 * standard_errors < 0.02 * true).all()
    np.testing.assert_allclose(np.mean(noise, axis=1), true, rtol=0.02)


def test_keys_keywords_and_aux_are_those_of_a_window():
    def noisy_loss_fn(w: Any, x: Any, *, rng: Any, scale: Any) -> Any:
        g = jnp.sum(x) + scale * jax.random.normal(rng)
        return w * g, (x.size, g)

    xs, rng = jnp.arange(6.0).reshape(3, 2), jax.random.key(0)
    keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(3))
    sums = xs.sum(1) + 5.0 * jax.vmap(jax.random.normal)(keys)
    trace = (jnp.sum(sums**2) / 2 - jnp.sum(sums) ** 2 / 6) / 2
    given = {"has_aux": True, "rng": rng, "scale": 5.0}
    got = gradient_noise(noisy_loss_fn, jnp.asarray(1.0), xs, **given)
    np.testing.assert_allclose(got.trace, trace, rtol=1e-5)


def test_narrow_parameters_are_measured_in_float32():
    w = {"w": jnp.zeros(DIM, jnp.bfloat16)}
    window = window_of(2)
    window["x"] = window["x"].astype(jnp.bfloat16).astype(np.float32)
    noise = measured(w, window)
    assert noise.trace.dtype == jnp.float32
    np.testing.assert_allclose(noise, expected(window), rtol=0.02)


def test_what_cannot_be_measured_raises():
    planned = pad_window([np.ones(3), np.ones(5)], pad_values=0, max_tokens=8)
    one = {name: x[:1] for name, x in window_of(0).items()}
    for window, message in ((planned, "sorted by length"), (one, "at least two")):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda window=window: measured(PARAMS, window))
    specs = {
        "mesh": make_mesh((8,)),
        "in_specs": (P(), P(None, "data")),
        "out_specs": P(),
    }
    inside = jax.shard_map(lambda p, w: gradient_noise(loss_fn, p, w), **specs)
    with pytest.raises(ValueError, match="Call it outside"):
        jax.eval_shape(inside, PARAMS, window_of(0))
