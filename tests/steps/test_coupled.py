"""Losses that couple the rows of a window, against plain JAX on all micro-batches."""

import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from benchmarks.chips import CHIPS
from optax_tokenaccum import coupled_value_and_grad, window_value_and_grad
from optax_tokenaccum.debug._whole_gradients import whole_gradients

K, MICRO, WIDTH, DEPTH, EXPERTS = 4, 8, 16, 3, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "layers": RNG.normal(size=(DEPTH, WIDTH, WIDTH)) / WIDTH**0.5,
    "router": RNG.normal(size=(WIDTH, EXPERTS)),
    "temperature": np.log(5.0),
}
# Unequal micro-batches: the other rows are padding.
VALID = np.arange(MICRO) < np.array([[8], [3], [5], [1]])
WINDOW = {
    "image": np.where(VALID[..., None], RNG.normal(size=(K, MICRO, WIDTH)), 0),
    "text": np.where(VALID[..., None], RNG.normal(size=(K, MICRO, WIDTH)), 0),
    "valid": VALID,
}
ROWS = jnp.asarray(WINDOW["image"][:, 0], jnp.float32)


def tower(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w), None

    return jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0]


def embed(params: Any, batch: Any, scale: Any = 1) -> Any:
    towers = [tower(params, batch[name]) for name in ("image", "text")]
    units = [x / jnp.linalg.norm(x + 1e-6, axis=-1, keepdims=True) for x in towers]
    return *units, batch["valid"], scale * jnp.exp(params["temperature"])


def clip(summaries: Any) -> Any:
    """Both directions, with negatives from all rows."""
    image, text, valid = map(jnp.concatenate, summaries[:3])
    logits = summaries[3].mean() * image @ text.T
    both = valid[:, None] & valid
    losses = sum(
        -jnp.diag(jax.nn.log_softmax(jnp.where(both, x, -1e9)))
        for x in (logits, logits.T)
    )
    return jnp.sum(jnp.where(valid, losses, 0)) / (2 * valid.sum())


def route(params: Any, batch: Any) -> Any:
    x, valid = tower(params, batch["image"]), batch["valid"]
    probabilities = jax.nn.softmax(x @ params["router"])
    _, chosen = jax.lax.top_k(probabilities, 2)  # integers, without a gradient
    counts = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32).sum(1)
    of_experts = [jnp.sum(x * valid[:, None], 0) for x in (counts, probabilities)]
    return jnp.sum(jnp.where(valid, jnp.sum(x**2, -1), 0)), valid.sum(), *of_experts


def balanced(summaries: Any) -> Any:
    """A token mean, and the balance of the experts over all tokens (top-2)."""
    token_sum, n, counts, probabilities = (x.sum(0) for x in summaries)
    return token_sum / n + 100 * EXPERTS * jnp.sum(counts / n * probabilities / n)


LOSSES = {"clip": (embed, clip), "balance": (route, balanced)}
COUPLED = {name: jax.jit(coupled_value_and_grad(*x)) for name, x in LOSSES.items()}


def plain(summary_fn: Any, loss_fn: Any, has_aux: bool = False) -> Any:
    """The value and gradient, with the activations of all micro-batches at a time."""

    def loss(params: Any, window: Any, **keywords: Any) -> Any:
        return loss_fn(
            jax.vmap(lambda batch: summary_fn(params, batch, **keywords))(window)
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=has_aux))


@pytest.mark.parametrize("name", ["clip", helpers.slow("balance")])
def test_the_gradient_is_that_of_the_full_batch(name: str):
    full = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), WINDOW)
    with jax.enable_x64(True):
        reference = plain(*LOSSES[name])
        expected = reference(PARAMS, full)
        (value, aux), grads = COUPLED[name](PARAMS, WINDOW, num_micro_batches=K)
        parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], WINDOW) for i in range(K)]
        on_their_own = [reference(PARAMS, x)[1] for x in parts]
    assert aux is None
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    assert helpers.relative_error(grads, expected[1]) < 1e-12
    weights = VALID.sum(1) / VALID.sum()
    naive = jax.tree.map(lambda *g: np.tensordot(weights, g, 1), *on_their_own)
    assert helpers.relative_error(naive, expected[1]) > 0.05


