"""What a loss changes besides parameters; tests/test_promises.py has its exactness."""

from pathlib import Path
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import orbax.checkpoint as ocp
import problems
import pytest
from problems import FEATURES, PARAMS, K

from optax_tokenaccum import make_window_step, regroup_sums, window_value_and_grad

ROWS, DEVICES = 16, 8
SGD, RTOL = optax.sgd(problems.RATE), helpers.RTOL["float32"]


def batch_of(seed: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    return problems.batch_of(seed, 1 + np.arange(rows) % 4 * (seed % K != 1))


WINDOW = [batch_of(i) for i in range(K)]


def new_model_state(dtype: Any = jnp.float32) -> Any:
    numbers = jnp.zeros(FEATURES, dtype), jnp.ones(FEATURES, dtype), jnp.int32(0)
    made = dict(zip(("mean", "var", "calls"), numbers, strict=True))
    return made | {"key": jax.random.key(0)}


def loss_fn(params: Any, model_state: Any, batch: Any) -> Any:
    """With statistics, and a key of the model, whose mask is aux."""
    batch = {name: x.reshape(-1, *x.shape[1:]) for name, x in batch.items()}
    loss_sum, n, _, model_state = problems.statistics(params, batch, None, model_state)
    key, model_state["key"] = jax.random.split(model_state["key"])
    mask = jax.random.bernoulli(key, shape=(64,))
    return (loss_sum, (n, mask)), model_state


def new_step(way: str, loss: Any = loss_fn, **options: Any) -> Any:
    options = {"has_aux": True, "has_model_state": True} | options
    if way == "window":
        return make_window_step(loss, SGD, **options)
    return helpers.new_train_step(way, loss, SGD, K, **options)


def calls(way: str, window: list[Any]) -> list[Any]:
    return [helpers.stack(window)] if way == "window" else window


def train(way: str, window: Any = WINDOW, **options: Any) -> tuple[Any, list[Any]]:
    """Return the state and all metrics."""
    model_state = options.pop("model_state", new_model_state())
    over = meshes.over(options.pop("over", "1"))
    step, metrics = new_step(way, **over, **options), []
    state = step.init(PARAMS, model_state)
    for batch in calls(way, window):
        state, m = step(state, batch)
        metrics.append(m)
    assert metrics[-1].updated
    return state, metrics


def check(model_state: Any, devices: int, window: Any = WINDOW, rtol: float = RTOL):
    state = {"mean": np.zeros(FEATURES), "var": np.ones(FEATURES), "calls": 0}
    expected = problems.answer("state", PARAMS, state, window, 0, devices).state
    for name in ("mean", "var"):
        assert helpers.relative_error(model_state[name], expected[name]) < rtol
    assert model_state["calls"] == K


@pytest.mark.parametrize(("way", "over"), [("one program", "8, each"), ("window", "8")])
def test_keys_of_the_model_differ_from_device_to_device_and_call_to_call(
    way: str, over: str
):
    devices, given = DEVICES if over == "8" else 1, new_model_state()
    state, metrics = train(way, over=over, model_state=given)
    check(state.model_state, devices)
    masks = np.concatenate([np.asarray(m.aux).reshape(-1, 64) for m in metrics])
    assert len({mask.tobytes() for mask in masks}) == K * devices
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    for x in jax.tree.leaves(state.model_state):
        assert x.is_fully_replicated


def test_a_function_of_a_window_returns_the_state():
    f = jax.jit(window_value_and_grad(loss_fn, has_aux=True, has_model_state=True))
    values, gradient = f(PARAMS, new_model_state(), helpers.stack(WINDOW))
    ((_, (_, masks)), model_state) = values
    check(model_state, 1)
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == K
    state = {"mean": np.zeros(FEATURES), "var": np.ones(FEATURES), "calls": 0}
    expected = problems.answer("state", PARAMS, state, WINDOW, 0)
    assert helpers.relative_error(gradient, expected.gradient) < RTOL
    frozen = [problems.answer("state", PARAMS, state, [b], 0) for b in WINDOW]
    naive = sum(x.gradient["w"] * x.tokens for x in frozen) / expected.tokens
    assert helpers.relative_error(naive, expected.gradient["w"]) > 1e-3


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
    expected = K + sum(np.sum(b["weights"] > 0) for b in WINDOW)
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

    window = [batch_of(j, rows) for j in range(K)]
    options = {"window": window, "loss": recurrent}
    on_a_device = rows // DEVICES
    for size in {on_a_device, rows if on_a_device == 1 else on_a_device}:
        with pytest.raises(ValueError, match=r"must not have an axis of rows.*micro_b"):
            train(way, model_state=jnp.zeros(size), over="8", **options)
    state, _ = train(way, model_state=jnp.zeros(rows), over="8, each", **options)
    expected = sum(0.5 ** (K - 1 - j) * window[j]["y"] for j in range(K))
    assert helpers.relative_error(state.model_state, expected) < RTOL


def test_statistics_of_as_many_features_as_rows_are_none():
    window = [batch_of(j, FEATURES * DEVICES) for j in range(K)]
    state, _ = train("two programs", window, over="8")
    check(state.model_state, DEVICES, window)


def test_dtypes_stay():
    """The loss returns float32 statistics."""
    start = new_model_state(jnp.bfloat16)
    state, _ = train("two programs", over="8", model_state=start)
    chex.assert_trees_all_equal_dtypes(state.model_state, start)
    check(state.model_state, DEVICES, rtol=helpers.RTOL["bfloat16"])


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("calls", lambda old, _: old["calls"] + 0.5, "'calls'.* int32, got float32"),
        ("calls", lambda *_: jax.random.key(0), "'calls'.* int32, got key<fry>"),
        ("mean", lambda *_: jnp.zeros(3), r"'mean'.* shape \(8,\), got shape \(3,\)"),
        ("more", lambda *_: 0, "'more'.* no leaf, got shape"),
    ],
    ids=["float for integer", "key for integer", "shape", "tree"],
)
def test_another_state_raises(name: str, change: Any, named: str):
    with pytest.raises(ValueError, match="kinds of numbers .* given: at .*" + named):
        train("window", loss=returning(name, change))


def test_a_checkpoint_of_an_open_window_continues(tmp_path: Path):
    """On as many devices, and on one."""
    way = "two programs"
    step, one = new_step(way, **meshes.over("8")), new_step(way)
    given = PARAMS, new_model_state()
    state, shapes = step.init(*given), jax.eval_shape(step.init, *given)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    first, *rest = WINDOW
    state, _ = step(state, first)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", step.init(*given))
    moved = regroup_sums(restored, one.init(*given))
    kept = map(helpers.numbers_of, (restored.model_state, moved.model_state))
    chex.assert_trees_all_equal(*kept, helpers.numbers_of(state.model_state))
    ends = [helpers.run_step(step, x, rest)[0] for x in (state, restored)]
    chex.assert_trees_all_equal(*map(helpers.numbers_of, ends))
    moved, metrics = helpers.run_step(one, moved, rest)
    assert metrics.updated and moved.model_state["calls"] == K
