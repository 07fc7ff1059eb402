"""Where another library meets a window, on ragged counts, and the naive answer differs.

With jax 0.12.0.1, optax 0.2.8, Flax 0.12.12, Orbax 0.12.8, Grain 0.2.18 and others;
elsewhere is `test_other_libraries.py`:

| crossing | what holds | shown by |
|---|---|---|
| every optimizer of optax | full batches | `test_conformance.py` |
| Muon or GaLore in a partition | full batches; donated | here |
| schedule-free, lookahead | full batches; donated | here |
| `nnx.SpectralNorm`, `nnx.WeightNorm` | full batches, if a copy is called | here |
| batch renormalization | a sum over micro-batches, no full batch | here |
| Orbax, to another mesh and `k` | full batches, of what `k` says | here |
| Grain's `ElasticIterator` | full batches, over other shards | here |
| Grain's `DataLoader` | full batches, in larger micro-batches | here |
| Grain's `MapDataset` | full batches, bit for bit | `test_grain.py` |
| Pallas in a scan, on a mesh | full batches | here |
| `defvjp_with_accums` | full batches | `test_custom_rules.py` |
| `jax.export` | the same step | `test_export.py` |
| two processes, uneven data | full batches | `test_processes.py` |
| Qwix 0.1.8 | full batches, if scales are of rows | elsewhere |
| tokamax 0.0.17, losses and `ragged_dot` | full batches, with a mask | elsewhere |
| jax-privacy 2.0.0, `clipped_grad` and noise | full batches | elsewhere |
| NetKet 3.23.0, complex | full batches, coupled and conjugated | elsewhere |
| NumPyro 0.22.0 | full batches, with the count in the step | elsewhere |
| Haliax 1.4.dev453, jax 0.10.2 | full batches | elsewhere |
"""

import json
import operator
from pathlib import Path
from typing import Any

import grain
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import orbax.checkpoint as ocp
import problems
import pytest
from crossings import compare, layered, whole
from flax import nnx
from helpers import relative_error
from jax.experimental import pallas
from optax import contrib

from optax_tokenaccum import (
    make_train_step,
    reshard_state,
    token_accumulation,
)

K, PARAMS = 4, helpers.init_params(0)
TEXT = [helpers.cut(helpers.ragged_batch(seed, 8), K) for seed in range(2)]
ROWS = problems.batches_of(1, 7, 2, 8)


def in_partition(tx: Any) -> Any:
    parts = {"embed": optax.adam(0.01), "hidden": tx, "out": optax.set_to_zero()}
    return optax.partition(parts, {name: name for name in parts})


def lookahead(fast: Any) -> Any:
    """As `docs/optimizers.md` says: the slow parameters are in the state."""
    tx, pair = optax.lookahead(fast, 2, 0.5), optax.LookaheadParams

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, new = tx.update(grads, state[0], pair(params, state[1]))
        return updates.fast, (new, optax.apply_updates(state[1], updates.slow))

    return optax.GradientTransformation(lambda p: (tx.init(pair(p, p)), p), update)


