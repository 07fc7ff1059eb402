"""docs/mistakes.md: each row of its table happens, and is noticed as it says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from optax_tokenaccum import (
    audit,
    check_loss_fn,
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    split_batch,
    token_accumulation,
)

PAGE = (Path(__file__).parents[2] / "docs/mistakes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| .* \| .* \|$", PAGE, re.MULTILINE)[1:]
SGD, RNG = optax.sgd(1.0), np.random.default_rng(0)
PARAMS, ONES = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
BATCH = {"x": jnp.ones((4, 3)), "mask": np.arange(4) < 3}
MICRO_BATCHES = [
    {"x": RNG.normal(size=(8, 3)).astype(np.float32), "mask": np.arange(8) < n}
    for n in (2, 5, 8)
]
# What happens depends on which thread is first.
NOT_SHOWN = "with `donate=False`, one NNX model that two threads train"
SHOWN: dict[str, Callable[[], None]] = {}


def shows(words: str) -> Callable[[Callable[[], None]], None]:
    """Register a function that asserts what happens in the row with these words."""
    [row] = [row for row in ROWS if words in row]

    def register(happens: Callable[[], None]) -> None:
        assert row not in SHOWN
        SHOWN[row] = happens

    return register


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(batch["x"] @ params["w"] * batch["mask"]), jnp.sum(batch["mask"])


def squared_loss_fn(params: Any, batch: Any) -> Any:
    losses = (batch["x"] @ params["w"] - 1) ** 2
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def moved(loss_fn: Any) -> np.ndarray:
    """Return the update of a step of one micro-batch: three tokens in four rows."""
    step = make_train_step(loss_fn, SGD, 1)
    state, _ = step(step.init(PARAMS), BATCH)
    return np.asarray(state.params["w"])


def findings(loss_fn: Any) -> str:
    return "\n".join(check_loss_fn(loss_fn, ONES, MICRO_BATCHES).findings)


def audited(wrap: Any, mean: bool = False) -> Any:
    """Audit a loop whose optimizer is wrapped in some way."""

    def loop_loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = squared_loss_fn(params, batch)
        return (loss_sum / n if mean else loss_sum), n

    gradient = jax.jit(jax.grad(loop_loss_fn, has_aux=True))

    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        optimizer = wrap(optimizer, len(micro_batches))
        update, state = jax.jit(optimizer.update), optimizer.init(params)
        for batch in micro_batches:
            grads, n = gradient(params, batch)
            updates, state = update(grads, state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        return params

    return audit(run, squared_loss_fn, ONES, MICRO_BATCHES)


def test_the_loop_without_a_mistake_passes():
    np.testing.assert_array_equal(moved(loss_fn), -np.ones(3))
    assert not findings(squared_loss_fn)
    assert audited(token_accumulation).passed


@shows("a loss that is a mean")
def a_loss_that_is_a_mean() -> None:
    def mean_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return loss_sum / n, n

    np.testing.assert_allclose(moved(mean_fn), -np.ones(3) / 3)
    assert "already a mean" in findings(mean_fn)


@shows("a count with padding")
def a_count_with_padding() -> None:
    def padded_fn(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch)[0], batch["mask"].size

    np.testing.assert_allclose(moved(padded_fn), -np.ones(3) * 3 / 4)
    assert "the mask's size" in findings(padded_fn)


@shows("in the wrong order")
def a_loss_that_trains_nothing() -> None:
    def swapped_fn(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch)[::-1]

    def stopped_fn(params: Any, batch: Any) -> Any:
        return loss_fn(jax.lax.stop_gradient(params), batch)

    def in_floats(loss_fn: Any) -> Any:
        return lambda p, b: loss_fn(p, b | {"mask": jnp.float32(b["mask"])})

    np.testing.assert_array_equal(moved(in_floats(swapped_fn)), np.zeros(3))
    assert "are swapped" in findings(in_floats(swapped_fn))
    np.testing.assert_array_equal(moved(stopped_fn), np.zeros(3))
    assert "no parameter changes the loss" in findings(stopped_fn)


@shows("ignores its mask")
def a_loss_that_ignores_its_mask() -> None:
    def unmasked_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(batch["x"] @ params["w"]), jnp.sum(batch["mask"])

    np.testing.assert_allclose(moved(unmasked_fn), -np.ones(3) * 4 / 3)
    assert "which the loss ignores" in findings(unmasked_fn)


@shows("clips cotangents")
def a_backward_pass_that_clips() -> None:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.5, 1.5),))

    def clipped_fn(params: Any, batch: Any, c: float = 1.0) -> Any:
        loss_sum, n = loss_fn({"w": clipped(params["w"])}, batch)
        return loss_sum / c, n / c

    np.testing.assert_allclose(moved(clipped_fn), -np.ones(3) / 2)
    np.testing.assert_allclose(moved(lambda *x: clipped_fn(*x, 4.0)), -np.ones(3))
    assert "depends on the size of the loss" in findings(clipped_fn)


@shows("`optax.apply_every`")
def an_optimizer_that_runs_on_zeros() -> None:
    def wrap(optimizer: Any, k: int) -> Any:
        chain = optax.chain(optax.apply_every(k), optimizer)
        return optax.with_extra_args_support(chain)

    assert "optimizer also runs on zeros, 2 times" in audited(wrap).explanation


@shows('without `gradients="mean"`')
def gradients_of_a_mean() -> None:
    assert not audited(token_accumulation, mean=True).passed


@shows("around one of ours")
def wrapped_by_optax() -> None:
    optimizer = optax.MultiSteps(token_accumulation(SGD, 2), 2)
    update, state, seen = jax.jit(optimizer.update), optimizer.init(PARAMS), []
    for _ in range(8):
        updates, state = update({"w": jnp.ones(3)}, state, PARAMS, num_tokens=1)
        seen.append(bool(updates["w"][0] != 0))
    assert seen == [False, False, False, True] * 2

    def wrap(tx: Any, k: int) -> Any:
        return optax.MultiSteps(token_accumulation(tx, k), k)

    assert not audited(wrap).passed


@shows("looks at other rows")
def rows_that_are_coupled() -> None:
    def coupled_fn(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        losses = (y - jnp.mean(y)) ** 2
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    assert "depends on the other rows" in findings(coupled_fn)


@shows("all `variables` of a Linen model")
def statistics_as_parameters() -> None:
    params = {"params": jnp.ones(3), "batch_stats": jnp.ones(3)}
    optimizer = token_accumulation(optax.adamw(0.1), 1)
    grads = {"params": jnp.ones(3), "batch_stats": jnp.zeros(3)}
    state = optimizer.init(params)
    updates, _ = jax.jit(optimizer.update)(grads, state, params, num_tokens=1)
    assert np.all(updates["batch_stats"] < 0)


@shows("looks like the device's own")
def counts_that_look_own() -> None:
    """Device by device the whole batch is counted: the update is an eighth."""

    def counted_maximum(w: Any, batch: Any) -> Any:
        return jnp.sum(w * batch["x"]), jnp.maximum(jnp.sum(batch["x"]), batch["n"])

    mesh = make_mesh((8,))
    step = make_train_step(counted_maximum, SGD, 1, mesh=mesh, data_axes="data")
    batch = {"x": jnp.ones((8, 2)), "n": jnp.float32(16)}
    state, metrics = step(step.init(jnp.zeros(())), batch)
    assert (float(state.params), float(metrics.num_tokens)) == (-1 / 8, 8 * 16)


@shows("model state that single rows write to")
def _() -> None:
    def remembers(params: Any, bank: Any, batch: Any) -> Any:
        bank = bank.at[batch["index"]].set(batch["x"])
        return (jnp.sum(batch["x"] @ params["w"]), len(batch["x"])), bank

    batch = {"index": jnp.arange(8), "x": jnp.ones((8, 3))}
    for reduce_every, written in (("window", 1 / 8), ("micro_batch", 1.0)):
        step = make_train_step(
            remembers,
            SGD,
            1,
            has_model_state=True,
            mesh=make_mesh((8,)),
            data_axes="data",
            reduce_every=reduce_every,
        )
        state, _ = step(step.init(PARAMS, jnp.zeros((9, 3))), batch)
        np.testing.assert_array_equal(state.model_state[:8], written)


@shows("in your own `shard_map`")
def sums_over_devices_twice() -> None:
    def summed(w: Any, x: Any) -> Any:
        return jax.lax.psum(jax.grad(lambda w: jnp.sum(w * x))(w), "data")

    mesh = make_mesh((8,))
    over = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert float(jax.jit(over)(jnp.ones(()), jnp.ones(16))) == 8 * 16


@shows("labels by position")
def rows_of_pairs_that_are_cut_apart() -> None:
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


@shows("a loss that is NaN while its gradient is finite")
def a_loss_of_nan_with_a_finite_gradient() -> None:
    def with_nan(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch)[0] + jnp.nan, jnp.sum(batch["mask"])

    skip = {"should_skip_update_fn": optax.skip_not_finite}
    step = make_train_step(with_nan, SGD, 1, **skip)
    state, metrics = step(step.init(PARAMS), BATCH)
    chex.assert_trees_all_equal(state.params, {"w": -jnp.ones(3)})
    assert not metrics.skipped
    assert jnp.isnan(metrics.loss)


@shows("a traced count that is negative or not finite")
def counts_that_are_not_finite_traced() -> None:
    optimizer = token_accumulation(SGD, 2)
    update, grads = jax.jit(optimizer.update), {"w": jnp.ones(3)}
    for count in (-1.0, np.nan, np.inf, -np.inf):
        state = optimizer.init(PARAMS)
        _, state = update(grads, state, PARAMS, num_tokens=count)
        assert (int(state.mini_step), float(state.acc_tokens)) == (1, 0.0)
        updates, state = update(grads, state, PARAMS, num_tokens=2.0)
        chex.assert_trees_all_equal(updates, {"w": -np.ones(3) / 2})


@shows("a traced schedule that returns less than 1")
def a_schedule_of_0_traced() -> None:
    optimizer = token_accumulation(SGD, lambda step: 0 * step)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = update({"w": jnp.ones(3)}, state, PARAMS, num_tokens=1)
        chex.assert_trees_all_equal(updates, {"w": -np.ones(3)})


@shows("a traced `num_micro_batches`")
def a_bound_too_large_traced() -> None:
    step = make_window_step(loss_fn, SGD)
    window = jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)
    state = step.init(PARAMS)
    _, metrics = step(state, window, num_micro_batches=jnp.asarray(9))
    assert metrics.updated and float(metrics.num_tokens) == 6.0


def test_every_row_is_shown():
    assert sorted(ROWS) == sorted([*SHOWN, NOT_SHOWN])


@pytest.mark.parametrize("happens", SHOWN.values(), ids=SHOWN)
def test_a_mistake_without_an_error(happens: Callable[[], None]):
    happens()
