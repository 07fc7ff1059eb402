"""docs/mistakes.md: what happens in rows of its table, without an error.

That `check_loss_fn` and `audit` notice is tested in tests/debug.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import make_mesh

from optax_tokenaccum import (
    MultiSteps,
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    split_batch,
    token_accumulation,
)

SGD, PARAMS, ONES = optax.sgd(1.0), {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
BATCH = {"x": jnp.ones((4, 3)), "mask": np.arange(4) < 3}


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(batch["x"] @ params["w"] * batch["mask"]), jnp.sum(batch["mask"])


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.5, 1.5),))


def clipping(params: Any, batch: Any, c: float = 1.0) -> Any:
    loss_sum, n = loss_fn({"w": clipped(params["w"])}, batch)
    return loss_sum / c, n / c


# A loss, and how far it moves the parameters.
MOVED: dict[str, tuple[Any, float]] = {
    "right": (loss_fn, 1),
    "a mean": (lambda p, b: (jnp.divide(*loss_fn(p, b)), 3), 1 / 3),
    "a count with padding": (lambda p, b: (loss_fn(p, b)[0], b["mask"].size), 3 / 4),
    "stopped": (lambda p, b: loss_fn(jax.lax.stop_gradient(p), b), 0),
    "ignores its mask": (lambda p, b: (jnp.sum(b["x"] @ p["w"]), 3), 4 / 3),
    "clips cotangents": (clipping, 1 / 2),
    "divided by a constant": (lambda p, b: clipping(p, b, 4.0), 1),
}


@pytest.mark.parametrize(("loss_fn", "moved"), MOVED.values(), ids=MOVED)
def test_a_wrong_loss_moves_parameters_too_little_or_too_far(loss_fn: Any, moved: Any):
    """One micro-batch with three tokens in four rows."""
    step = make_train_step(loss_fn, SGD, 1)
    state, _ = step(step.init(PARAMS), BATCH)
    np.testing.assert_allclose(state.params["w"], -np.full(3, moved), rtol=1e-6)


def test_the_mean_of_a_real_loss_without_a_count_is_lost():
    """The first micro-batch has a loss of `w` and no count, the second of 3 `w`."""
    losses, counts = jnp.asarray([1.0, 3.0]), jnp.asarray([0.0, 2.0])
    moved = []
    for tx, divisors in (
        (MultiSteps(SGD, 2), jnp.maximum(counts, 1)),
        (token_accumulation(SGD, 2), jnp.ones(2)),
    ):
        w, state = jnp.zeros(()), tx.init(jnp.zeros(()))
        for loss, divisor, n in zip(losses, divisors, counts, strict=True):
            update, state = tx.update(loss / divisor, state, w, num_tokens=n)
        moved.append(-float(update))
    assert moved == [3 / 2, (1 + 3) / 2]


def test_multi_steps_of_optax_around_ours_moves_once_every_k_times_k():
    optimizer = optax.MultiSteps(token_accumulation(SGD, 2), 2)
    update, state, seen = jax.jit(optimizer.update), optimizer.init(PARAMS), []
    for _ in range(8):
        updates, state = update(ONES, state, PARAMS, num_tokens=1)
        seen.append(bool(updates["w"][0] != 0))
    assert seen == [False, False, False, True] * 2


def test_a_count_of_the_whole_batch_that_looks_like_the_devices_own():
    """Device by device the whole batch is counted: the update is an eighth."""

    def counted_maximum(w: Any, batch: Any) -> Any:
        return jnp.sum(w * batch["x"]), jnp.maximum(jnp.sum(batch["x"]), batch["n"])

    mesh = make_mesh((8,))
    step = make_train_step(counted_maximum, SGD, 1, mesh=mesh, data_axes="data")
    batch = {"x": jnp.ones((8, 2)), "n": jnp.float32(16)}
    state, metrics = step(step.init(jnp.zeros(())), batch)
    assert (float(state.params), float(metrics.num_tokens)) == (-1 / 8, 8 * 16)


@pytest.mark.parametrize(
    ("reduce_every", "written"), [("window", 1 / 8), ("micro_batch", 1.0)]
)
def test_model_state_that_single_rows_write_to(reduce_every: Any, written: float):
    def remembers(params: Any, bank: Any, batch: Any) -> Any:
        bank = bank.at[batch["index"]].set(batch["x"])
        return (jnp.sum(batch["x"] @ params["w"]), len(batch["x"])), bank

    over = {"mesh": make_mesh((8,)), "data_axes": "data", "reduce_every": reduce_every}
    step = make_train_step(remembers, SGD, 1, has_model_state=True, **over)
    batch = {"index": jnp.arange(8), "x": jnp.ones((8, 3))}
    state, _ = step(step.init(PARAMS, jnp.zeros((9, 3))), batch)
    np.testing.assert_array_equal(state.model_state[:8], written)


def test_rows_of_pairs_that_are_cut_apart():
    """Rows 2 i and 2 i + 1 belong together; they come in the order 0, 2, 1, 3."""

    def of_neighbors(summaries: jax.Array) -> jax.Array:
        rows = jnp.concatenate(summaries)
        return jnp.sum(rows[0::2] * rows[1::2])

    coupled = jax.jit(coupled_value_and_grad(lambda w, x: w * x, of_neighbors))
    w, x = jnp.float32(1), jnp.asarray([1.0, 2, 3, 4])
    (loss, _), _ = coupled(w, split_batch(x, 2))
    assert (float(of_neighbors(x[None])), float(loss)) == (1 * 2 + 3 * 4, 1 * 3 + 2 * 4)
    (loss, _), _ = coupled(w, split_batch(x.reshape(2, 2), 2).reshape(2, 2))
    assert float(loss) == 1 * 2 + 3 * 4


def test_a_loss_that_is_nan_while_its_gradient_is_finite_is_added():
    def with_nan(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch)[0] + jnp.nan, jnp.sum(batch["mask"])

    skip = {"should_skip_update_fn": optax.skip_not_finite}
    step = make_train_step(with_nan, SGD, 1, **skip)
    state, metrics = step(step.init(PARAMS), BATCH)
    chex.assert_trees_all_equal(state.params, {"w": -jnp.ones(3)})
    assert not metrics.skipped
    assert jnp.isnan(metrics.loss)


def test_a_traced_schedule_that_returns_0_closes_every_window():
    optimizer = token_accumulation(SGD, lambda step: 0 * step)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = update(ONES, state, PARAMS, num_tokens=1)
        chex.assert_trees_all_equal(updates, {"w": -np.ones(3)})


def test_a_traced_number_of_micro_batches_that_is_too_large_runs_all():
    step = make_window_step(loss_fn, SGD)
    window = jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)
    _, metrics = step(step.init(PARAMS), window, num_micro_batches=jnp.asarray(9))
    assert metrics.updated and float(metrics.num_tokens) == 6.0
