"""Losses whose sum and count use one mask, from all logits and from chunks of them."""

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

from optax_tokenaccum import make_train_step
from optax_tokenaccum._core import backward
from optax_tokenaccum.losses import linear_cross_entropy_sum, softmax_cross_entropy_sum

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 37, 16, 60
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
LOGITS = HIDDEN @ HEAD
LABELS = RNG.integers(0, VOCABULARY, (ROWS, TOKENS))
MASK = np.arange(TOKENS) < np.array([20, 37, 0])[:, None]
WEIGHTS = np.where(MASK, RNG.uniform(0.5, 2, MASK.shape), 0).astype(np.float32)
BIAS = RNG.normal(size=VOCABULARY).astype(np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "mask": {"mask": MASK},
    "weights": {"mask": WEIGHTS},
    "ignored": {"mask": MASK, "ignore_index": 7},
    "all masked": {"mask": 0 * MASK},
    "z-loss, smoothing": {"mask": MASK, "z_loss": 0.1, "label_smoothing": 0.2},
    "bias, cap": {"mask": MASK, "bias": BIAS, "logit_cap": 5.0},
    "arrays": {"z_loss": jnp.float32(0.1), "label_smoothing": jnp.float32(0.2)},
    "list, array": {"bias": BIAS.tolist(), "logit_cap": jnp.float32(5)},
}


def in_float64(
    options: dict[str, Any],
    hidden: Any = HIDDEN,
    head: Any = HEAD,
    labels: Any = LABELS,
) -> Any:
    """Plain JAX, all logits at once: the sum and both gradients, and the count."""
    weights = np.asarray(options.get("mask", np.ones(labels.shape)), np.float64)
    weights = np.where(labels == options.get("ignore_index", -1), 0, weights)
    smoothing = options.get("label_smoothing", 0.0)

    def loss_sum(hidden: Any, head: Any) -> Any:
        logits = hidden @ head + np.asarray(options.get("bias", 0))
        if cap := options.get("logit_cap"):
            logits = cap * jnp.tanh(logits / cap)
        targets = jax.nn.one_hot(labels, head.shape[1])
        targets = optax.smooth_labels(targets, smoothing)
        products = jnp.where(targets, targets * jax.nn.log_softmax(logits), 0)
        losses = -jnp.sum(products, -1)
        log_normalizers = jax.nn.logsumexp(logits, axis=-1)
        losses += options.get("z_loss", 0) * log_normalizers**2
        return jnp.sum(weights * losses)

    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (hidden, head)]
        found = jax.jit(jax.value_and_grad(loss_sum, (0, 1)))(*wide)
        return jax.tree.map(np.asarray, found), weights.sum()


def at_once(hidden: Any, head: Any, labels: Any, **options: Any) -> Any:
    return softmax_cross_entropy_sum(hidden @ head, labels, **options)


