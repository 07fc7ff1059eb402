"""The promises of `make_train_step`."""

import dataclasses
from typing import Any

import chex
import cloudpickle
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    StepMetrics,
    StepState,
    TokenAccumulationState,
    has_updated,
    make_train_step,
    make_window_step,
)

PARAMS = {"w": jnp.asarray([1.0, -2.0], jnp.float32)}


def loss_fn(params: Any, batch: Any) -> Any:
    """Summed loss whose gradient is `sum(batch)` in every entry of `w`."""
    return jnp.sum(params["w"]) * jnp.sum(batch), batch.size


def batches(*sizes: int) -> list[jax.Array]:
    return [jnp.arange(1.0, n + 1.0, dtype=jnp.float32) for n in sizes]


def numbers(metrics: StepMetrics) -> dict[str, Any]:
    found = metrics._replace(aux=None)._asdict().items()
    return {k: np.asarray(v).item() for k, v in found if v is not None}


def new_step(kind: str, k: int, loss_fn: Any = loss_fn, **options: Any) -> Any:
    return helpers.new_train_step(kind, loss_fn, optax.sgd(1.0), k, **options)


def test_state_is_a_named_tuple_with_the_accumulation(kind: str):
    state = new_step(kind, 2).init(PARAMS)
    assert isinstance(state, StepState)
    assert isinstance(state.opt_state, TokenAccumulationState)
    chex.assert_trees_all_equal(state.params, PARAMS)


def test_metrics_of_every_call_of_a_window(kind: str):
    step = new_step(kind, 2)
    state = step.init(PARAMS)
    state, opened = step(state, jnp.asarray([2.0]))
    loss = -1.0 * 2.0 / 1
    assert numbers(opened) == {
        "loss": loss,
        "num_tokens": 1.0,
        "grad_norm": 0.0,
        "updated": False,
        "skipped": False,
        "mini_step": 1,
        "gradient_step": 0,
    }
    chex.assert_trees_all_equal(state.params, PARAMS)
    state, closed = step(state, jnp.full(9, 10.0))
    assert numbers(closed) == {
        "loss": pytest.approx(-9.2),  # not -6, the mean of means
        "num_tokens": 10.0,
        "grad_norm": pytest.approx(9.2 * 2**0.5),
        "updated": True,
        "skipped": False,
        "mini_step": 0,
        "gradient_step": 1,
    }
    expected = {"w": PARAMS["w"] - np.float32(9.2)}
    chex.assert_trees_all_equal(state.params, expected)
    assert closed.aux is None


def test_grad_norm_is_that_of_the_gradient_before_clipping_inside(kind: str):
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    step = helpers.new_train_step(kind, loss_fn, inner, 1)
    state, metrics = step(step.init(PARAMS), jnp.asarray([3.0, 5.0]))
    np.testing.assert_allclose(metrics.grad_norm, 4.0 * 2**0.5, rtol=1e-6)


def test_init_copies_so_that_the_callers_arrays_live(kind: str):
    step = new_step(kind, 1)
    params = jax.tree.map(jnp.copy, PARAMS)
    state = step.init(params)
    for batch in batches(1, 2, 3):
        state, _ = step(state, batch)
    chex.assert_trees_all_equal(params, PARAMS)


def test_donates_and_metrics_outlive_the_state(kind: str):
    step = new_step(kind, 2)
    state = step.init(PARAMS)
    kept, old_params = [], []
    for batch in batches(1, 2, 3, 4):
        old_params.append(state.params["w"])
        state, metrics = step(state, batch)
        kept.append(metrics)
    jax.tree.map(lambda x: x.delete(), state)
    assert [int(m.mini_step) for m in kept] == [1, 0, 1, 0]
    assert [int(m.gradient_step) for m in kept] == [0, 1, 1, 2]
    assert all(np.isfinite(list(numbers(m).values())).all() for m in kept)
    assert old_params[1].is_deleted() and old_params[3].is_deleted()


def test_without_donation_states_can_be_used_again(kind: str):
    step = new_step(kind, 2, donate=False)
    start = step.init(PARAMS)
    first, second = batches(2, 5)
    middle, _ = step(start, first)
    once, _ = step(middle, second)
    again, _ = step(middle, second)
    chex.assert_trees_all_equal(once, again)
    assert int(start.opt_state.mini_step) == 0


def test_going_back_and_side_by_side_follow_the_state_not_the_object(kind: str):
    """A counter on the step object would close the second run's window early."""
    step = new_step(kind, 3, donate=False)
    data = batches(1, 2, 3)
    a = b = step.init(PARAMS)
    a, _ = step(a, data[0])
    middle = a
    a, _ = step(a, data[1])
    b, metrics_b = step(b, data[2])
    a, metrics_a = step(a, data[2])
    assert (bool(metrics_a.updated), bool(metrics_b.updated)) == (True, False)
    back, _ = step(middle, data[1])
    back, metrics = step(back, data[2])
    assert bool(metrics.updated)
    chex.assert_trees_all_equal(back, a)


