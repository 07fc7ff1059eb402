"""Which arrays of a batch are rows, to be sharded over devices, and which are not."""

import contextlib
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import in_float64, relative_error, run_step, stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import TYPES, make_mesh, make_step

from optax_tokenaccum import make_train_step
from optax_tokenaccum.losses import softmax_cross_entropy_sum

K, ROWS, CLASSES = 4, 32, 16
PARAMS = {"w": jnp.zeros((3, CLASSES))}
RNG = np.random.default_rng(0)
CLASS_WEIGHTS = RNG.uniform(0.1, 9, CLASSES).astype(np.float32)
FULL = {
    "x": RNG.normal(size=(K * ROWS, 3)).astype(np.float32),
    "labels": RNG.integers(0, CLASSES, K * ROWS),
}


def loss_fn(params: Any, batch: Any, class_weights: Any = None) -> Any:
    """A cross entropy with class weights, which are not rows."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        batch["x"] @ params["w"], batch["labels"]
    )
    of_classes = batch["class_weights"] if class_weights is None else class_weights
    weights = of_classes[batch["labels"]]
    return jnp.sum(losses * weights), jnp.sum(weights)


def exact(loss_fn: Any, params: Any, batch: Any) -> Any:
    def mean(params: Any, batch: Any) -> Any:
        loss_sum, num_tokens = loss_fn(params, batch)
        return loss_sum / num_tokens

    return in_float64(jax.grad(mean))(params, batch)


EXACT = exact(loss_fn, PARAMS, FULL | {"class_weights": CLASS_WEIGHTS})
# In 0.1.0, devices had parts of them, and indices were clipped.
PARTS = np.resize(CLASS_WEIGHTS[: CLASSES // 8], CLASSES)
WRONG = exact(loss_fn, PARAMS, FULL | {"class_weights": PARTS})
assert relative_error(WRONG, EXACT) > 0.1


def on(mesh: Any, *spec: Any) -> Any:
    return lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec)))


def given_to(way: str, place: Any, place_rows: Any = np.asarray) -> list[Any]:
    """Return the batch of each call, with class weights and rows placed as given."""
    batches = [x | {"class_weights": CLASS_WEIGHTS} for x in helpers.cut(FULL, K)]
    return [
        {k: (place if k == "class_weights" else place_rows)(x) for k, x in each.items()}
        for each in ([stack(batches)] if way == "window" else batches)
    ]


def over(way: str, mesh: Any, axis: str) -> Any:
    """Spread what all micro-batches of a call have along one axis of the mesh."""
    return on(mesh, *[None] * (way == "window"), axis)


def check(way: str, mesh: Any, batches: list[Any], **keywords: Any) -> None:
    def with_key(*args: Any, rng: Any = None, **keywords: Any) -> Any:
        return loss_fn(*args, **keywords)

    step = make_step(way, optax.sgd(1.0), mesh, loss_fn=with_key)
    state, metrics = run_step(step, step.init(PARAMS), batches, **keywords)
    num_tokens = CLASS_WEIGHTS[FULL["labels"]].sum()
    np.testing.assert_allclose(metrics.num_tokens, num_tokens, rtol=1e-6)
    got = helpers.difference(PARAMS, state.params)
    assert relative_error(got, EXACT) < 2e-6


def test_what_is_placed_anywhere_but_on_the_data_axis_is_whole():
    """On every device, or over another axis alone."""
    way, mesh = "two programs", make_mesh((4, 2))
    check(way, mesh, given_to(way, over(way, mesh, "model")))
    way, mesh = "window", make_mesh((8,), "explicit")
    check(way, mesh, given_to(way, on(mesh), over(way, mesh, "data")))


def test_batch_that_is_placed_on_every_device_is_spread():
    """Every array is replicated, so all are rows, and none is counted 8 times."""
    mesh = make_mesh((8,))
    batches = given_to("window", on(mesh), on(mesh))
    weights = {"class_weights": batches[0].pop("class_weights")[0]}
    check("window", mesh, batches, **weights)


@pytest.mark.parametrize("way", ["two programs", "window", "nnx window"])
def test_keys_and_keywords_that_are_bound_to_a_device_are_placed(way: str):
    batches = given_to("window" if "window" in way else way, np.asarray)
    for batch in batches:
        del batch["class_weights"]
    bound = jax.device_put((CLASS_WEIGHTS, jax.random.key(0)), jax.devices()[0])
    check(way, make_mesh((8,)), batches, class_weights=bound[0], rng=bound[1])


@pytest.mark.parametrize(
    ("kind", "way"), [("auto", "two programs"), ("explicit", "window")]
)
def test_in_an_outer_jit_types_say_what_is_whole(kind: str, way: str):
    mesh = make_mesh((8,), kind)
    step = make_step(way, optax.sgd(1.0), mesh, loss_fn=loss_fn)
    batches = given_to(way, on(mesh), over(way, mesh, "data"))
    in_turn = jax.jit(lambda state, batches: run_step(step, state, batches)[0].params)
    its_types_say = contextlib.nullcontext()
    if kind == "auto":
        its_types_say = pytest.raises(ValueError, match="as a keyword")
    with its_types_say:
        in_turn.lower(step.init(PARAMS), batches)


def test_a_loss_that_sees_all_rows_may_have_anything():
    """Whole on every device, as many as there are rows."""
    options = meshes.over("8, each") | {"loss_fn": loss_fn}
    step = make_step("two programs", optax.sgd(1.0), **options)
    many = on(options["mesh"])(np.resize(CLASS_WEIGHTS, ROWS))
    batch, *_ = given_to("two programs", lambda _: many)
    step.accumulate.lower(step.init(PARAMS), batch)


@pytest.mark.needs(devices=8)
def test_rows_spread_in_any_way_are_rows():
    """Over one of two data axes, or along their tokens."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(TYPES["auto"],) * 2)
    options = {"mesh": mesh, "data_axes": ("a", "b")}
    step = make_train_step(
        lambda w, x: (jnp.sum(w * x), x.size), optax.sgd(1.0), 1, **options
    )
    x = FULL["x"].reshape(16, 24)
    for spec in (P("b"), P(None, "a")):
        state, metrics = step(step.init(jnp.zeros(())), on(mesh, *spec)(x))
        assert metrics.num_tokens == x.size
        np.testing.assert_allclose(-state.params, x.mean(dtype=np.float64), rtol=2e-6)