def ours(loss: Any = linear_cross_entropy_sum, **options: Any) -> Any:
    """The sum and the count, and the gradients by the hidden states and the head."""

    def loss_sum(hidden: Any, head: Any, labels: Any = LABELS) -> Any:
        return loss(hidden, head, labels, **options)

    return jax.jit(jax.value_and_grad(loss_sum, (0, 1), has_aux=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_sum_the_count_and_the_gradients_are_those_of_all_tokens(name: str):
    options = OPTIONS[name]
    (expected, gradients), count = in_float64(options)
    ways = [ours(**options, chunk_size=size) for size in (None, 1, 5, 36, 100)]
    if "bias" not in options:
        ways.append(ours(at_once, **options))
    for f in ways:
        (loss_sum, num_tokens), found = f(HIDDEN, HEAD)
        assert loss_sum.dtype == num_tokens.dtype == jnp.float32
        np.testing.assert_allclose(num_tokens, count, rtol=1e-6)
        np.testing.assert_allclose(loss_sum, expected, rtol=1e-6)
        for x, y in zip(found, gradients, strict=True):
            scale = np.linalg.norm(y) or 1.0
            assert np.linalg.norm(np.float64(x) - y) <= 1e-6 * scale


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_closer_than_with_the_logits_of_all_tokens(dtype: Any):
    narrow = HIDDEN.astype(dtype), HEAD.astype(dtype)
    (expected, gradients), _ = in_float64({}, *narrow)
    errors = []
    for f in (ours(chunk_size=5), ours(at_once)):
        (loss_sum, _), found = f(*narrow)
        assert loss_sum.dtype == jnp.float32 and all(x.dtype == dtype for x in found)
        pairs = zip((loss_sum, *found), (expected, *gradients), strict=True)
        errors.append([helpers.relative_error(x, y) for x, y in pairs])
    chunked, whole = np.array(errors)
    assert chunked[0] < 1e-6 < whole[0]
    assert (chunked < whole).all(), (chunked, whole)


def test_sums_over_many_narrow_tokens_are_in_float32():
    """A sum in bfloat16 stops growing; a float32 head computes in float32."""
    hidden, head = jnp.ones((2048, 2), jnp.bfloat16), jnp.zeros((2, 2), jnp.bfloat16)
    f = ours(chunk_size=1)
    (loss_sum, _), (_, gradient) = f(hidden, head, jnp.zeros(2048, int))
    np.testing.assert_array_equal(gradient, jnp.array([[-1024, 1024]] * 2))
    whole, _ = softmax_cross_entropy_sum(hidden @ head, jnp.zeros(2048, int))
    np.testing.assert_allclose([loss_sum, whole], 2048 * np.log(2), rtol=1e-6)
    assert np.add.accumulate(np.full(2048, 0.5, jnp.bfloat16))[-1] < 256
    narrow = HIDDEN.astype(jnp.bfloat16)
    wide = ours()(narrow.astype(np.float32), HEAD)[0]
    chex.assert_trees_all_equal(ours()(narrow, HEAD)[0], wide)


def of_logits(logits: Any, head: Any, labels: Any, **options: Any) -> Any:
    return softmax_cross_entropy_sum(logits, labels, **options)


@pytest.mark.parametrize(
    ("loss", "x"),
    [(of_logits, LOGITS), (partial(linear_cross_entropy_sum, chunk_size=5), HIDDEN)],
    ids=["logits", "chunks"],
)
def test_what_does_not_count_never_matters_and_the_rest_is_loud(loss: Any, x: Any):
    for ignored, options in ((10**6, {"mask": MASK}), (-100, {"ignore_index": -100})):
        f, labels = ours(loss, **options), np.where(MASK, LABELS, ignored)
        expected = f(x, HEAD, labels)
        assert np.isfinite(expected[0][0])
        assert not np.asarray(expected[1][0])[~MASK].any()
        for bad in (np.nan, np.inf, -np.inf):
            spoilt = np.where(MASK[..., None], x, np.float32(bad))
            chex.assert_trees_all_equal(f(spoilt, HEAD, labels), expected)
    for outside in (-1, -100, VOCABULARY):
        labels[1, 1] = outside
        assert np.isnan(loss(x, HEAD, labels, mask=MASK)[0])
    labels[1, 1] = LABELS[1, 1]
    for wrong in (-2.0, np.nan):
        weights = WEIGHTS.copy()
        weights[1, 1] = wrong
        for rows in (slice(None), ([1], [1])):  # not empty if it is alone
            given = x[rows][None], HEAD, LABELS[rows][None]
            loss_sum, num_tokens = loss(*given, mask=weights[rows][None])
            assert np.isnan(loss_sum) and num_tokens > 0
        labels[1, 1] = -100  # not counted, whatever its weight
        found = loss(x, HEAD, labels, mask=weights, ignore_index=-100)
        expected = loss(x, HEAD, labels, mask=WEIGHTS, ignore_index=-100)
        chex.assert_trees_all_equal(found, expected)


INTEGERS = "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
IN_JIT = jax.jit(softmax_cross_entropy_sum, static_argnames="ignore_index")


@pytest.mark.parametrize("function", [IN_JIT, softmax_cross_entropy_sum])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_of_every_dtype_mean_what_they_say(dtype: str, function: Any):
    most = min(np.iinfo(dtype).max, 2**31 - 1)
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


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_hidden_states_and_heads_of_8_bits_are_multiplied_in_bfloat16(dtype: Any):
    narrow = HIDDEN.astype(dtype), HEAD.astype(dtype)
    for given in (narrow, (narrow[0], HEAD.astype(jnp.bfloat16))):
        (loss_sum, _), found = ours(chunk_size=5)(*given)
        assert [x.dtype for x in found] == [x.dtype for x in given]
        wide = [x.astype(jnp.bfloat16) for x in given]
        np.testing.assert_array_equal(loss_sum, ours(chunk_size=5)(*wide)[0][0])


def test_ranks_are_promoted_by_hand_and_good_logits_make_no_nan():
    options = OPTIONS["bias, cap"] | OPTIONS["z-loss, smoothing"]
    expected = linear_cross_entropy_sum(HIDDEN, HEAD, LABELS, **options)
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True), jax.debug_infs(True):
        found = linear_cross_entropy_sum(HIDDEN, HEAD, LABELS, **options)
        softmax_cross_entropy_sum(jnp.asarray(LOGITS), LABELS, MASK)
        with pytest.raises(FloatingPointError):
            softmax_cross_entropy_sum(jnp.asarray(LOGITS), LABELS - VOCABULARY)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_no_rows_no_tokens_and_no_width(shape: tuple[int, ...]):
    hidden, labels = jnp.zeros(shape), jnp.zeros(shape[:-1], int)
    found = ours()(hidden, jnp.zeros((shape[-1], 5)), labels)
    expected = ours(at_once)(hidden, jnp.zeros((shape[-1], 5)), labels)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


@pytest.mark.parametrize("bias", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("head", [jnp.bfloat16, jnp.float32])
def test_strict_dtype_promotion(head: Any, bias: Any):
    options = {} if bias is None else {"bias": BIAS.astype(bias)}
    given = HIDDEN.astype(jnp.bfloat16), HEAD.astype(head)
    expected = ours(**options, logit_cap=jnp.bfloat16(5))(*given)
    with jax.numpy_dtype_promotion("strict"):
        found = ours(**options, logit_cap=jnp.bfloat16(5))(*given)
    chex.assert_trees_all_equal(found, expected)


def test_a_small_loss_next_to_large_logits():
    logits = np.float32([[40, 28, 20]])
    loss_sum, _ = softmax_cross_entropy_sum(logits, np.array([0]))
    expected = np.log1p(np.exp(-12.0) + np.exp(-20.0))
    np.testing.assert_allclose(loss_sum, expected, rtol=0.02)
    naive = jax.nn.logsumexp(logits) - logits[0, 0]
    assert abs(float(naive) / expected - 1) > 0.1


def test_a_masked_vocabulary_and_a_traced_weight():
    nothing = np.full((ROWS, TOKENS, 2), -np.inf, np.float32)
    logits = np.concatenate([LOGITS, nothing], -1)
    f = partial(softmax_cross_entropy_sum, logits, LABELS, MASK)
    expected = softmax_cross_entropy_sum(LOGITS, LABELS, MASK, z_loss=0.1)[0]
    traced = jax.jit(lambda z: f(z_loss=z)[0])(0.1)
    wide, _ = f(z_loss=np.float64(0.1))
    assert wide.dtype == jnp.float32
    smoothed = jax.jit(lambda share: f(z_loss=0.1, label_smoothing=share)[0])(0.0)
    np.testing.assert_allclose([traced, wide, smoothed], expected, rtol=1e-6)


def test_every_number_may_be_traced():
    f = partial(linear_cross_entropy_sum, HIDDEN, HEAD, LABELS)
    options = {"z_loss": 0.1, "label_smoothing": 0.2, "logit_cap": 5.0}
    found = jax.jit(lambda options: f(**options))(options)
    chex.assert_trees_all_close(found, f(**options), rtol=1e-6)


def test_logits_of_a_chunk_alone_are_in_memory():
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((512, 16), (16, 4096))]

    def temporaries(loss: Any, **options: Any) -> int:
        f = ours(loss, **options)
        return helpers.net_bytes(f.lower(*shapes, np.zeros(512, int)))

    chunks = temporaries(linear_cross_entropy_sum, chunk_size=32)
    assert temporaries(at_once) > 512 * 4096 * 4 > 4 * chunks


# No number of words divides these into blocks of at most 512.
MANY_WORDS, MANY_TOKENS = 1301, 24
MANY = (
    RNG.normal(size=(2, MANY_TOKENS // 2, WIDTH)).astype(np.float32),
    RNG.normal(size=(WIDTH, MANY_WORDS)).astype(np.float32),
    RNG.integers(0, MANY_WORDS, (2, MANY_TOKENS // 2)),
)
MINUS_INFINITY = np.where(np.arange(MANY_WORDS) < 600, -np.inf, 0).astype(np.float32)


def all_logits(hidden: Any, head: Any, labels: Any, **options: Any) -> Any:
    logits = hidden @ head + options.pop("bias", 0)
    if cap := options.pop("logit_cap", None):
        logits = cap * jnp.tanh(logits / cap)
    return softmax_cross_entropy_sum(logits, labels, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"z_loss": 0.1, "label_smoothing": 0.2, "logit_cap": 5.0},
        {"bias": np.resize(BIAS, MANY_WORDS), "chunk_size": 5},
        {"bias": MINUS_INFINITY},
        {"mask": np.zeros(MANY[2].shape)},
    ],
    ids=["none", "numbers", "bias", "minus infinity", "all masked"],
)
def test_words_of_blocks_that_do_not_divide_the_vocabulary(options: Any):
    hidden, head, labels = MANY
    if options.get("bias") is MINUS_INFINITY:  # of all words of the first block
        labels = np.maximum(labels, 600)
    (expected, gradients), count = in_float64(options, hidden, head, labels)
    (found, num_tokens), of_found = ours(**options)(hidden, head, labels)
    np.testing.assert_allclose(num_tokens, count)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for x, y in zip(of_found, gradients, strict=True):
        scale = np.linalg.norm(y) or 1.0
        assert np.linalg.norm(np.float64(x) - y) <= 2e-6 * scale


def test_labels_outside_have_no_gradient_unless_they_are_lost():
    hidden, head, labels = MANY
    mask = np.ones(labels.shape)
    mask[0, :3] = 0
    outside = labels.copy()
    outside[0, :3] = MANY_WORDS, -1, 2**30
    f = ours(mask=mask)
    chex.assert_trees_all_equal(f(hidden, head, outside), f(hidden, head, labels))
    assert np.isnan(linear_cross_entropy_sum(hidden, head, outside)[0])


def test_gradients_of_gradients_over_many_blocks():
    def penalty(loss: Any, hidden: Any, head: Any) -> Any:
        f = jax.grad(lambda *given: loss(*given, MANY[2], z_loss=0.1)[0], (0, 1))
        return sum(jnp.sum(x**2) for x in f(hidden, head))

    found, expected = (
        jax.jit(jax.grad(partial(penalty, loss), (0, 1)))(*MANY[:2])
        for loss in (linear_cross_entropy_sum, all_logits)
    )
    assert helpers.relative_error(found, expected) < 2e-6


def test_half_precision_adds_up_gradients_over_blocks_in_float32():
    narrow = [x.astype(jnp.bfloat16) for x in MANY[:2]]
    (_, expected), _ = in_float64({}, *narrow, MANY[2])
    (_, _), found = ours()(*narrow, MANY[2])
    (_, _), whole = ours(at_once)(*narrow, MANY[2])
    for x, y, z in zip(found, whole, expected, strict=True):
        assert helpers.relative_error(x, z) < helpers.relative_error(y, z)


def test_a_block_of_logits_alone_is_in_memory():
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1024, 64), (64, 8192))]
    compiled = ours().lower(*shapes, np.zeros(1024, int)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1024 * 8192 * 4 / 4


@pytest.mark.skipif(
    not backward.CAN_ADD_IN_PLACE, reason="adds whole gradients below jax 0.11"
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_adds_the_gradient_of_a_block_to_its_sum(tied: bool):
    width, words = 128, 8200  # more elements than are LARGE

    def loss_fn(params: Any, batch: Any) -> Any:
        head = params["head"].T if tied else params["head"]
        hidden = jnp.tanh(batch["x"] @ params["w"])
        labels, mask = batch["labels"], batch["mask"]
        return linear_cross_entropy_sum(hidden, head, labels, mask)

    def plain(params: Any, batch: Any) -> Any:
        head = params["head"].T if tied else params["head"]
        hidden = jnp.tanh(batch["x"] @ params["w"])
        return all_logits(hidden, head, batch["labels"], mask=batch["mask"])

    head = RNG.normal(size=(width, words)).astype(np.float32) / 4
    params = {"head": head.T if tied else head, "w": np.eye(width, dtype=np.float32)}
    params = jax.tree.map(jnp.asarray, params)
    batches = [
        {
            "x": RNG.normal(size=(2, 6, width)).astype(np.float32),
            "labels": RNG.integers(0, words, (2, 6)),
            "mask": np.arange(6) < np.array([[n], [6 - n]]),
        }
        for n in (0, 2, 5)
    ]
    step = make_train_step(loss_fn, optax.sgd(1.0), len(batches))
    state = step.init(params)
    if not tied:  # a CPU turns a tied head
        lowered = step.accumulate.lower(state, batches[0])
        options = {"xla_backend_optimization_level": 3}
        memory: Any = lowered.compile(options).memory_analysis()
        assert memory.temp_size_in_bytes < head.nbytes / 4
    state, _ = helpers.run_step(step, state, batches)
    every = {k: np.concatenate([x[k] for x in batches]) for k in batches[0]}
    (_, n), expected = jax.value_and_grad(plain, has_aux=True)(params, every)
    found = helpers.difference(params, state.params)
    assert helpers.relative_error(found, jax.tree.map(lambda x: x / n, expected)) < 2e-6


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


OF_BOTH: list[tuple[str, dict[str, Any]]] = [
    (r"\d+\) and labels \(3, 4\)", {"labels": LABELS[:, :4]}),
    (r"mask \(3,\) and labels \(3, 37\)", {"mask": np.ones(3)}),
    ("labels, after .*, must be integers", {"labels": LABELS / 2}),
]
OF_CHUNKS: list[tuple[str, dict[str, Any]]] = [
    (r"and \(60, 16\).*embedding.T", {"head": HEAD.T}),
    ("chunk_size must be an integer of at least 1", {"chunk_size": 0}),
    ("chunk_size must be an integer .* got a float", {"chunk_size": 2.5}),
]


@pytest.mark.parametrize(("message", "given"), OF_BOTH + OF_CHUNKS)
def test_errors_say_what_does_not_fit(message: str, given: dict[str, Any]):
    error = TypeError if "after" in message or "float" in message else ValueError
    arguments = {"hidden": HIDDEN, "head": HEAD, "labels": LABELS} | given
    with pytest.raises(error, match=message):
        linear_cross_entropy_sum(**arguments)
    if not given.keys() & {"head", "bias", "chunk_size"}:
        arguments = {"logits": LOGITS, "labels": LABELS} | given
        with pytest.raises(error, match=message):
            softmax_cross_entropy_sum(**arguments)


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
    weights = np.float32(np.resize(HEAD, (256, VOCABULARY)) / 16)
    pairs = zip((hidden, weights, labels), (rows, head, rows), strict=True)
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    f = ours(chunk_size=chunk_size)
    with jax.set_mesh(mesh):
        compiled = f.lower(*given).compile()
        found = compiled(*given)
    assert helpers.bytes_sent(compiled) < 4.1 * weights.nbytes < hidden.nbytes / 4
    expected = f(hidden, weights, labels)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found[1][0].sharding.is_equivalent_to(given[0].sharding, 3)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("rows", "head"), SPREAD, ids=str)
def test_blocks_have_words_of_every_device(rows: P, head: P, kind: str):
    """No device is sent the whole head, nor a part that is not of one block."""
    mesh = meshes.make_mesh((4, 2), kind)
    hidden, labels = np.resize(HIDDEN, (8, 128, 64)), np.resize(LABELS, (8, 128))
    weights = np.float32(np.resize(HEAD, (64, 8192)) / 16)
    pairs = zip((hidden, weights, labels), (rows, head, rows), strict=True)
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    f = ours()
    with jax.set_mesh(mesh):
        compiled = f.lower(*given).compile()
        found = compiled(*given)
    assert helpers.bytes_sent(compiled) < weights.nbytes / 2
    expected = f(hidden, weights, labels)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def test_logits_spread_over_the_vocabulary_on_an_explicit_mesh():
    logits, labels = np.tile(LOGITS[:2], (1, 1, 2)), LABELS[:2] + VOCABULARY
    mesh = meshes.make_mesh((2, 4), "explicit")
    specs = P("data", None, "model"), P("data", None)
    pairs = zip((logits, labels), specs, strict=True)
    spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    function = jax.jit(jax.value_and_grad(softmax_cross_entropy_sum, has_aux=True))
    with jax.set_mesh(mesh):
        found = function(*spread)
    expected = function(logits, labels)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
