"""What the NNX steps do with a model's variables over 8 devices, and in windows."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from optax_tokenaccum import (
    collectives,
    pad_window,
    regroup_sums,
    softmax_cross_entropy_sum,
    token_accumulation,
)
from optax_tokenaccum.nnx import make_train_step, make_window_step

K, DEVICES = 4, 8
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
ON_MESH = {"mesh": MESH, "data_axes": "data"}
OF_ALL_ROWS = ON_MESH | {"reduce_every": "micro_batch"}
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0, rows=64)
SLOW = pytest.mark.slow
WAYS = [
    "two programs",
    *(pytest.param(x, marks=SLOW) for x in ("one program", "window")),
]


class Model(nnx.Module):
    """A model with statistics, dropout, a count of calls and LoRA."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        size, width = helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs)
        self.hidden = nnx.LoRALinear(width, width, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.out = nnx.Linear(width, size, rngs=rngs)
        lora = self.hidden.lora.lora_b
        lora[...] = jax.random.normal(jax.random.key(2), lora.shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] += 1
        x = self.hidden(self.embed(tokens))
        self.norm(x)
        return self.out(self.dropout(nnx.tanh(x)))


def loss_fn(model: Model, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["tokens"])
    loss, n = softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])
    return loss * batch.get("scale", 1.0), n


def masked_loss_fn(model: Model, batch: Any) -> Any:
    loss_sum, n = loss_fn(model, batch)
    return loss_sum, (n, model.dropout(jnp.ones(64)))


class Run:
    """A model that is trained in one of the ways."""

    def __init__(
        self,
        way: str,
        loss_fn: Any = loss_fn,
        inner: Any = SGD,
        wrt: Any = nnx.Param,
        rate: float = 0.0,
        **options: Any,
    ):
        self.model = Model(nnx.Rngs(0), rate)
        skips = {}
        if way == "window":
            self.step: Any = make_window_step(loss_fn, **options)
        else:
            if "should_skip_update_fn" in options:
                name = "should_skip_update_fn"
                skips = {name: options.pop(name)}
            self.step = make_train_step(loss_fn, **options)
            k = K if way == "two programs" else lambda _: K
            inner = token_accumulation(inner, k, **skips)
        self.optimizer = nnx.Optimizer(self.model, inner, wrt=wrt)
        self.way = way

    def window(self, batches: list[Any], **kwargs: Any) -> list[Any]:
        if self.way == "window":
            batches = [helpers.stack(batches)]
        return [self.step(self.model, self.optimizer, b, **kwargs) for b in batches]


def held(node: Any, kind: Any) -> list[np.ndarray]:
    return [np.array(as_data(x)) for x in jax.tree.leaves(nnx.state(node, kind))]


def statistics_of(parts: list[list[Any]]) -> list[np.ndarray]:
    """Move the statistics of a model with the means over parts of micro-batches."""
    model = Model(nnx.Rngs(0))
    for micro_batch in parts:
        found = []
        for part in micro_batch:
            copy = nnx.clone(model)
            loss_fn(copy, part)
            found.append(held(copy, nnx.BatchStat))
        means = [np.mean(x, 0) for x in zip(*found, strict=True)]
        leaves, structure = jax.tree.flatten(nnx.state(model, nnx.BatchStat))
        assert len(leaves) == len(means)
        nnx.update(model, jax.tree.unflatten(structure, map(jnp.asarray, means)))
    return held(model, nnx.BatchStat)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduce_every", ["window", "micro_batch"])
def test_statistics_are_means_over_devices(way: str, reduce_every: str):
    run = Run(way, **ON_MESH | {"reduce_every": reduce_every})
    run.window(helpers.cut(BATCH, K))
    micro_batches = helpers.cut(BATCH, K)
    of_devices = statistics_of([helpers.cut(m, DEVICES) for m in micro_batches])
    of_rows = statistics_of([[m] for m in micro_batches])
    expected, other = of_devices, of_rows
    if reduce_every == "micro_batch":
        expected, other = of_rows, of_devices
    got = held(run.model, nnx.BatchStat)
    assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]
    assert helpers.relative_error(got, other) > 100 * helpers.RTOL["float32"]
    first = statistics_of([helpers.cut(m, DEVICES)[:1] for m in micro_batches])
    assert helpers.relative_error(got, first) > 100 * helpers.RTOL["float32"]
    for x in jax.tree.leaves(nnx.state(run.model)):
        assert len(x.sharding.device_set) == DEVICES
        assert x.is_fully_replicated
    assert run.model.calls[...] == K