def test_micro_batches_that_do_not_run_have_summaries_of_zeros():
    # Of the temperatures, the loss takes a mean, which counts the zeros.
    scaled = functools.partial(embed, scale=3 / K)
    part = jax.tree.map(lambda x: x[:3], WINDOW)
    with jax.enable_x64(True):
        COUPLED["clip"](PARAMS, WINDOW, num_micro_batches=K)
        with helpers.count_compilations() as compilations:
            (value, _), grads = COUPLED["clip"](PARAMS, WINDOW, num_micro_batches=3)
        assert not compilations
        expected = plain(scaled, clip)(PARAMS, part)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    assert helpers.relative_error(grads, expected[1]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_over_devices_it_is_the_same(kind: str):
    """Parameters are spread too (FSDP)."""
    mesh, narrow = make_mesh((8,), kind), jax.tree.map(jnp.asarray, (PARAMS, WINDOW))
    specs = {"layers": P(None, "data"), "router": P("data"), "temperature": P()}
    rows = dict.fromkeys(WINDOW, P(None, "data"))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), (specs, rows))
    params, window = jax.device_put(narrow, shardings)
    with jax.set_mesh(mesh):
        summary_fn = (
            embed if kind == "auto" else jax.sharding.auto_axes(embed, out_sharding=P())
        )
        f = jax.jit(coupled_value_and_grad(summary_fn, clip))
        (value, _), grads = f(params, window)
    expected = plain(embed, clip)(*narrow)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert helpers.relative_error(grads, expected[1]) < 1e-5
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)


def test_both_runs_of_a_micro_batch_get_the_same_key():
    def summary_fn(w: Any, x: Any, *, rng: Any, rate: float, name: str) -> Any:
        assert name == "a static keyword"
        return x * w * jax.random.bernoulli(rng, rate, x.shape)

    def loss_fn(y: Any) -> Any:
        return jnp.var(y), {"mean": y.mean()}

    def with_key(w: Any, batch: Any, **keywords: Any) -> Any:
        return summary_fn(w, batch[0], rng=batch[1], **keywords)

    key, w, keywords = jax.random.key(1), jnp.ones(WIDTH), {"name": "a static keyword"}
    f = coupled_value_and_grad(summary_fn, loss_fn, has_aux=True)
    static = functools.partial(f, **keywords)
    got = jax.jit(static)(w, ROWS, rng=key, rate=0.5)
    keys = [problems.fold_in(key, i) for i in range(K)]
    window = ROWS, jnp.stack(keys)
    static = functools.partial(with_key, rate=0.5, **keywords)
    expected = plain(static, loss_fn, has_aux=True)(w, window)
    chex.assert_trees_all_close(got, expected, rtol=1e-5)