OPTIMIZERS = {
    "muon in a partition": in_partition(contrib.muon(0.02)),
    "galore in a partition": in_partition(contrib.galore(0.02, rank=4)),
    "schedule-free": contrib.schedule_free_sgd(0.5),
    "lookahead": lookahead(optax.sgd(0.5, momentum=0.9)),
}
MEAN = jax.jit(jax.grad(lambda *x: helpers.loss_mean_fn(*x)[0]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_a_step_that_donates(name: str):
    tx = OPTIMIZERS[name]
    step = make_train_step(helpers.loss_sum_fn, tx, K)
    first = step.init(PARAMS)
    state, _ = helpers.run_step(step, first, sum(TEXT, []))
    assert any(x.is_deleted() for x in jax.tree.leaves(first.opt_state))

    def bare(tx: Any, batches: Any) -> Any:
        tx = optax.with_extra_args_support(tx)
        params, state, update = PARAMS, tx.init(PARAMS), jax.jit(tx.update)
        for batch in batches:
            updates, state = update(MEAN(params, batch), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    def moved(params: Any, state: Any) -> Any:
        if name == "schedule-free":
            params = contrib.schedule_free_eval_params(state, params)
        return optax.tree.sub(params, PARAMS)

    expected, inner_state = bare(tx, map(whole, TEXT))
    ours = state.params, state.opt_state.inner_opt_state
    assert relative_error(moved(*ours), moved(expected, inner_state)) < 1e-5
    assert relative_error(*(jax.tree.leaves(x) for x in (ours[1], inner_state))) < 1e-5
    naive, _ = bare(optax.MultiSteps(tx, K), sum(TEXT, []))
    assert relative_error(optax.tree.sub(naive, PARAMS), moved(*ours)) > 0.1


class Normed(nnx.Module):
    def __init__(self, kind: Any):
        linear = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        linear.kernel[...] *= 4
        self.layer = kind(linear, rngs=nnx.Rngs(1))


def normed(model: Any, batch: Any) -> Any:
    return problems.squares(model.layer(batch["x"])[:, 0], batch)


def normed_copy(model: Any, batch: Any) -> Any:
    return normed(nnx.clone(model), batch)


@pytest.mark.parametrize("kind", [nnx.SpectralNorm, nnx.WeightNorm])
def test_a_norm_that_overwrites_its_weight(kind: Any):
    """The first micro-batch of a window would be that of another weight."""
    sgd, full = optax.sgd(0.3), [whole(ROWS)] * 2
    ours = token_accumulation(sgd, K)

    def trained(loss_fn: Any, tx: Any, batches: Any) -> Any:
        model = Normed(kind)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, batch: Any) -> None:
            grads, n = nnx.grad(loss_fn, has_aux=True)(model, batch)
            if tx is sgd:
                optimizer.update(model, jax.tree.map(lambda g: g / n, grads))
            else:
                optimizer.update(model, grads, num_tokens=n)

        for batch in batches:
            step(model, optimizer, batch)
        return model.layer(full[0]["x"])

    expected = trained(normed_copy, sgd, full)
    assert relative_error(trained(normed_copy, ours, ROWS * 2), expected) < 1e-5
    flax = trained(normed, sgd, full)
    assert relative_error(trained(normed, ours, ROWS * 2), flax) > 0.05


def renormalized(params: Any, state: Any, batch: Any) -> Any:
    x, stop = batch["x"] @ params["w"], jax.lax.stop_gradient
    mean, scale = x.mean(0), jnp.sqrt(x.var(0) + 1e-3)
    r = jnp.clip(stop(scale / state["scale"]), 1 / 3, 3)
    shift = jnp.clip(stop((mean - state["mean"]) / state["scale"]), -5, 5)
    y = jnp.tanh((x - mean) / scale * r + shift) @ params["out"]
    new = {"mean": mean, "scale": scale}
    new = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state, new)
    return problems.squares(y, batch), new


def test_batch_renormalization_is_a_sum_with_the_statistics_of_each_micro_batch():
    params = {"w": problems.normal(1, 8, 4), "out": problems.normal(2, 4)}
    start = {"mean": np.zeros(4, np.float32), "scale": np.ones(4, np.float32)}
    step = make_train_step(renormalized, problems.KEEPS, K, has_model_state=True)
    state, _ = helpers.run_step(step, step.init(params, start), ROWS)

    def mean(params: Any, batches: Any) -> Any:
        total, count, statistics = 0, 0, start
        for batch in batches:
            (x, n), statistics = renormalized(params, statistics, batch)
            total, count = total + x, count + n
        return total / count, statistics

    grad = jax.jit(jax.grad(mean, has_aux=True))
    got = state.opt_state.inner_opt_state, state.model_state
    assert relative_error(got, grad(params, ROWS)) < 1e-5
    assert relative_error(got[0], grad(params, [whole(ROWS)])[0]) > 0.1


@pytest.mark.needs(devices=8)
@pytest.mark.parametrize("each, k, done", [(False, 2, 3), (True, 6, 1)])
def test_orbax_restores_to_another_mesh_and_another_k(
    each: bool, k: int, done: int, tmp_path: Path
):
    """A window that has enough micro-batches closes with the next one."""
    batches = helpers.cut(helpers.ragged_batch(0, 64), 8)
    options = {"reduce_every": "micro_batch"} if each else {}
    old, new = meshes.make_mesh((8,)), meshes.make_mesh((2, 2))

    def step_on(mesh: Any, k: int, layout: Any) -> Any:
        step = meshes.make_step("two programs", problems.KEEPS, mesh, k=k, **options)
        return step, step.init(meshes.placed(mesh, layout) if each else PARAMS)

    step, state = step_on(old, 4, meshes.FSDP)
    state, _ = helpers.run_step(step, state, batches[:done])
    step, like = step_on(new, k, meshes.BOTH)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(  # in the new layout, or else in the shapes of the old one
        lambda x, y: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=y.sharding if each else one
        ),
        state,
        like,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "state", target)
    state = state if each else reshard_state(state, like)
    closes = max(k, done + 1)
    for i in range(done, closes):
        state, metrics = step(state, batches[i])
        assert metrics.updated == (i == closes - 1)
    assert state.params["hidden"].sharding.mesh.shape == new.shape
    got = state.opt_state.inner_opt_state
    compare(got, helpers.loss_sum_fn, PARAMS, batches[:closes])


