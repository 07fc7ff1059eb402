"""Chunks of logits: the sum, the count and the gradients are those of all tokens."""

from functools import partial
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import linear_cross_entropy_sum, softmax_cross_entropy_sum

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 37, 16, 60
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
LABELS = RNG.integers(0, VOCABULARY, (ROWS, TOKENS))
MASK = np.arange(TOKENS) < np.array([20, 37, 0])[:, None]
WEIGHTS = np.where(MASK, RNG.uniform(0.5, 2, MASK.shape), 0).astype(np.float32)
BIAS = RNG.normal(size=VOCABULARY).astype(np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "mask": {"mask": MASK},
    "weights": {"mask": WEIGHTS},
    "ignored": {"mask": MASK, "ignore_index": 7},
    "z-loss, smoothing": {"mask": MASK, "z_loss": 0.1, "label_smoothing": 0.2},
    "bias, cap": {"mask": MASK, "bias": BIAS, "logit_cap": 5.0},
}


def in_float64(options: dict[str, Any], hidden: Any = HIDDEN, head: Any = HEAD) -> Any:
    """Plain JAX, all logits at once: the sum and both gradients, and the count."""
    weights = np.asarray(options.get("mask", np.ones(LABELS.shape)), np.float64)
    weights = np.where(LABELS == options.get("ignore_index", -1), 0, weights)
    smoothing = options.get("label_smoothing", 0.0)

    def loss_sum(hidden: Any, head: Any) -> Any:
        logits = hidden @ head + options.get("bias", 0)
        if cap := options.get("logit_cap"):
            logits = cap * jnp.tanh(logits / cap)
        targets = optax.smooth_labels(jax.nn.one_hot(LABELS, VOCABULARY), smoothing)
        losses = -jnp.sum(targets * jax.nn.log_softmax(logits), -1)
        log_normalizers = jax.nn.logsumexp(logits, axis=-1)
        losses += options.get("z_loss", 0) * log_normalizers**2
        return jnp.sum(weights * losses)

    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (hidden, head)]
        found = jax.jit(jax.value_and_grad(loss_sum, (0, 1)))(*wide)
        return jax.tree.map(np.asarray, found), weights.sum()


