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
from problems import PARAMS, K

from optax_tokenaccum import reshard_state, window_value_and_grad

DEVICES, RTOL = 8, helpers.RTOL["float32"]


def window_of(rows: int) -> list[Any]:
    counted = [1 + np.arange(rows) % 4 * (i != 1) for i in range(K)]
    return [problems.batch_of(i, weights) for i, weights in enumerate(counted)]


WINDOW = window_of(16)


def new_model_state(dtype: Any = jnp.float32) -> Any:
    state = jax.tree.map(jnp.asarray, problems.PROBLEMS["state"].state)
    arrays = {k: state[k].astype(dtype) for k in ("mean", "var")}
    return state | arrays | {"key": jax.random.key(0)}


def loss_fn(params: Any, model_state: Any, batch: Any) -> Any:
    """With statistics, and a key of the model, whose mask is aux."""
    batch = {name: x.reshape(-1, *x.shape[1:]) for name, x in batch.items()}
    loss_sum, n, _, model_state = problems.statistics(params, batch, None, model_state)
    key, model_state["key"] = jax.random.split(model_state["key"])
    mask = jax.random.bernoulli(key, shape=(64,))
    return (loss_sum, (n, mask)), model_state


def new_step(way: str, over: str, loss: Any = loss_fn) -> Any:
    options = {"loss_fn": loss, "k": K, "has_aux": True, "has_model_state": True}
    options |= {"mesh": None, "data_axes": None} | meshes.over(over)
    return meshes.make_step(way, optax.sgd(1.0), **options)


def train(
    way: str,
    over: str = "1",
    window: Any = WINDOW,
    loss: Any = loss_fn,
    given: Any = None,
) -> tuple[Any, list[Any]]:
    """Return the model's state, and aux of all calls."""
    step, aux = new_step(way, over, loss), []
    state = step.init(PARAMS, new_model_state() if given is None else given)
    for batch in [helpers.stack(window)] if way == "window" else window:
        state, metrics = step(state, batch)
        aux.append(metrics.aux)
    assert metrics.updated
    return state.model_state, aux


def check(model_state: Any, devices: int, window: Any = WINDOW, rtol: float = RTOL):
    state = problems.PROBLEMS["state"].state
    expected = problems.answer("state", PARAMS, state, window, 0, devices).state
    for name in ("mean", "var"):
        assert helpers.relative_error(model_state[name], expected[name]) < rtol
    assert model_state["calls"] == K


@pytest.mark.parametrize(("way", "over"), [("one program", "8, each"), ("window", "8")])
def test_keys_of_the_model_differ_from_device_to_device_and_call_to_call(
    way: str, over: str
):
    devices, given = DEVICES if over == "8" else 1, new_model_state()
    model_state, aux = train(way, over, given=given)
    check(model_state, devices)
    masks = np.concatenate([np.asarray(x).reshape(-1, 64) for x in aux])
    assert len({mask.tobytes() for mask in masks}) == K * devices
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    assert all(x.is_fully_replicated for x in jax.tree.leaves(model_state))


def test_a_function_of_a_window_returns_the_state():
    f = jax.jit(window_value_and_grad(loss_fn, has_aux=True, has_model_state=True))
    values, gradient = f(PARAMS, new_model_state(), helpers.stack(WINDOW))
    ((_, (_, masks)), model_state) = values
    check(model_state, 1)
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == K
    state = problems.PROBLEMS["state"].state
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
            train(way, "8", loss=loss)
    expected = K + sum(np.sum(b["weights"] > 0) for b in WINDOW)
    assert train("two programs", "8, each", loss=loss)[0]["calls"] == expected


def test_a_state_that_a_loop_moves_to_another_place_has_changed():
    def last_but_one(params: Any, sums: Any, batch: Any) -> Any:
        """Of sums over the rows."""
        start = (sums, 0 * sums)
        (_, before), _ = jax.lax.scan(
            lambda c, y: ((c[0] + y, c[0]), None), start, batch["y"]
        )
        n = jnp.sum(batch["weights"])
        return (jnp.sum(params["w"]) * n, (n, None)), before

    window = window_of(2 * DEVICES)
    found, _ = train("two programs", "8", window, last_but_one, jnp.zeros(()))
    expected = sum(x["y"][::2].mean() for x in window)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_dtypes_stay():
    """The loss returns float32 statistics."""
    start = new_model_state(jnp.bfloat16)
    model_state, _ = train("two programs", "8", given=start)
    chex.assert_trees_all_equal_dtypes(model_state, start)
    check(model_state, DEVICES, rtol=helpers.RTOL["bfloat16"])


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
    step, one = new_step("two programs", "8"), new_step("two programs", "1")
    given = PARAMS, new_model_state()
    state, shapes = step.init(*given), jax.eval_shape(step.init, *given)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    first, *rest = WINDOW
    state, _ = step(state, first)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", step.init(*given))
    moved = reshard_state(restored, one.init(*given))
    kept = map(helpers.numbers_of, (restored.model_state, moved.model_state))
    chex.assert_trees_all_equal(*kept, helpers.numbers_of(state.model_state))
    ends = [helpers.run_step(step, x, rest)[0] for x in (state, restored)]
    chex.assert_trees_all_equal(*map(helpers.numbers_of, ends))
    moved, metrics = helpers.run_step(one, moved, rest)
    assert metrics.updated and moved.model_state["calls"] == K
