"""What a step takes and hands out; tests/test_promises.py has what it promises."""

import dataclasses
import weakref
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest

from optax_tokenaccum import has_updated, make_train_step
from optax_tokenaccum._core import donation

PARAMS = {"w": jnp.asarray([1.0, -2.0], jnp.float32)}
SGD = optax.sgd(1.0)


def loss_fn(params: Any, batch: Any) -> Any:
    """Summed loss whose gradient is `batch["x"]` in every entry of `w`."""
    return jnp.sum(params["w"]) * batch["x"], batch["n"]


def batch_of(x: float, n: float) -> Any:
    return {"x": np.float32(x), "n": np.float32(n)}


# Their token mean is 9.2; the mean of their means is 6.
WINDOW = FIRST, SECOND = batch_of(2, 1), batch_of(90, 9)


def new_step(way: str, loss_fn: Any, inner: Any = SGD) -> Any:
    return meshes.make_step(way, inner, None, data_axes=None, loss_fn=loss_fn, k=2)


def calls(way: str) -> Any:
    """What the step is given for one window."""
    return [helpers.stack(WINDOW)] if way == "window" else WINDOW


def test_halves_for_loops_whose_data_says_where_a_window_ends():
    step = make_train_step(loss_fn, SGD)
    state, empty = step.close_window(step.init(PARAMS))
    assert not empty.updated and empty.loss == 0.0
    chex.assert_trees_all_equal(state.params, PARAMS)
    for batch in WINDOW:
        state, metrics = step.accumulate(state, batch)
        assert not metrics.updated
    assert metrics.mini_step == 2
    state, metrics = step.close_window(state)
    assert metrics.updated and metrics.num_tokens == 10.0
    chex.assert_trees_all_equal(state.params, {"w": PARAMS["w"] - np.float32(9.2)})
    assert has_updated(state)
    state, _ = step.accumulate(state, FIRST)
    assert not has_updated(state)


@dataclasses.dataclass
class ScaledLoss:
    """A callable that holds an array, so it has no hash and no usable `==`."""

    scale: np.ndarray

    def __call__(
        self, params: Any, batch: Any, *, frozen: Any, train: bool, mode: Any
    ) -> Any:
        assert train is True and mode["name"] == "sum" and mode["act"] is jnp.tanh
        assert mode["dtype"] is jnp.bfloat16
        weights = self.scale * params["w"] * frozen["w"]
        return jnp.sum(weights) * batch["x"], batch["n"]


@pytest.mark.parametrize("way", ["two programs", "window"])
def test_a_loss_is_any_callable_and_its_keywords_are_arguments(way: str):
    """Frozen weights are arguments; bools, strings and functions do not change."""
    step = new_step(way, ScaledLoss(np.asarray([1.0, 4.0], np.float32)))
    state = step.init(PARAMS)
    mode = {"name": "sum", "act": jnp.tanh, "dtype": jnp.bfloat16}
    with helpers.count_compilations() as compilations:
        for scale in (1.0, 2.0):
            before = np.asarray(state.params["w"])
            keywords = {"frozen": {"w": np.float32([scale, 0.5])}, "train": True}
            state, _ = helpers.run_step(step, state, calls(way), mode=mode, **keywords)
            moved = before - 9.2 * np.asarray([scale, 2.0])
            np.testing.assert_allclose(state.params["w"], moved, rtol=1e-6)
    assert len(compilations) == (2 if way == "two programs" else 1)


@pytest.mark.parametrize("way", ["two programs", "window"])
def test_numbers_next_to_strings_are_traced(way: str):
    """Leaf by leaf: a change is seen, and compiles nothing; `act` is a leaf, too."""

    def scaled(params: Any, batch: Any, *, config: Any) -> Any:
        value, n = loss_fn(params, batch)
        assert config["act"] is jnp.tanh and config.pop("mode") == "train"
        return value * config["scale"] * config["array"], n

    step = new_step(way, scaled)
    state = step.init(PARAMS)
    node = jax.tree_util.Partial(jnp.add, "a string")
    config = {"mode": "train", "act": jnp.tanh, "none": None, "node": node}
    with helpers.count_compilations() as compilations:
        for scale in (1.0, 0.5):
            for array in (1.0, 2.0):
                before = np.asarray(state.params["w"])
                config |= {"scale": scale, "array": np.float32(array)}
                state, _ = helpers.run_step(step, state, calls(way), config=config)
                moved = before - 9.2 * scale * array
                np.testing.assert_allclose(state.params["w"], moved, rtol=1e-5)
    assert len(compilations) == (2 if way == "two programs" else 1)
    rule = r"must be hashable: got a set at \['config'\]\['names'\]"
    with pytest.raises(TypeError, match=rule):
        step(state, calls(way)[0], config={"names": {"a"}})


