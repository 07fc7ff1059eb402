"""The NNX steps are exact, for models with state, and what they do with variables."""

import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import SKIPS, numbers_of, slow
from jax.sharding import Mesh
from meshes import OVER

from optax_tokenaccum import regroup_sums, softmax_cross_entropy_sum, token_accumulation
from optax_tokenaccum.nnx import (
    make_train_step,
    make_window_step,
    window_value_and_grad,
)

K, DEVICES = 4, 8
ONE_DEVICE, ON_MESH = OVER["1"], OVER["8"]
MESH = ON_MESH["mesh"]
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0, rows=64)
MICRO_BATCHES = helpers.cut(BATCH, K)
RTOL = helpers.RTOL["float32"]


class Model(nnx.Module):
    """A model with statistics, dropout, a count of calls, a key and LoRA."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        size, width = helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs)
        self.hidden = nnx.LoRALinear(width, width, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.key = nnx.Variable(jax.random.key(1))
        self.out = nnx.Linear(width, size, rngs=rngs)
        lora = self.hidden.lora.lora_b
        lora[...] = jax.random.normal(jax.random.key(2), lora.shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] += 1
        self.key[...], _ = jax.random.split(self.key[...])
        x = self.hidden(self.embed(tokens))
        self.norm(x)  # moves its statistics
        return self.out(self.dropout(nnx.tanh(x)))


def loss_fn(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["tokens"])
    loss, n = softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])
    return loss * batch.get("scale", 1.0), n


def mean_loss_fn(model: Any, batch: Any) -> jax.Array:
    loss_sum, num_tokens = loss_fn(model, batch)
    return loss_sum / num_tokens


def masked_loss_fn(model: Model, batch: Any) -> Any:
    loss_sum, n = loss_fn(model, batch)
    return loss_sum, (n, model.dropout(jnp.ones(64)))


def poisoning_loss_fn(model: Model, batch: Any) -> Any:
    """Each device's rows have a scale, which the statistics take over."""
    scale = jnp.mean(batch["scale"])
    loss_sum, n = loss_fn(model, batch | {"scale": scale})
    model.norm.mean[...] *= scale
    return loss_sum, n


class Run:
    """A model that is trained in one of the ways."""

    def __init__(
        self,
        way: str,
        loss_fn: Any = loss_fn,
        inner: Any = SGD,
        wrt: Any = nnx.Param,
        rate: float = 0.0,
        model: Any = None,
        tx: Any = None,
        **options: Any,
    ):
        self.way, self.model = way, model or Model(nnx.Rngs(0), rate)
        if way == "window":
            self.step: Any = make_window_step(loss_fn, **options)
        else:
            own = {name: options.pop(name) for name in SKIPS if name in options}
            self.step = make_train_step(loss_fn, **options)
            k = K if way == "two programs" else lambda _: K
            inner = token_accumulation(inner, k, **own)
        self.optimizer = nnx.Optimizer(self.model, tx or inner, wrt=wrt)

    def window(self, batches: list[Any], **kwargs: Any) -> list[Any]:
        if self.way == "window":
            batches = [helpers.stack(batches)]
        return [self.step(self.model, self.optimizer, b, **kwargs) for b in batches]

    def held(self, kind: Any = ...) -> list[np.ndarray]:
        return held(self.model, kind)

    def given(self) -> list[np.ndarray]:
        """The last gradient given to SGD; parameter differences are rounded."""
        state = self.optimizer.opt_state
        state = state if self.way == "window" else state.inner_opt_state
        return [np.array(x) for x in jax.tree.leaves(state[0].trace)]


def held(node: Any, kind: Any = ...) -> list[np.ndarray]:
    return numbers_of(nnx.state(node, kind))


@functools.cache
def gradient_fn(wrt: Any) -> Any:
    return nnx.jit(nnx.grad(mean_loss_fn, argnums=nnx.DiffState(0, wrt)))


def full_gradient(model: Any, wrt: Any = nnx.Param) -> list[Any]:
    return held(gradient_fn(wrt)(nnx.clone(model), BATCH))


