"""What a loss changes besides parameters changes as in a loop written by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from optax_tokenaccum import (
    make_window_step,
    regroup_sums,
    window_value_and_grad,
)

K, ROWS, DEVICES, FEATURES, RATE = 3, 16, 8, 4, 0.5
SGD, RTOL = optax.sgd(0.1), helpers.RTOL["float32"]
PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.5, 3.0], jnp.float32)}


def batch_of(seed: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Micro-batches and rows differ in mean; every third micro-batch has no tokens."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)) + seed + np.arange(rows)[:, None] / rows
    weights = rng.integers(1, 5, rows) * (seed % K != 1)
    batch = {"x": x, "y": rng.normal(size=rows), "weights": weights}
    return {name: np.float32(value) for name, value in batch.items()}


WINDOWS = [[batch_of(K * i + j) for j in range(K)] for i in range(2)]


def new_model_state(dtype: Any = jnp.float32) -> Any:
    return {
        "mean": jnp.zeros(FEATURES, dtype),
        "var": jnp.ones(FEATURES, dtype),
        "calls": jnp.int32(0),
        "key": jax.random.key(0),
    }


def loss_fn(params: Any, model_state: Any, batch: Any) -> Any:
    """A regression on features that running statistics center and scale.

    It assigns to the state that it is given, as a loss may; aux is a dropout mask.
    """
    x = batch["x"].reshape(-1, FEATURES)
    scaled = (x - model_state["mean"]) / jnp.sqrt(model_state["var"])
    losses = (scaled @ params["w"] - batch["y"].reshape(-1)) ** 2
    for name, value in {"mean": x.mean(0), "var": x.var(0)}.items():
        model_state[name] += RATE * (value - model_state[name])
    model_state["calls"] += 1
    key, model_state["key"] = jax.random.split(model_state["key"])
    mask = jax.random.bernoulli(key, shape=(64,))
    loss_sum = jnp.sum(losses * batch["weights"].reshape(-1))
    return (loss_sum, (jnp.sum(batch["weights"]), mask)), model_state


def by_hand(windows: Any, devices: int = 1, frozen: bool = False, apart: bool = False):
    """Train in float64: `(w, mean, var)`.

    Devices average their statistics after every micro-batch, or `apart` after a window;
    naively, micro-batches see the statistics of a window's beginning, `frozen`.
    """
    w, states = np.float64(PARAMS["w"]), [np.repeat([[0.0], [1.0]], FEATURES, 1)]
    for window in windows:
        states, gradient, tokens = [np.mean(states, 0)] * devices, 0.0, 0.0
        begin = states
        for batch in window:
            moved = []
            for i, part in enumerate(helpers.cut(batch, devices)):
                (mean, var), weights = (begin if frozen else states)[i], part["weights"]
                x = np.float64(part["x"]).reshape(-1, FEATURES)
                scaled = (x - mean) / np.sqrt(var)
                errors = scaled @ w - part["y"].ravel()
                gradient += 2 * scaled.T @ (errors * weights.ravel())
                tokens += weights.sum()
                moved.append(RATE * np.stack([x.mean(0), x.var(0)]))
                moved[-1] += (1 - RATE) * states[i]
            states = moved if apart else [np.mean(moved, 0)] * devices
        w = w - 0.1 * gradient / tokens
    return [w, *np.mean(states, 0)]


class OwnStep:
    """A window step around `window_value_and_grad`."""

    def __init__(self, loss: Any, **options: Any):
        self.f = jax.jit(window_value_and_grad(loss, **options))

    def init(self, params: Any, model_state: Any) -> Any:
        return SimpleNamespace(params=params, model_state=model_state)

    def __call__(self, state: Any, window: Any) -> Any:
        values, gradient = self.f(state.params, state.model_state, window)
        ((_, (_, aux)), model_state) = values
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient)
        return self.init(params, model_state), SimpleNamespace(aux=aux, updated=True)


def new_step(way: str, loss: Any = loss_fn, **options: Any) -> Any:
    options = {"has_aux": True, "has_model_state": True} | options
    if way == "value and grad":
        return OwnStep(loss, **options)
    if way == "window":
        return make_window_step(loss, SGD, **options)
    return helpers.new_train_step(way, loss, SGD, K, **options)


def calls(way: str, windows: list[list[Any]]) -> list[Any]:
    if way in ("window", "value and grad"):
        return [helpers.stack(window) for window in windows]
    return [batch for window in windows for batch in window]


def train(way: str, windows: Any = WINDOWS, **options: Any) -> tuple[Any, list[Any]]:
    """Return the state and all metrics."""
    model_state = options.pop("model_state", new_model_state())
    over = meshes.over(options.pop("over", "1"))
    step, metrics = new_step(way, **over, **options), []
    state = step.init(PARAMS, model_state)
    for batch in calls(way, windows):
        state, m = step(state, batch)
        metrics.append(m)
    assert metrics[-1].updated
    return state, metrics


def check(state: Any, expected: Any, *others: Any) -> None:
    got = state.params["w"], state.model_state["mean"], state.model_state["var"]
    for x, y in zip(got, expected, strict=True):
        assert helpers.relative_error(x, y) < RTOL
    for other in others:
        assert helpers.relative_error(got, other) > 1e-3


def same(got: Any, expected: Any) -> None:
    """Compare leaves, with keys as numbers."""
    chex.assert_trees_all_equal(*map(helpers.numbers_of, (got, expected)))


@pytest.mark.parametrize(
    ("way", "over"),
    [
        ("two programs", "8, explicit"),
        ("one program", "8, each"),
        ("window", "8"),
        ("value and grad", "1"),
    ],
)
def test_training_is_a_loop_by_hand(way: str, over: str):
    devices = DEVICES if over in ("8", "8, explicit") else 1
    own = {"devices": devices, "apart": False}
    others = [own | {"devices": 9 - devices}, own | {"frozen": True}]
    others += [own | {"apart": True}] if devices > 1 else []
    state, metrics = train(way, over=over)
    check(
        state,
        by_hand(WINDOWS, **own),
        by_hand([window[::2] for window in WINDOWS], **own),  # of those with tokens
        *(by_hand(WINDOWS, **other) for other in others),
    )
    assert state.model_state["calls"] == 2 * K
    masks = np.concatenate([np.asarray(m.aux).reshape(-1, 64) for m in metrics])
    assert len({mask.tobytes() for mask in masks}) == 2 * K * devices


def returning(name: str, change: Any) -> Any:
    """The loss, with another value for a part of the state."""

    def changed(params: Any, model_state: Any, batch: Any) -> Any:
        returned, model_state = loss_fn(params, model_state, batch)
        return returned, model_state | {name: change(model_state, batch)}

    return changed


def test_integers_that_depend_on_the_rows_of_a_device_raise():
    def seen(model_state: Any, batch: Any) -> Any:
        return model_state["calls"] + jnp.sum(batch["weights"] > 0)

    loss = returning("calls", seen)
    for way in ("two programs", "window"):
        with pytest.raises(ValueError, match=r"\['calls'\] must be the same on all d"):
            train(way, loss=loss, over="8")
    expected = 2 * K + sum(np.sum(b["weights"] > 0) for w in WINDOWS for b in w)
    state, _ = train("two programs", loss=loss, over="8, each")
    assert state.model_state["calls"] == expected


@pytest.mark.parametrize("way", ["two programs", "window"])
@pytest.mark.parametrize("rows", [DEVICES, 2 * DEVICES])
def test_a_state_of_rows_raises_unless_the_loss_sees_all_rows(way: str, rows: int):
    """One row on each device is also the broadcast of a row."""

    def recurrent(params: Any, hidden: Any, batch: Any) -> Any:
        hidden = 0.5 * hidden + batch["y"]
        loss_sum = jnp.sum(params["w"]) * jnp.sum(hidden)
        return (loss_sum, (jnp.sum(batch["weights"]), None)), hidden

    windows = [[batch_of(j, rows) for j in range(K)]]
    options = {"windows": windows, "loss": recurrent}
    on_a_device = rows // DEVICES
    for size in {on_a_device, rows if on_a_device == 1 else on_a_device}:
        with pytest.raises(ValueError, match=r"must not have an axis of rows.*micro_b"):
            train(way, model_state=jnp.zeros(size), over="8", **options)
    state, _ = train(way, model_state=jnp.zeros(rows), over="8, each", **options)
    expected = sum(0.5 ** (K - 1 - j) * windows[0][j]["y"] for j in range(K))
    assert helpers.relative_error(state.model_state, expected) < RTOL


def test_statistics_of_as_many_features_as_rows_are_none():
    windows = [[batch_of(j, FEATURES * DEVICES) for j in range(K)]]
    state, _ = train("two programs", windows, over="8")
    check(state, by_hand(windows, DEVICES))


def test_dtypes_stay():
    """The loss returns float32 statistics."""
    start = new_model_state(jnp.bfloat16)
    state, _ = train("two programs", over="8", model_state=start)
    chex.assert_trees_all_equal_dtypes(state.model_state, start)
    _, *expected = by_hand(WINDOWS, DEVICES)
    got = state.model_state["mean"], state.model_state["var"]
    assert helpers.relative_error(got, expected) < helpers.RTOL["bfloat16"]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("calls", lambda old, _: old["calls"] + 0.5, "'calls'.* int32, got float32"),
        ("calls", lambda *_: jax.random.key(0), "'calls'.* int32, got key<fry>"),
        ("mean", lambda *_: jnp.zeros(3), r"'mean'.* shape \(4,\), got shape \(3,\)"),
        ("more", lambda *_: 0, "'more'.* no leaf, got shape"),
    ],
    ids=["float for integer", "key for integer", "shape", "tree"],
)
def test_another_state_raises(name: str, change: Any, named: str):
    with pytest.raises(ValueError, match="kinds of numbers .* given: at .*" + named):
        train("value and grad", loss=returning(name, change))


def test_a_checkpoint_of_an_open_window_continues(tmp_path: Path):
    """On as many devices, and on one."""
    way = "two programs"
    step, one = new_step(way, **meshes.over("8")), new_step(way)
    given = PARAMS, new_model_state()
    state, shapes = step.init(*given), jax.eval_shape(step.init, *given)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    first, *rest = calls(way, WINDOWS)
    state, _ = step(state, first)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", step.init(*given))
    moved = regroup_sums(restored, one.init(*given))
    same((restored.model_state, moved.model_state), (state.model_state,) * 2)
    same(*(helpers.run_step(step, x, rest)[0] for x in (state, restored)))
    moved, metrics = helpers.run_step(one, moved, rest)
    assert metrics.gradient_step == 2 and moved.model_state["calls"] == 2 * K