def test_halves_for_loops_whose_data_says_where_a_window_ends():
    step = make_train_step(loss_fn, optax.sgd(1.0))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"step\.accumulate.*step\.close_window"):
        step(state, jnp.ones(1))
    state, empty = step.close_window(state)
    assert numbers(empty)["updated"] is False and numbers(empty)["loss"] == 0.0
    chex.assert_trees_all_equal(state.params, PARAMS)
    for value, size in ((2.0, 1), (10.0, 9)):
        state, metrics = step.accumulate(state, jnp.full(size, value))
        assert not metrics.updated
    assert int(metrics.mini_step) == 2
    state, metrics = step.close_window(state)
    assert metrics.updated and float(metrics.num_tokens) == 10.0
    chex.assert_trees_all_equal(state.params, {"w": PARAMS["w"] - np.float32(9.2)})
    assert has_updated(state)
    state, _ = step.accumulate(state, jnp.ones(1))
    assert not has_updated(state)


def test_window_without_tokens_changes_nothing(kind: str):
    def empty_loss(params: Any, batch: Any) -> Any:
        return jnp.sum(params["w"]) * jnp.sum(batch) / 0.0, 0

    step = helpers.new_train_step(kind, empty_loss, optax.adamw(0.1), 2)
    state = step.init(PARAMS)
    for batch in batches(1, 2):
        state, metrics = step(state, batch)
    chex.assert_trees_all_equal(state.params, PARAMS)
    assert numbers(metrics) == numbers(metrics) | {
        "loss": 0.0,
        "num_tokens": 0.0,
        "updated": False,
        "mini_step": 0,
        "gradient_step": 0,
    }


def test_rejected_micro_batch_is_reported_and_never_happened():
    step = make_train_step(
        loss_fn, optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite
    )
    state = step.init(PARAMS)
    skipped = []
    for value in (2.0, np.nan, 10.0):
        state, metrics = step(state, jnp.full(1 if value == 2.0 else 9, value))
        skipped.append((bool(metrics.skipped), bool(metrics.updated)))
    assert skipped == [(False, False), (True, False), (False, True)]
    chex.assert_trees_all_equal(state.params, {"w": PARAMS["w"] - np.float32(9.2)})


def test_token_budget():
    step = make_train_step(loss_fn, optax.sgd(1.0), every_n_tokens=10)
    state = step.init(PARAMS)
    updated = []
    for batch in batches(4, 5, 1, 11):
        state, metrics = step(state, batch)
        updated.append(bool(metrics.updated))
    assert updated == [False, False, True, True]


def test_aux_is_that_of_the_micro_batch(kind: str):
    def with_aux(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return loss_sum, (n, {"largest": jnp.max(batch)})

    step = new_step(kind, 2, with_aux, has_aux=True)
    state = step.init(PARAMS)
    for size in (3, 5):
        (batch,) = batches(size)
        state, metrics = step(state, batch)
        assert float(metrics.aux["largest"]) == size
    state, metrics = step.close_window(state)
    assert metrics.aux is None


def test_parameters_that_are_one_leaf_and_no_array_are_named(kind: str):
    step = new_step(kind, 2)
    with pytest.raises(TypeError, match="at the root got object"):
        step.init(object())


def test_loss_kwargs_are_passed_on_and_not_differentiated(kind: str):
    """Frozen weights are arguments; bools and strings, also NumPy's, do not change."""

    def loss(params: Any, batch: Any, *, frozen: Any, train: bool, mode: Any) -> Any:
        assert train is True and mode["name"] == "sum" and mode["act"] is jnp.tanh
        return jnp.sum(params["w"] * frozen["w"]) * jnp.sum(batch), batch.size

    step = new_step(kind, 1, loss)
    state = step.init(PARAMS)
    mode = {"name": np.str_("sum"), "act": jnp.tanh}
    for scale in (1.0, 2.0):
        before = np.asarray(state.params["w"])
        frozen = {"w": jnp.asarray([scale, 0.0])}
        state, _ = step(state, jnp.ones(4), frozen=frozen, train=True, mode=mode)
        expected = before - np.asarray([scale, 0.0])
        np.testing.assert_array_equal(state.params["w"], expected)
    assert not frozen["w"].is_deleted()


@dataclasses.dataclass
class ScaledLoss:
    """A callable that holds an array, so it has no hash and no usable `==`."""

    scale: np.ndarray

    def __call__(self, params: Any, batch: Any) -> Any:
        return jnp.sum(self.scale * params["w"]) * jnp.sum(batch), batch.size


def test_loss_may_be_an_object_that_has_no_hash(kind: str):
    scaled_loss = ScaledLoss(np.asarray([1.0, 4.0], np.float32))
    step = new_step(kind, 2, scaled_loss)
    state = step.init(PARAMS)
    for batch in batches(3, 3):
        state, _ = step(state, batch)
    window_step = make_window_step(scaled_loss, optax.sgd(1.0))
    of_window, _ = window_step(window_step.init(PARAMS), jnp.stack(batches(3, 3)))
    for params in (state.params, of_window.params):
        np.testing.assert_array_equal(params["w"], PARAMS["w"] - 2 * scaled_loss.scale)


def test_value_reaches_the_inner_optimizer(kind: str):
    inner = optax.polyak_sgd(max_learning_rate=1e9)
    step = helpers.new_train_step(kind, helpers.loss_sum_fn, inner, 2)
    params, batch = helpers.init_params(0), helpers.ragged_batch(0)
    state = step.init(params)
    for micro_batch in helpers.cut(batch, 2):
        state, _ = step(state, micro_batch)
    (value, _), grads = jax.value_and_grad(helpers.loss_mean_fn, has_aux=True)(
        params, batch
    )
    updates, _ = inner.update(grads, inner.init(params), params, value=value)
    applied = helpers.difference(state.params, params)
    # Parameters of size 0.2 round updates of size 1e-2 by about 1e-6.
    assert helpers.relative_error(applied, updates) < 5 * helpers.RTOL["float32"]


def test_inside_an_outer_jit_and_scan_it_is_one_program(kind: str):
    step = new_step(kind, 2, donate=False)
    data = jnp.ones((6, 4)) * jnp.arange(1.0, 7.0)[:, None]
    start = step.init(PARAMS)
    scanned, metrics = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(start, data)
    assert metrics.updated.tolist() == [False, True] * 3
    state = start
    for batch in data:
        state, _ = step(state, batch)
    assert helpers.relative_error(scanned.params, state.params) < 1e-6
    assert int(scanned.opt_state.gradient_step) == 3


def test_batches_of_another_shape_go_on_in_the_same_window(kind: str):
    step = new_step(kind, 3)
    state = step.init(PARAMS)
    data = batches(2, 7, 3)
    for batch in data:
        state, metrics = step(state, batch)
    assert metrics.updated and float(metrics.num_tokens) == 12.0
    mean = sum(float(b.sum()) for b in data) / 12
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - mean, rtol=1e-6)