@pytest.mark.parametrize(
    ("way", "options", "wrt"),
    [
        ("two programs", ON_MESH, nnx.LoRAParam),
        slow("two programs", ONE_DEVICE, nnx.Param),
        ("window", ON_MESH, nnx.Param),
    ],
)
def test_windows_are_the_full_batches(way: str, options: Any, wrt: Any):
    run = Run(way, wrt=wrt, **options)
    frozen = nnx.All(nnx.Param, nnx.Not(wrt))
    rest, expected = run.held(frozen), full_gradient(run.model, wrt=wrt)
    moved = statistics_of([[m] for m in MICRO_BATCHES])  # as without accumulation
    run.step.init(run.model, run.optimizer)
    compiled = []
    for window in range(2):
        before = run.held(wrt)
        with helpers.count_compilations() as compilations:
            metrics = run.window(MICRO_BATCHES)
        compiled.append(len(compilations))
        given = run.given()
        after = jax.tree.map(np.subtract, before, given)
        chex.assert_trees_all_equal(run.held(wrt), after)
        assert [bool(m.updated) for m in metrics[:-1]] == [False] * len(metrics[1:])
        assert metrics[-1].updated and metrics[-1].gradient_step == window + 1
        assert metrics[-1].num_tokens == BATCH["mask"].sum()
        if window == 0:
            assert helpers.relative_error(given, expected) < RTOL
            norm = np.float32(optax.tree.norm(expected))
            np.testing.assert_allclose(metrics[-1].grad_norm, norm, rtol=RTOL)
            got = run.held(nnx.BatchStat)
            error = helpers.relative_error(got, moved)
            assert error < RTOL if options is ONE_DEVICE else error > 100 * RTOL
    assert compiled == [2 if way == "two programs" else 1, 0]
    chex.assert_trees_all_equal(run.held(frozen), rest)
    assert run.model.calls[...] == 2 * K


def statistics_of(parts: list[list[Any]]) -> list[np.ndarray]:
    """Move the statistics of a model with the means over parts of micro-batches."""
    model = Model(nnx.Rngs(0))
    for micro_batch in parts:
        found = []
        for part in micro_batch:
            copy = nnx.clone(model)
            copy(part["tokens"])
            found.append(held(copy, nnx.BatchStat))
        means = [np.mean(x, 0) for x in zip(*found, strict=True)]
        _, structure = jax.tree.flatten(nnx.state(model, nnx.BatchStat))
        nnx.update(model, jax.tree.unflatten(structure, map(jnp.asarray, means)))
    return held(model, nnx.BatchStat)


@pytest.mark.parametrize("counted", [True, False])
def test_a_loop_around_update_with_num_tokens(counted: bool):
    """The count makes it exact; optax's class, which takes none, is not."""
    naive = optax.MultiSteps(SGD, K).gradient_transformation()
    run = Run("two programs", tx=None if counted else naive)
    before, expected = run.held(nnx.Param), full_gradient(run.model)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, batch: Any) -> None:
        grads, n = nnx.grad(loss_fn, has_aux=True)(model, batch)
        if counted:
            optimizer.update(model, grads, num_tokens=n)
        else:
            optimizer.update(model, jax.tree.map(lambda g: g / n, grads))

    for micro_batch in MICRO_BATCHES:
        step(run.model, run.optimizer, micro_batch)
    if counted:
        assert helpers.relative_error(run.given(), expected) < RTOL
    else:
        got = helpers.difference(before, run.held(nnx.Param))
        assert helpers.relative_error(got, expected) > 0.02


@pytest.mark.parametrize("jit", ["nnx.jit", slow("jax.jit")])
def test_a_loop_that_owns_the_optimizer(jit: str):
    """It draws the masks of a window step, and leaves the same model behind."""
    window, wrt = helpers.stack(MICRO_BATCHES), nnx.LoRAParam
    step, own = (
        Run("window", masked_loss_fn, optax.adamw(0.1), wrt, 0.5, has_aux=True)
        for _ in range(2)
    )
    value_and_grad = window_value_and_grad(masked_loss_fn, has_aux=True, wrt=wrt)

    def update(model: Model, optimizer: nnx.Optimizer) -> Any:
        values, grads = value_and_grad(model, window)
        optimizer.update(model, grads)
        return values

    @jax.jit
    def update_of_parts(graphdef: Any, state: Any) -> Any:
        parts = nnx.merge(graphdef, state)
        values = update(*parts)
        return values, nnx.state(parts)

    def update_in_jax(*parts: Any) -> Any:
        values, state = update_of_parts(*nnx.split(parts))
        nnx.update(parts, state)
        return values

    run = nnx.jit(update) if jit == "nnx.jit" else update_in_jax
    for _ in range(2):
        (metrics,) = step.window(MICRO_BATCHES)
        loss, (num_tokens, masks) = run(own.model, own.optimizer)
        np.testing.assert_allclose(loss, metrics.loss, rtol=RTOL)
        assert num_tokens == BATCH["mask"].sum()
        np.testing.assert_array_equal(masks, metrics.aux)
        assert len({mask.tobytes() for mask in np.array(masks)}) == K
    chex.assert_trees_all_close(own.held(), step.held(), rtol=RTOL, atol=1e-6)
    assert own.model.calls[...] == 2 * K