def test_bfloat16_parameters_are_summed_in_float32():
    """300 gradients of 1 in bfloat16 would add up to 256 there."""
    f = jax.jit(coupled_value_and_grad(lambda w, x: w * x, jnp.sum))
    _, grad = f(jnp.ones((), jnp.bfloat16), jnp.ones((300, 1), jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16
    assert float(grad) == 300


def test_complex_summaries():
    def summary_fn(w: Any, x: Any) -> Any:
        return jnp.fft.fft(w * x)

    def loss_fn(y: Any) -> Any:
        return jnp.sum(jnp.abs(y.sum(0) + 1j * y.mean()) ** 2)

    given = jnp.ones(WIDTH), ROWS
    _, grads = jax.jit(coupled_value_and_grad(summary_fn, loss_fn))(*given)
    chex.assert_trees_all_close(grads, plain(summary_fn, loss_fn)(*given)[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [None, "v5e"], ids=["here", "v5e ahead"])
def test_temporaries_are_those_of_one_micro_batch_and_all_summaries(chip: str | None):
    if chip and CHIPS[chip].missing():
        pytest.skip("needs what compiles")
    where = CHIPS[chip].devices()[0] if chip else jax.devices()[0]
    # A gradient must not fit into the on-chip memory of a TPU.
    depth, width, micro = (24, 2048, 512) if chip else (12, 128, 16)

    def summary_fn(params: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, params)[0]

    def loss_fn(y: Any) -> Any:
        y = jnp.concatenate(y)
        return jnp.sum((y.T @ y / len(y) - jnp.eye(width)) ** 2)

    def sum_fn(params: Any, x: Any) -> Any:
        return jnp.sum(summary_fn(params, x) ** 2), len(x)

    def arguments(k: int) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(where)
        shapes = (depth, width, width), (k, micro, width)
        return [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in shapes]

    def bytes_of(f: Any, k: int) -> int:
        return helpers.net_bytes(jax.jit(f).lower(*arguments(k)))

    def growth(f: Any) -> int:
        return bytes_of(f, 16) - bytes_of(f, 4)

    coupled = coupled_value_and_grad(summary_fn, loss_fn)
    summaries = 12 * micro * width * 4
    assert growth(coupled) < 4 * summaries
    assert growth(plain(summary_fn, loss_fn)) > 8 * summaries
    window = bytes_of(window_value_and_grad(sum_fn), 16)
    assert bytes_of(coupled, 16) < window + 4 * summaries
    if jax.__version_info__ >= (0, 11):
        assert not whole_gradients(coupled, *arguments(4))


@pytest.mark.parametrize(
    ("summary_fn", "loss_fn", "words"),
    [
        (lambda w, x: x.astype(int), jnp.sum, "array of floats"),
        (lambda w, x: w * x, lambda y: y, "scalar"),
        (lambda w, x: w * x, lambda y: (y.sum(), 1), "With has_aux=False"),
        (lambda w, x: w * x, None, "loss_fn must be a function"),
        (3, jnp.sum, "summary_fn must be a function"),
        (lambda w, x: w * x["a"], jnp.sum, "summary_fn is given"),
    ],
)
def test_bad_functions_raise(summary_fn: Any, loss_fn: Any, words: str):
    with pytest.raises(Exception) as raised:
        coupled_value_and_grad(summary_fn, loss_fn)(jnp.ones(3), jnp.ones((2, 3)))
    notes = getattr(raised.value, "__notes__", [])
    assert words in "".join([str(raised.value), *notes])


def test_bad_windows_and_a_shard_map_raise():
    f = coupled_value_and_grad(lambda w, x: w * x["a"], jnp.sum)
    with pytest.raises(ValueError, match="share a leading axis"):
        f(jnp.ones(3), {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))})
    with pytest.raises(ValueError, match="from 0 to 2"):
        f(jnp.ones(3), {"a": jnp.ones((2, 3))}, num_micro_batches=3)
    specs = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
    with pytest.raises(ValueError, match="couple their own rows"):
        mapped = jax.shard_map(f, mesh=make_mesh((8,)), **specs)
        mapped(jnp.ones(()), {"a": jnp.ones((2, 8))})


def test_a_summary_function_gets_copies_and_jax_arrays():
    """Outside of `jit` too; a loss that assigns to a container changes only its own."""
    params = {"table": np.arange(12, dtype=np.float32).reshape(4, 3), "scale": 2.0}

    def summary_fn(params: Any, ids: Any, *, state: Any) -> Any:
        params["table"] = params["table"].at[0].multiply(params["scale"])
        return params["table"][ids] * state

    def loss_fn(y: Any) -> Any:
        return jnp.sum(y**2)

    before, ids = {**params}, jnp.array([[0, 1], [2, 0]])
    f = coupled_value_and_grad(summary_fn, loss_fn)
    (value, _), grads = f(params, ids, state=np.float32(3))
    assert all(params[name] is x for name, x in before.items())
    reference = plain(
        lambda p, ids, state: summary_fn({**p}, ids, state=state), loss_fn
    )
    expected = reference(params, ids, state=3.0)
    chex.assert_trees_all_close((value, grads), expected, rtol=1e-6)


def test_minus_infinity_with_no_weight_is_no_alarm():
    def summary_fn(w: Any, x: Any) -> Any:
        return jnp.where(x > 0, w * x, -jnp.inf)

    # Not in a jit, which would remove the product that nobody reads.
    f = coupled_value_and_grad(summary_fn, jax.nn.logsumexp)
    with jax.debug_nans(True):
        _, grad = f(jnp.float32(1), ROWS)
    _, expected = plain(summary_fn, jax.nn.logsumexp)(jnp.float32(1), ROWS)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)
