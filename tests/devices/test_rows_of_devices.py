"""Which arrays of a batch are rows, to be sharded over devices, and which are not."""

import contextlib
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import in_float64, relative_error, run_step, stack
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import TYPES, make_mesh, make_step

from optax_tokenaccum import make_train_step, softmax_cross_entropy_sum

K, ROWS, CLASSES = 4, 32, 16
PARAMS = {"w": jnp.zeros((3, CLASSES))}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """A cross entropy with class weights, which are not rows."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        batch["x"] @ params["w"], batch["labels"]
    )
    weights = batch["class_weights"][batch["labels"]]
    return jnp.sum(losses * weights), jnp.sum(weights)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(K, ROWS, 3)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, (K, ROWS))
CLASS_WEIGHTS = RNG.uniform(0.1, 9, CLASSES).astype(np.float32)


FULL = {"x": X.reshape(-1, 3), "labels": LABELS.reshape(-1)}
Place = Callable[..., Any]


@in_float64
@jax.grad
def exact(params: Any, batch: Any) -> Any:
    loss_sum, num_tokens = loss_fn(params, batch)
    return loss_sum / num_tokens


EXACT = exact(PARAMS, FULL | {"class_weights": CLASS_WEIGHTS})
# In 0.1.0, devices had parts of them, and indices were clipped.
PARTS = np.resize(CLASS_WEIGHTS[: CLASSES // 8], CLASSES)
assert relative_error(exact(PARAMS, FULL | {"class_weights": PARTS}), EXACT) > 0.1

WINDOW: list[Any] = [
    {"x": X[i], "labels": LABELS[i], "class_weights": CLASS_WEIGHTS} for i in range(K)
]


def on(mesh: Mesh, *spec: Any) -> Place:
    return lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec)))


def given_to(way: str, place: Place, place_rows: Place = np.asarray) -> list[Any]:
    """Return the batch of each call, with class weights and rows placed as given."""

    def placed(batch: Any) -> Any:
        rows = {name: place_rows(batch[name]) for name in ("x", "labels")}
        return rows | {"class_weights": place(batch["class_weights"])}

    return [placed(x) for x in ([stack(WINDOW)] if "window" in way else WINDOW)]


def over(way: str, mesh: Mesh, axis: str) -> Place:
    """Spread what all micro-batches of a call have along one axis of the mesh."""
    return on(mesh, *([None, axis] if "window" in way else [axis]))


def build(way: str, mesh: Any, **options: Any) -> Any:
    return make_step(way, optax.sgd(1.0), mesh, **{"loss_fn": loss_fn} | options)


def check(step: Any, batches: list[Any]) -> None:
    state, metrics = run_step(step, step.init(PARAMS), batches)
    assert metrics.updated
    got = jax.tree.map(np.negative, jax.device_get(state.params))
    assert relative_error(got, EXACT) < 2e-6


@pytest.mark.parametrize(
    ("way", "kind", "axis"),
    [
        ("two programs", "auto", "model"),
        ("window", "explicit", None),
    ],
)
def test_what_is_placed_anywhere_but_on_the_data_axis_is_whole(
    way: str, kind: str, axis: str | None
):
    """On every device, or over another axis alone."""
    mesh = make_mesh((4, 2) if axis else (8,), kind)
    step = build(way, mesh)
    place = over(way, mesh, axis) if axis else on(mesh)
    if kind == "explicit":
        batches = given_to(way, place, over(way, mesh, "data"))
    else:
        batches = given_to(way, place)
    check(step, batches)


def test_batch_that_is_placed_on_every_device_is_spread():
    """Every array is replicated, so all are rows, and none is counted 8 times."""
    way, mesh = "window", make_mesh((8,))

    def loss_of_rows(params: Any, batch: Any, class_weights: Any) -> Any:
        return loss_fn(params, batch | {"class_weights": class_weights})

    step = build(way, mesh, loss_fn=loss_of_rows)
    state = step.init(PARAMS)
    for batch in given_to(way, on(mesh), on(mesh)):
        del batch["class_weights"]
        state, metrics = step(state, batch, class_weights=CLASS_WEIGHTS)
    np.testing.assert_allclose(
        metrics.num_tokens, CLASS_WEIGHTS[LABELS].sum(), rtol=1e-6
    )
    got = jax.tree.map(np.negative, jax.device_get(state.params))
    assert relative_error(got, EXACT) < 2e-6


@pytest.mark.parametrize(
    ("kind", "way"), [("auto", "two programs"), ("explicit", "window")]
)
def test_in_an_outer_jit_types_say_what_is_whole(kind: str, way: str):
    mesh = make_mesh((8,), kind)
    step = build(way, mesh)
    batches = given_to(way, on(mesh), over(way, mesh, "data"))
    in_turn = jax.jit(lambda state, batches: run_step(step, state, batches)[0].params)
    its_types_say = contextlib.nullcontext()
    if kind == "auto":
        its_types_say = pytest.raises(ValueError, match="as a keyword")
    with its_types_say:
        in_turn.lower(step.init(PARAMS), batches)


def test_a_loss_that_sees_all_rows_may_have_anything():
    mesh = make_mesh((8,))
    step = build("two programs", mesh, reduce_every="micro_batch")
    # Whole on every device, as many as there are rows.
    many = on(mesh)(np.resize(CLASS_WEIGHTS, ROWS))
    step.accumulate.lower(step.init(PARAMS), WINDOW[0] | {"class_weights": many})


@pytest.mark.needs(devices=8)
def test_rows_spread_in_any_way_are_rows():
    """Over one of two data axes, or along their tokens."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(TYPES["auto"],) * 2)
    options = {"mesh": mesh, "data_axes": ("a", "b")}
    step = make_train_step(
        lambda w, x: (jnp.sum(w * x), x.size), optax.sgd(1.0), 1, **options
    )
    x = X.reshape(16, 24)
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


@in_float64
@jax.grad
def exact_attention(params: Any, batch: Any) -> Any:
    loss_sum, num_tokens = attention_loss(params, batch)
    return loss_sum / num_tokens


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
    mesh = make_mesh((4, 2), kind)
    options = {"loss_fn": attention_loss, "reduce_every": reduce_every}
    step = make_step(way, optax.sgd(meshes.SCALE), mesh, **options)
    batch = jax.tree.map(lambda x: x[:, :16], meshes.make_batch(4))
    given = [stack(helpers.cut(batch, K))] if way == "window" else helpers.cut(batch, K)
    spec = P(*[None] * (way == "window"), "data", "model")
    given = jax.device_put(given, NamedSharding(mesh, spec))
    state, metrics = run_step(step, step.init(helpers.init_params(0)), given)
    assert metrics.num_tokens == batch["mask"].sum()
    expected = exact_attention(helpers.init_params(0), batch)
    assert relative_error(meshes.applied(state.params), expected) < 2e-6