@pytest.mark.parametrize("way", WAYS)
def test_no_two_devices_or_micro_batches_share_a_dropout_mask(way: str):
    run = Run(way, masked_loss_fn, has_aux=True, rate=0.5, **ON_MESH)
    keys, seen = held(run.model, nnx.RngKey), []
    for _ in range(2):
        metrics = run.window(helpers.cut(BATCH, K))
        seen += [m.aux.reshape(-1, 64) for m in metrics]
    masks = np.concatenate(seen)
    assert masks.shape == (2 * K * DEVICES, 64)
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    chex.assert_trees_all_equal(held(run.model, nnx.RngKey), keys)
    assert run.model.dropout.rngs.count[...] == 2 * 2 * K  # the loss asks twice


def test_the_ways_move_variables_alike():
    def moved(way: str, **options: Any) -> Any:
        run = Run(way, rate=0.5, **options)
        run.window(helpers.cut(BATCH, K))
        kinds = nnx.Any(nnx.BatchStat, nnx.RngCount, nnx.Param)
        return held(run.model, kinds)

    for options in ({}, ON_MESH):
        expected = moved("two programs", **options)
        for way in ("one program", "window"):
            got = moved(way, **options)
            assert helpers.relative_error(got, expected) < helpers.RTOL["float32"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [ON_MESH, OF_ALL_ROWS], ids=["window", "micro"])
def test_a_micro_batch_that_one_device_rejects_moves_nothing(way: str, options: Any):
    good = [m | {"scale": np.ones(16, np.float32)} for m in helpers.cut(BATCH, K)]
    bad = good[1] | {"scale": np.where(np.arange(16) == 5, np.nan, 1)}

    def poisoning_loss_fn(model: Model, batch: Any) -> Any:
        scale = jnp.mean(batch["scale"])
        loss_sum, n = loss_fn(model, batch | {"scale": scale})
        model.norm.mean[...] *= scale
        return loss_sum, n

    skips = options | {"should_skip_update_fn": optax.skip_not_finite}
    got = Run(way, poisoning_loss_fn, **skips)
    got.window([good[0], bad, *good[1:]])
    expected = Run(way, poisoning_loss_fn, **skips)
    expected.window(good)
    for kind in (nnx.Param, nnx.BatchStat):
        a, b = held(got.model, kind), held(expected.model, kind)
        assert helpers.relative_error(a, b) < helpers.RTOL["float32"]
    assert got.model.calls[...] == expected.model.calls[...] == K
    if way != "window":
        naive = Run(way, poisoning_loss_fn, **options)
        naive.window([good[0], bad])
        assert np.isnan(held(naive.model, nnx.BatchStat)[0]).any()


@pytest.mark.parametrize("way", WAYS)
def test_whole_numbers_that_depend_on_rows_are_refused(way: str):
    def counting_loss_fn(model: Model, batch: Any) -> Any:
        loss_sum, n = loss_fn(model, batch)
        model.calls[...] += jnp.sum(batch["mask"])
        return loss_sum, n

    run = Run(way, counting_loss_fn, **ON_MESH)
    with pytest.raises(ValueError, match=r"calls must be the same on all devices"):
        run.window(helpers.cut(BATCH, K))
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(run.model)))
    run = Run(way, counting_loss_fn, **OF_ALL_ROWS)
    run.window(helpers.cut(BATCH, K))
    assert run.model.calls[...] == K + BATCH["mask"].sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, ON_MESH], ids=["one device", "mesh"])