@pytest.mark.parametrize(
    ("way", "options"), [("two programs", ONE_DEVICE), slow("window", ON_MESH)]
)
def test_a_rejected_micro_batch_moves_nothing(way: str, options: Any):
    """One of the devices rejects it."""
    good = [m | {"scale": np.ones(16, np.float32)} for m in MICRO_BATCHES]
    bad = good[1] | {"scale": np.where(np.arange(16) == 5, np.float32(np.nan), 1)}
    got = Run(way, poisoning_loss_fn, rate=0.5, **options | SKIPS)
    metrics = got.window([bad, good[0], bad, *good[1:]])
    expected = Run(way, poisoning_loss_fn, rate=0.5, **options | SKIPS)
    expected.step = got.step
    expected.window(good)
    if way != "window":
        skipped = [bool(m.skipped) for m in metrics]
        assert skipped == [True, False, True, False, False, False]
    for x, y in zip(got.held(), expected.held(), strict=True):
        chex.assert_trees_all_close(x, y, rtol=RTOL, atol=0)
    chex.assert_tree_all_finite(got.held())
    if options is ONE_DEVICE:
        naive = Run(way, poisoning_loss_fn, **options)
        naive.window([bad, *good[1:]])
        assert np.isnan(naive.held(nnx.BatchStat)[0]).any()


def test_a_micro_batch_without_tokens_moves_statistics_as_its_rows_are_real():
    run, plain = Run("two programs", **SKIPS), Model(nnx.Rngs(0))
    before = run.held(nnx.BatchStat)
    empty = MICRO_BATCHES[0] | {"mask": np.zeros_like(MICRO_BATCHES[0]["mask"])}
    [metrics] = run.window([empty | {"scale": np.float32(np.nan)}])
    assert not metrics.skipped and metrics.mini_step == 1
    plain(empty["tokens"])
    got, expected = run.held(nnx.BatchStat), held(plain, nnx.BatchStat)
    assert helpers.relative_error(got, expected) < RTOL
    assert helpers.relative_error(before, expected) > 100 * RTOL
    assert run.model.calls[...] == 1


def test_init_lays_out_and_may_be_called_again():
    run = Run("two programs", **ON_MESH)
    run.step.init(run.model, run.optimizer)
    shapes = [x.shape for x in run.held(nnx.Param)]
    sums = held(run.optimizer.opt_state.acc_grads)
    assert [x.shape for x in sums] == [(DEVICES, *shape) for shape in shapes]
    first, *others = MICRO_BATCHES
    run.window([first])
    sums = held(run.optimizer.opt_state.acc_grads)
    assert any(x.any() for x in sums)
    run.step.init(run.model, run.optimizer)
    chex.assert_trees_all_equal(held(run.optimizer.opt_state.acc_grads), sums)
    alone = make_train_step(loss_fn)
    run.window(others)
    alone.init(run.model, run.optimizer)
    assert [x.shape for x in held(run.optimizer.opt_state.acc_grads)] == shapes


@pytest.mark.parametrize("after", [slow(8), 4])
def test_checkpoints_of_an_open_window(after: int, tmp_path: Any):
    """On the same devices with random streams, or on others."""

    def new(devices: int) -> Run:
        mesh = {"mesh": Mesh(jax.devices()[:devices], "data"), "data_axes": "data"}
        rate = 0.5 if after == DEVICES else 0.0
        return Run("two programs", inner=optax.adamw(0.1), rate=rate, **mesh)

    first, rest = MICRO_BATCHES[:2], MICRO_BATCHES[2:] + MICRO_BATCHES
    straight, resumed = new(DEVICES), new(after)
    straight.window(first)
    resumed.step.init(resumed.model, resumed.optimizer)
    target = nnx.state((resumed.model, resumed.optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.state((straight.model, straight.optimizer))
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        if after == DEVICES:
            saved = checkpointer.restore(tmp_path / "state", target)
        else:
            saved = regroup_sums(checkpointer.restore(tmp_path / "state"), target)
    nnx.update((resumed.model, resumed.optimizer), saved)
    straight.window(rest)
    resumed.window(rest)
    if after == DEVICES:
        chex.assert_trees_all_equal(resumed.held(), straight.held())
        assert resumed.optimizer.step[...] == len(first + rest)
    pair = [run.held(nnx.Param) for run in (straight, resumed)]
    chex.assert_trees_all_close(*pair, rtol=0.0, atol=1e-5)


def test_an_optimizer_of_another_model_raises_and_loses_nothing():
    """Their trees are alike, and the moments have other shapes."""
    small, large = (nnx.Linear(n, 1, rngs=nnx.Rngs(0)) for n in (2, 4))
    tx = token_accumulation(optax.adam(0.1), 2)
    optimizer = nnx.Optimizer(small, tx, wrt=nnx.Param)
    step = make_train_step(lambda model, x: (jnp.sum(model(x)), len(x)))
    moments = held(optimizer.opt_state.inner_opt_state)
    with pytest.raises(ValueError, match="must be of this model"):
        step(large, optimizer, jnp.ones((3, 4)))
    chex.assert_trees_all_equal(held(optimizer.opt_state.inner_opt_state), moments)


def test_an_open_window_of_numpy_arrays_is_not_dropped():
    run = Run("two programs")
    run.window(MICRO_BATCHES[:1])
    state = jax.tree.map(np.asarray, nnx.state(run.optimizer))
    nnx.update(run.optimizer, state)
    over = make_train_step(loss_fn, **ON_MESH)
    with pytest.raises(ValueError, match="window must be closed before"):
        over.init(run.model, run.optimizer)