def attention_loss(params: Any, batch: Any) -> Any:
    """A loss of tokens that attend to all tokens of their row before them."""
    x = params["embed"][batch["tokens"]]
    scores = jnp.einsum("bqd,bkd->bqk", x @ params["hidden"], x)
    before = jnp.tril(jnp.ones(scores.shape[-2:], bool)) & batch["mask"][:, None]
    weights = jax.nn.softmax(scores, where=before, axis=-1)
    logits = jnp.tanh(x + weights @ x) @ params["out"]
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


@pytest.mark.parametrize(
    ("way", "kind", "reduce_every"),
    [
        ("two programs", "auto", "window"),
        helpers.slow("window", "explicit", "micro_batch"),
    ],
)
def test_sequence_parallelism_is_a_batch_that_is_placed_so(
    way: str, kind: str, reduce_every: str
):
    """One group of devices and one micro-batch have no tokens."""
    mesh, params = make_mesh((4, 2), kind), helpers.init_params(0)
    options = {"loss_fn": attention_loss, "reduce_every": reduce_every}
    step = make_step(way, optax.sgd(meshes.SCALE), mesh, **options)
    batch = jax.tree.map(lambda x: x[:, :16], meshes.make_batch(4))
    given = [stack(helpers.cut(batch, K))] if way == "window" else helpers.cut(batch, K)
    given = on(mesh, *[None] * (way == "window"), "data", "model")(given)
    state, metrics = run_step(step, step.init(params), given)
    assert metrics.num_tokens == batch["mask"].sum()
    expected = exact(attention_loss, params, batch)
    assert relative_error(meshes.applied(state.params), expected) < 2e-6