def test_lora_alone_is_trained(way: str, options: Any):
    run = Run(way, wrt=nnx.LoRAParam, **options)
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    rest, before = held(run.model, frozen), held(run.model, nnx.LoRAParam)

    def mean_loss(model: Model) -> jax.Array:
        loss_sum, n = loss_fn(model, BATCH)
        return loss_sum / n

    gradient = nnx.grad(mean_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
    expected = held(gradient(Model(nnx.Rngs(0))), ...)
    run.window(helpers.cut(BATCH, K))
    got = helpers.difference(before, held(run.model, nnx.LoRAParam))
    assert helpers.relative_error(got, expected) < 1e-4  # parameters are larger
    chex.assert_trees_all_equal(held(run.model, frozen), rest)


@pytest.mark.parametrize("options", [{}, ON_MESH], ids=["one device", "mesh"])
def test_a_model_may_change_between_micro_batches(options: Any):
    """For example its mode; the window goes on."""
    run = Run("two programs", masked_loss_fn, has_aux=True, rate=0.5, **options)
    masks = []
    for i, micro_batch in enumerate(helpers.cut(BATCH, K) * 2):
        run.model.train() if i % 2 else run.model.eval()
        [metrics] = run.window([micro_batch])
        masks.append(np.unique(metrics.aux).tolist())
        assert metrics.updated == (i % K == K - 1)
    assert masks == [[1], [0, 2]] * K


def test_gradients_are_sent_once_a_window():
    run = Run("two programs", inner=optax.adamw(1e-3), **ON_MESH)
    micro_batch = helpers.cut(BATCH, K)[0]
    size = sum(x.nbytes for x in held(run.model, nnx.Param))
    programs = {
        "accumulate": run.step.accumulate.lower(run.model, run.optimizer, micro_batch),
        "close": run.step.close_window.lower(run.model, run.optimizer),
    }
    sent = {
        name: collectives(x.compile()).bytes(axes="data")
        for name, x in programs.items()
    }
    assert sent["accumulate"] < 0.1 * size  # statistics
    assert size <= sent["close"] < 1.01 * size
    plain = nnx.Optimizer(run.model, optax.adamw(1e-3), wrt=nnx.Param)
    window = make_window_step(loss_fn, **ON_MESH)
    lowered = window.lower(run.model, plain, helpers.stacked(BATCH, K))
    assert size <= collectives(lowered.compile()).bytes(axes="data") < 1.1 * size


def test_frozen_parameters_under_remat_are_not_sent():
    run = Run("two programs", nnx.remat(loss_fn), wrt=nnx.LoRAParam, **ON_MESH)
    micro_batch = helpers.cut(BATCH, K)[0]
    lowered = run.step.accumulate.lower(run.model, run.optimizer, micro_batch)
    statistics = sum(x.nbytes for x in held(run.model, nnx.BatchStat))
    sent = collectives(lowered.compile()).bytes(axes="data")
    assert statistics <= sent < 2 * statistics


def test_init_lays_out_and_may_be_called_again():
    run = Run("two programs", **ON_MESH)
    run.step.init(run.model, run.optimizer)
    sums = jax.tree.leaves(run.optimizer.opt_state.acc_grads)
    shapes = [x.shape for x in held(run.model, nnx.Param)]
    assert [x.shape for x in sums] == [(DEVICES, *shape) for shape in shapes]
    first, *others = helpers.cut(BATCH, K)
    run.window([first])
    sums = held(run.optimizer.opt_state.acc_grads, ...)
    assert any(x.any() for x in sums)
    run.step.init(run.model, run.optimizer)
    chex.assert_trees_all_equal(held(run.optimizer.opt_state.acc_grads, ...), sums)
    alone = make_train_step(loss_fn)
    for call in (
        lambda: alone.init(run.model, run.optimizer),
        lambda: alone(run.model, run.optimizer, first),
    ):
        with pytest.raises(ValueError, match="window must be closed before"):
            call()
    run.window(others)
    alone.init(run.model, run.optimizer)
    assert [x.shape for x in held(run.optimizer.opt_state.acc_grads, ...)] == shapes


@pytest.mark.parametrize("options", [{}, ON_MESH, OF_ALL_ROWS])
def test_a_checkpoint_in_the_middle_of_a_window(options: Any, tmp_path: Any):
    ocp = pytest.importorskip("orbax.checkpoint")
    first, *others = helpers.cut(BATCH, K)
    inner = optax.adamw(1e-2)

    def new() -> Run:
        return Run("two programs", inner=inner, rate=0.5, **options)

    expected = new()
    expected.window([first])
    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.state((expected.model, expected.optimizer))
        checkpointer.save(tmp_path / "state", state)
    expected.window([*others, first])
    got = new()
    got.step.init(got.model, got.optimizer)
    target = nnx.state((got.model, got.optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", target)
    nnx.update((got.model, got.optimizer), restored)
    got.window([*others, first])
    for kind in (nnx.Param, nnx.BatchStat, nnx.RngCount):
        a, b = held(got.model, kind), held(expected.model, kind)
        chex.assert_trees_all_equal(a, b)
    assert got.optimizer.step[...] == K + 1


def as_data(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, 1), (4, 8)])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_checkpoint_on_other_devices(
    before: int, after: int, is_open: bool, tmp_path: Any
):
    ocp = pytest.importorskip("orbax.checkpoint")

    def options(devices: int) -> dict[str, Any]:
        mesh = jax.sharding.Mesh(jax.devices()[:devices], "data")
        return {"mesh": mesh, "data_axes": "data"} if devices > 1 else {}

    adam, micro_batches = optax.adamw(0.1), helpers.cut(BATCH, K)
    first = micro_batches[: K // 2 if is_open else K]
    rest = micro_batches[len(first) :] + micro_batches
    straight = Run("two programs", inner=adam, **options(before))
    straight.window(first)
    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.state((straight.model, straight.optimizer))
        checkpointer.save(tmp_path / "state", state)
    resumed = Run("two programs", inner=adam, **options(after))
    resumed.step.init(resumed.model, resumed.optimizer)
    nodes = resumed.model, resumed.optimizer
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "state")
    nnx.update(nodes, regroup_sums(saved, nnx.state(nodes)))
    straight.window(rest)
    resumed.window(rest)
    pair = [held(run.model, nnx.Param) for run in (straight, resumed)]
    chex.assert_trees_all_close(*pair, rtol=0.0, atol=1e-5)


def test_new_variables_stay_in_a_model_on_one_device_and_are_refused_elsewhere():
    def sowing_loss_fn(model: Model, batch: Any) -> Any:
        loss_sum, n = loss_fn(model, batch)
        model.tokens = nnx.Intermediate(n)
        return loss_sum, n

    run = Run("two programs", sowing_loss_fn)
    for micro_batch in helpers.cut(BATCH, K)[:2]:
        run.window([micro_batch])
        assert run.model.tokens[...] == micro_batch["mask"].sum()
    for way, options in (("window", {}), ("two programs", ON_MESH)):
        run = Run(way, sowing_loss_fn, **options)
        with pytest.raises(ValueError, match=r"change at tokens.*nnx\.pop"):
            run.window(helpers.cut(BATCH, K))

    def popping_loss_fn(model: Model, batch: Any) -> Any:
        loss_sum, n = sowing_loss_fn(model, batch)
        return loss_sum, (n, jax.tree.leaves(nnx.pop(model, nnx.Intermediate)))

    for way in ("two programs", "window"):
        run = Run(way, popping_loss_fn, has_aux=True, **ON_MESH)
        metrics = run.window(helpers.cut(BATCH, K))
        assert sum(np.sum(m.aux) for m in metrics) == BATCH["mask"].sum()


@pytest.mark.parametrize("options", [{}, ON_MESH], ids=["one device", "mesh"])
def test_sequences_of_many_lengths_keys_and_keywords(options: Any):
    lengths = BATCH["mask"].sum(1)
    sequences = [
        {name: BATCH[name][i, :n] for name in ("tokens", "labels")} | {"mask": True}
        for i, n in enumerate(lengths)
    ]
    sequences = [s | {"mask": np.ones(len(s["tokens"]), bool)} for s in sequences]
    window = pad_window(
        sequences,
        pad_values={"tokens": 0, "labels": 0, "mask": False},
        max_tokens=1024,
        batch_multiple=DEVICES if options else 1,
    )

    def scaled_loss_fn(model: Model, batch: Any, rng: Any, scale: Any) -> Any:
        loss_sum, n = loss_fn(model, batch)
        return scale * loss_sum + 0 * jax.random.uniform(rng), n

    run = Run("window", scaled_loss_fn, **options)
    before = held(run.model, nnx.Param)
    kwargs = {"rng": jax.random.key(0), "scale": 2.0}
    run.step.compile(run.model, run.optimizer, [window], **kwargs)
    run.step.init(run.model, run.optimizer)
    with helpers.count_compilations() as compilations:
        metrics = run.step(run.model, run.optimizer, window, **kwargs)
    assert not compilations and metrics.num_tokens == lengths.sum()

    def mean_loss(model: Model) -> jax.Array:
        loss_sum, n = loss_fn(model, BATCH)
        return 2 * loss_sum / n

    expected = held(nnx.grad(mean_loss)(Model(nnx.Rngs(0))), ...)
    got = helpers.difference(before, held(run.model, nnx.Param))
    assert helpers.relative_error(got, expected) < 1e-4  # parameters are larger