@pytest.mark.parametrize("way", ["two programs", "one program", "window"])
def test_arrays_of_the_state_may_be_keywords(way: str):
    """They are donated in the same call, except the parameters of two programs."""

    def distilled(params: Any, batch: Any, *, teacher: Any, updates: Any) -> Any:
        scale = batch["x"] * (1 + updates)
        return jnp.sum(params["w"] * teacher["w"]) * scale, batch["n"]

    step = new_step(way, distilled)
    state, expected = step.init(PARAMS), np.asarray(PARAMS["w"])
    for i in range(3):
        for call in calls(way):
            count = state.opt_state.gradient_step
            state, _ = step(state, call, teacher=state.params, updates=count)
        expected = expected - 9.2 * (1 + i) * expected
        np.testing.assert_allclose(state.params["w"], expected, rtol=1e-5)


def test_inside_an_outer_jit_and_scan_it_is_one_program():
    step = make_train_step(loss_fn, SGD, 3, donate=False)
    batches = [batch_of(i, i + 1) for i in range(6)]
    start, data = step.init(PARAMS), helpers.stack(batches)
    scanned, metrics = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(start, data)
    assert metrics.updated.tolist() == [False, False, True] * 2
    state, _ = helpers.run_step(step, start, batches)
    assert helpers.relative_error(scanned.params, state.params) < 1e-6
    assert int(scanned.opt_state.gradient_step) == 2


def test_optimizers_that_hand_out_arrays_of_their_own_can_be_donated():
    """A buffer is donated only once, also that of a parameter that is there twice."""
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(0))  # a captured key
    twice = optax.chain(noise, optax.contrib.prodigy(0.1))  # an array twice
    for inner in (optax.contrib.schedule_free_sgd(0.1), twice):
        step = new_step("window", loss_fn, inner)
        for _ in range(2):
            state = step.init(PARAMS | {"again": PARAMS["w"]})
            state, metrics = helpers.run_step(step, state, calls("window") * 2)
            assert int(metrics.gradient_step) == 2


def test_a_state_is_copied_array_by_array(monkeypatch: pytest.MonkeyPatch):
    """So that `step.init` never holds a large state twice."""
    refs: list[Any] = []
    alive, copy = [], jnp.array

    def counting(x: Any, **kwargs: Any) -> Any:
        alive.append(sum(ref() is not None for ref in refs))
        return copy(x, **kwargs)

    def new() -> Any:
        arrays = [jnp.full(3, i, jnp.float32) for i in range(4)]
        refs.extend(map(weakref.ref, arrays))
        return arrays

    monkeypatch.setattr(donation.jnp, "array", counting)
    copies = donation.copy_for_donation(new())
    monkeypatch.undo()
    assert alive == [4, 3, 2, 1]
    np.testing.assert_array_equal([x[0] for x in copies], range(4))


def test_a_state_goes_on_with_other_windows_down_to_one_micro_batch():
    """One program updates at k = 1; a window that is open then closes at once."""
    steps = {k: make_train_step(loss_fn, SGD, k) for k in (1, 2, 4)}
    state, at = steps[1].init(PARAMS), PARAMS["w"]
    third = batch_of(-6, 3)
    # (k, what it is given, the mean gradient it applies, if it does)
    calls = [
        (1, SECOND, 10.0),
        (2, FIRST, None),
        (2, SECOND, 9.2),
        (4, FIRST, None),
        (4, SECOND, None),
        (1, third, 86 / 13),  # with the two of the open window: 2 + 90 - 6
        (1, FIRST, 2.0),
    ]
    for k, batch, gradient in calls:
        state, metrics = steps[k](state, batch)
        assert bool(metrics.updated) == (gradient is not None)
        at = at - (gradient or 0.0)
        np.testing.assert_allclose(state.params["w"], at, rtol=1e-6)
    naive = (2 / 1 + 90 / 9 - 6 / 3) / 3
    assert abs(naive - 86 / 13) > 1
