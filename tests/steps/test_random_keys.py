"""One key for the whole run: the train step and the window step draw the same masks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    has_updated,
    make_train_step,
    make_window_step,
    pad_window,
    token_accumulation,
)
from optax_tokenaccum import nnx as nnx_steps

ROWS, K, WINDOWS = 16, 3, 3
PARAMS = {"w": jnp.asarray([0.5, -1.0], jnp.float32)}
KEY = jax.random.key(7)


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    mask = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    losses = jnp.sum(params["w"] * jnp.where(mask, batch["x"], 0), -1)
    return jnp.sum(losses * batch["mask"]), (jnp.sum(batch["mask"]), mask)


def micro_batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "x": np.float32(rng.normal(size=(ROWS, 2))),
        "mask": rng.uniform(size=ROWS) < 0.7,
    }


def windows(rejected: bool) -> list[list[Any]]:
    """Return windows; one has no tokens, and in another a micro-batch may be NaN."""
    made = [[micro_batch(K * i + j) for j in range(K)] for i in range(WINDOWS + 1)]
    made[2] = [batch | {"mask": np.zeros(ROWS, bool)} for batch in made[2]]
    if rejected:
        made[1][1]["x"][:] = np.nan
    return made


class Steps(NamedTuple):
    """Both steps of one way to train, with `step.init(params)`."""

    train: Any
    window: Any


def of_core(**options: Any) -> Steps:
    options["has_aux"] = True
    return Steps(
        make_train_step(loss_fn, optax.adam(0.1), **options),
        make_window_step(loss_fn, optax.adam(0.1), **options),
    )


def of_nnx(should_skip_update_fn: Any = None, **options: Any) -> Steps:
    of_model, adam = nnx_ways.of_model(loss_fn), optax.adam(0.1)
    options["has_aux"] = True
    skips = {"should_skip_update_fn": should_skip_update_fn}
    return Steps(
        nnx_ways.Step(
            nnx_steps.make_train_step(of_model, **options),
            token_accumulation(adam, **skips),
        ),
        nnx_ways.Step(nnx_steps.make_window_step(of_model, **options, **skips), adam),
    )


MESH: dict[str, Any] = {"mesh": meshes.make_mesh((8,)), "data_axes": "data"}
OVER = {
    "one device": {},
    "8 devices": MESH,
    "8 devices, explicit": MESH | {"mesh": meshes.make_mesh((8,), "explicit")},
    "8 devices, each": MESH | {"reduce_every": "micro_batch"},
}


@pytest.mark.parametrize("rejected", [False, True], ids=["", "rejected"])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("make", [of_core, of_nnx], ids=["core", "nnx"])
def test_both_steps_draw_the_same_masks_and_no_two_windows_do(
    make: Callable[..., Steps], over: str, rejected: bool
):
    skips = {"should_skip_update_fn": optax.skip_not_finite} if rejected else {}
    steps = make(**OVER[over], **skips)
    train_state, window_state = (step.init(PARAMS) for step in steps)
    masks, updates = [], 0
    for i, window in enumerate(windows(rejected)):
        before = masks[-1] if masks else None
        drawn = []
        for batch in window:
            train_state, metrics = steps.train.accumulate(train_state, batch, rng=KEY)
            drawn.append(metrics.aux)
        train_state, metrics = steps.train.close_window(train_state)
        window_state, window_metrics = steps.window(
            window_state, helpers.stack(window), rng=KEY
        )
        masks.append(np.stack(jax.device_get(drawn)))
        np.testing.assert_array_equal(masks[-1], window_metrics.aux)
        updates += i != 2  # no tokens, no update
        assert window_metrics.gradient_step == metrics.gradient_step == updates
        assert window_metrics.mini_step == 0
        assert window_metrics.updated == metrics.updated == (i != 2)
        if i == 3:  # the window before made no update, so its keys come once more
            np.testing.assert_array_equal(masks[-1], before)
        elif before is not None:
            # A key for one window alone would repeat every mask.
            assert all((x != y).any() for x, y in zip(masks[-1], before, strict=True))
    chex.assert_trees_all_close(train_state.params, window_state.params, rtol=1e-5)


def test_two_calls_with_one_key_draw_different_masks():
    step = make_window_step(loss_fn, optax.adam(0.1), has_aux=True)
    state, window = step.init(PARAMS), helpers.stack(windows(False)[0])
    state, first = step(state, window, rng=KEY)
    state, second = step(state, window, rng=KEY)
    assert (first.aux != second.aux).any()


def test_a_window_step_counts_all_updates():
    step = make_window_step(loss_fn, optax.adam(0.1), has_aux=True)
    state, numbers, have_updated = step.init(PARAMS), [], []
    for window in windows(False):
        state, metrics = step(state, helpers.stack(window), rng=KEY)
        numbers.append(int(metrics.gradient_step))
        have_updated.append(bool(has_updated(state.opt_state)))
    assert numbers == [1, 2, 2, 3]
    assert have_updated == [True, True, False, True]


def test_a_state_holds_numbers_and_no_sums_and_restores_from_shapes():
    step = make_window_step(loss_fn, optax.adam(0.1), has_aux=True)
    shapes, state = jax.eval_shape(step.init, PARAMS), step.init(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    inner = optax.adam(0.1).init(PARAMS)
    chex.assert_trees_all_equal(state.opt_state.inner_opt_state, inner)
    assert jax.tree.leaves(state.opt_state.acc_grads) == []
    rest = state.opt_state._replace(inner_opt_state=())
    assert [x.shape for x in jax.tree.leaves(rest)] == [()] * 5


def test_a_planned_window_has_the_keys_of_as_many_calls():
    def key_fn(w: jax.Array, x: jax.Array, rng: Any) -> Any:
        return jnp.sum(w * x), (jnp.sum(x != 0), jax.random.key_data(rng))

    sequences = [np.full(n, 1.0) for n in (1, 4, 2, 3, 1)]
    planned = pad_window(
        sequences, pad_values=0, max_tokens=4, length_buckets=[1, 2, 4]
    )
    runs = int(planned.counts.sum())
    assert len(planned.shapes) == 3 and runs < planned.capacity
    step = make_window_step(key_fn, optax.sgd(0.1), has_aux=True)
    by_calls = make_train_step(key_fn, optax.sgd(0.1), runs, has_aux=True)
    state, state_of_calls = step.init(jnp.ones(())), by_calls.init(jnp.ones(()))
    for _ in range(2):
        state, metrics = step(state, planned, rng=KEY)
        for i in range(runs):
            state_of_calls, one = by_calls(state_of_calls, jnp.ones(2), rng=KEY)
            np.testing.assert_array_equal(metrics.aux[i], one.aux)


@pytest.mark.parametrize("over", ["one device", "8 devices", "8 devices, each"])
def test_windows_are_one_compilation_and_keep_their_placement(over: str):
    step = make_window_step(loss_fn, optax.adam(0.1), has_aux=True, **OVER[over])
    state, window = step.init(PARAMS), helpers.stack(windows(False)[0])
    first = jax.tree.map(lambda x: x.sharding, state)
    with helpers.count_compilations() as compilations:
        for _ in range(3):
            state, _ = step(state, window, rng=KEY)
    assert len(compilations) == 1
    if over != "one device":
        assert jax.tree.map(lambda x: x.sharding, state) == first
    assert not any(x.weak_type for x in jax.tree.leaves(state))