def test_bfloat16_parameters_keep_their_dtype_and_float32_sums(kind: str):
    step = helpers.new_train_step(
        kind, helpers.loss_sum_fn, optax.sgd(1.0, momentum=0.0), 4
    )
    params = helpers.init_params(0, jnp.bfloat16)
    state = step.init(params)
    before = helpers.signatures(state)
    batch = helpers.ragged_batch(0)
    for micro_batch in helpers.cut(batch, 4):
        state, metrics = step(state, micro_batch)
    assert helpers.signatures(state) == before
    given = optax.tree.get(state.opt_state, "trace")
    reference = helpers.float64_gradient(params, batch)
    assert helpers.relative_error(given, reference) < helpers.RTOL["bfloat16"]
    assert metrics.loss.dtype == metrics.grad_norm.dtype == jnp.float32


@pytest.mark.parametrize(
    "inner",
    [
        optax.contrib.schedule_free_sgd(0.1),
        optax.contrib.mechanize(optax.sgd(0.1)),
        optax.contrib.dowg(0.1),
        optax.lbfgs(0.1, linesearch=None),
        optax.contrib.prodigy(0.1),
        optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1)),
    ],
    ids=["schedule_free", "mechanize", "dowg", "lbfgs", "prodigy", "add_noise"],
)
def test_optimizers_that_hand_out_arrays_of_their_own_can_be_donated(inner: Any):
    """Parameters, an array twice, a captured key: a buffer is donated only once."""
    step = make_train_step(loss_fn, inner, 2)
    for _ in range(2):
        state = step.init(PARAMS)
        for batch in batches(1, 2, 3, 4):
            state, metrics = step(state, batch)
        assert int(metrics.gradient_step) == 2


def test_parameters_that_share_an_array_are_parameters_of_their_own(kind: str):
    step = new_step(kind, 1)
    tied = {"w": PARAMS["w"], "again": PARAMS["w"]}
    state = step.init(tied)
    for batch in batches(2, 2):
        state, _ = step(state, batch)
    chex.assert_trees_all_equal(state.params["again"], PARAMS["w"])
    assert not np.array_equal(state.params["w"], PARAMS["w"])


def test_a_used_step_goes_through_cloudpickle(kind: str):
    """For workers in other processes; standard pickle does not support functions."""
    step = new_step(kind, 2)
    state = step.init(PARAMS)
    for batch in batches(1, 2, 3):
        state, _ = step(state, batch)
    state = jax.device_get(state)
    again = cloudpickle.loads(cloudpickle.dumps(step))
    got, expected = (each(state, batches(2)[0]) for each in (again, step))
    chex.assert_trees_all_equal(got, expected)
    assert got[1].updated