class Rows:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: Any) -> Any:
        row = jax.tree.map(operator.itemgetter(i % 8), whole(TEXT[i // 8]))
        return row | {"row": np.int32(i)}

    def __repr__(self) -> str:  # what a DataLoader compares, also in a new process
        return "Rows()"


def elastic(rows: int, shards: int) -> list[Any]:
    data, make = grain.MapDataset.source(Rows()), grain.experimental.ElasticIterator
    shard = [grain.sharding.ShardOptions(i, shards) for i in range(shards)]
    return [iter(make(data.shuffle(seed=3), rows, options)) for options in shard]


def loader(rows: int, shards: int) -> list[Any]:
    order = grain.samplers.IndexSampler(16, shuffle=True, seed=3)
    batch = [grain.transforms.Batch(rows)]
    return [iter(grain.DataLoader(data_source=Rows(), sampler=order, operations=batch))]


@pytest.mark.parametrize("make", [elastic, loader])
def test_grain_resumes_within_a_window_in_other_micro_batches(make: Any):
    """Two of 4 rows, over 2 shards if it has shards, and then one of 8, over 4."""
    step = make_train_step(helpers.loss_sum_fn, problems.KEEPS)
    state, batches, place = step.init(PARAMS), [], None
    for rows, shards in ((4, 2), (4, 2), (8, 4)):
        iterators = make(rows, shards)  # a new one each time
        for iterator in iterators if place else []:
            iterator.set_state(place)
        batches.append(whole([next(iterator) for iterator in iterators]))
        [place, *others] = [iterator.get_state() for iterator in iterators]
        assert all(other == place for other in others)
        place = json.loads(json.dumps(place)) if make is elastic else place
        state, _ = step.accumulate(state, batches[-1])
    state, _ = step.close_window(state)
    assert sorted(whole(batches)["row"]) == [*range(16)]
    got = state.opt_state.inner_opt_state
    compare(got, helpers.loss_sum_fn, PARAMS, batches)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    def kernel(x: Any, w: Any, y: Any) -> None:
        y[...] = jnp.dot(x[...], w[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)


by_pallas = jax.custom_vjp(product)
by_pallas.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda given, g: (product(g, given[1].T), product(given[0].T, g)),
)


@pytest.mark.parametrize("over", ["1", "8"])
def test_pallas_in_layers_of_a_scan(over: str):
    loss_fn, options = layered(by_pallas), meshes.over(over)
    got = problems.train_step(loss_fn, problems.FEW, ROWS, **options)
    compare(got, layered(jnp.matmul), problems.FEW, ROWS)