def ours(loss: Any = linear_cross_entropy_sum, **options: Any) -> Any:
    def loss_sum(hidden: Any, head: Any) -> Any:
        return loss(hidden, head, LABELS, **options)

    return jax.jit(jax.value_and_grad(loss_sum, (0, 1), has_aux=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_chunk_size_gives_the_loss_of_all_tokens(options: dict[str, Any]):
    (expected, grads), count = in_float64(options)
    for chunk_size in (None, 1, 5, 36, 100):
        f = ours(**options, chunk_size=chunk_size)
        (loss_sum, num_tokens), found = f(HIDDEN, HEAD)
        assert loss_sum.dtype == num_tokens.dtype == jnp.float32
        np.testing.assert_allclose(num_tokens, count, rtol=1e-6)
        np.testing.assert_allclose(loss_sum, expected, rtol=1e-6)
        for x, y in zip(found, grads, strict=True):
            assert helpers.relative_error(x, y) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_closer_than_with_the_logits_of_all_tokens(dtype: Any):
    def at_once(hidden: Any, head: Any, labels: Any, **options: Any) -> Any:
        return softmax_cross_entropy_sum(hidden @ head, labels, **options)

    narrow = HIDDEN.astype(dtype), HEAD.astype(dtype)
    (expected, grads), _ = in_float64({}, *narrow)
    errors = []
    for f in (ours(chunk_size=5), ours(at_once)):
        (loss_sum, _), found = f(*narrow)
        assert all(x.dtype == dtype for x in found)
        pairs = zip((loss_sum, *found), (expected, *grads), strict=True)
        errors.append([helpers.relative_error(x, y) for x, y in pairs])
    chunked, whole = np.array(errors)
    assert chunked[0] < 1e-6 < whole[0]
    assert (chunked < whole).all(), (chunked, whole)


def test_the_head_is_summed_in_float32_and_a_float32_head_computes_in_float32():
    """Many equal chunks: a sum in bfloat16 stops growing."""
    hidden, head = jnp.ones((2048, 2), jnp.bfloat16), jnp.zeros((2, 2), jnp.bfloat16)
    f = partial(linear_cross_entropy_sum, labels=jnp.zeros(2048, int), chunk_size=1)
    gradient = jax.jit(jax.grad(lambda w: f(hidden, w)[0]))(head)
    np.testing.assert_array_equal(gradient, jnp.array([[-1024, 1024]] * 2))
    assert np.add.accumulate(np.full(2048, 0.5, jnp.bfloat16))[-1] < 256
    mixed = ours()(HIDDEN.astype(jnp.bfloat16), HEAD)[0]
    wide = ours()(HIDDEN.astype(jnp.bfloat16).astype(np.float32), HEAD)[0]
    chex.assert_trees_all_equal(mixed, wide)


def test_what_does_not_count_never_matters():
    bad = np.where(MASK[..., None], HIDDEN, np.float32(np.nan))
    for options in ({"mask": MASK}, {"ignore_index": -100}):
        labels = np.where(MASK, LABELS, -100)
        f = partial(linear_cross_entropy_sum, labels=labels, chunk_size=5, **options)
        f = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
        expected = f(HIDDEN, HEAD)
        chex.assert_trees_all_equal(f(bad, HEAD), expected)
        assert not np.asarray(expected[1][0])[~MASK].any()
    labels = np.where(MASK, VOCABULARY, LABELS)
    assert np.isnan(linear_cross_entropy_sum(HIDDEN, HEAD, labels, MASK)[0])


def test_logits_of_a_chunk_alone_are_in_memory():
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((512, 16), (16, 4096))]
    labels = np.zeros(512, int)

    def temporaries(loss: Any) -> int:
        f = jax.jit(jax.grad(lambda x, w: loss(x, w)[0], (0, 1)))
        return helpers.net_bytes(f.lower(*shapes))

    chunks = partial(linear_cross_entropy_sum, labels=labels, chunk_size=32)
    at_once = temporaries(lambda x, w: softmax_cross_entropy_sum(x @ w, labels))
    assert at_once > 512 * 4096 * 4 > 4 * temporaries(chunks)


def test_vmap_and_policies_of_checkpoint():
    def loss_sum(hidden: Any, head: Any, labels: Any) -> Any:
        f = partial(linear_cross_entropy_sum, chunk_size=5, ignore_index=7)
        return f(jnp.tanh(hidden), head, labels)[0]

    gradient = jax.value_and_grad(loss_sum, (0, 1))
    rows = jax.jit(jax.vmap(gradient, (0, None, 0)))(HIDDEN, HEAD, LABELS)
    expected = jax.jit(gradient)(HIDDEN, HEAD, LABELS)
    added = jnp.sum(rows[0]), (rows[1][0], jnp.sum(rows[1][1], 0))
    chex.assert_trees_all_close(added, expected, rtol=1e-5, atol=1e-4)
    policies = jax.checkpoint_policies
    for policy in (
        None,
        policies.everything_saveable,
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names("x"),
    ):
        f = jax.value_and_grad(jax.checkpoint(loss_sum, policy=policy), (0, 1))
        found = jax.jit(f)(HIDDEN, HEAD, LABELS)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def test_errors_say_what_does_not_fit():
    for error, message, call in (
        (ValueError, r"16\) and labels \(3, 4\)", {"labels": LABELS[:, :4]}),
        (ValueError, r"mask \(3,\) and labels \(3, 37\)", {"mask": np.ones(3)}),
        (ValueError, r"head \(60, 16\).*embedding.T", {"head": HEAD.T}),
        (ValueError, r"bias \(16,\) and head \(16, 60\)", {"bias": np.ones(16)}),
        (ValueError, "logit_cap must be positive: got 0", {"logit_cap": 0.0}),
        (ValueError, "label_smoothing from 0", {"label_smoothing": 1.0}),
        (ValueError, "chunk_size must be an integer of at least 1", {"chunk_size": 0}),
        (TypeError, "chunk_size must be an integer", {"chunk_size": 2.5}),
        (
            TypeError,
            "labels, which follow hidden, must be integers",
            {"labels": LABELS / 2},
        ),
    ):
        given = {"hidden": HIDDEN, "head": HEAD, "labels": LABELS} | call
        with pytest.raises(error, match=message):
            linear_cross_entropy_sum(**given)


def test_types_of_a_shard_map_of_ones_own():
    def total(head: Any, hidden: Any, labels: Any) -> Any:
        loss_sum, _ = linear_cross_entropy_sum(hidden, head, labels, chunk_size=5)
        return jax.lax.psum(loss_sum, "data")

    rows = P("data")
    mesh, specs = meshes.make_mesh((3,)), {"in_specs": (P(), rows, rows)}
    f = jax.shard_map(total, mesh=mesh, out_specs=P(), **specs)
    loss_sum, gradient = jax.jit(jax.value_and_grad(f))(HEAD, HIDDEN, LABELS)
    expected, (_, of_head) = in_float64({})[0]
    np.testing.assert_allclose(loss_sum, expected, rtol=1e-6)
    assert helpers.relative_error(gradient, of_head) < 1e-6


HEADS = [P(), P("data"), P(None, "model"), P("data", "model")]
SPREAD = [(P("data"), x) for x in HEADS] + [(P("data", "model"), x) for x in HEADS[:2]]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("rows", "head"), SPREAD, ids=str)
def test_rows_and_tokens_stay_spread(rows: P, head: P, kind: str):
    """No device is sent a row or a token of another one."""
    mesh, chunk_size = meshes.make_mesh((4, 2), kind), 45 if rows == P("data") else 32
    hidden, labels = np.resize(HIDDEN, (8, 128, 256)), np.resize(LABELS, (8, 128))

    def place(x: Any, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    weights = np.float32(np.resize(HEAD, (256, VOCABULARY)) / 16)
    given = place(hidden, rows), place(weights, head), place(labels, rows)
    f = jax.value_and_grad(
        partial(linear_cross_entropy_sum, chunk_size=chunk_size), (0, 1), True
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*given).compile()
        found = compiled(*given)
    assert helpers.bytes_sent(compiled) < 4.1 * weights.nbytes < hidden.nbytes / 4
    chex.assert_trees_all_close(
        found, jax.jit(f)(hidden, weights, labels), rtol=1e-5, atol=1e-5
    )
    assert found[1][0].sharding.is_equivalent_to(given[0].sharding, 3)
