"""Where another library meets a window: what holds.

Each test compares with plain JAX, optax or Flax on ragged token counts, and shows that
the naive answer differs. Versions are those of the newest environment: jax 0.12.0.1,
optax 0.2.8, Flax 0.12.12, Orbax 0.12.8, Grain 0.2.18.

| crossing | what holds | shown by |
|---|---|---|
| Muon, GaLore, every optimizer of optax | full batches | `test_conformance.py` |
| Muon or Shampoo in a partition, schedule-free, lookahead | full batches; donated | here |
| `nnx.SpectralNorm`, `nnx.WeightNorm` | full batches, if a copy is called | here |
| batch renormalization | a window of sums; no full batch | here |
| Orbax, to another mesh and another `k` | full batches, of what `k` says | here |
| Grain's `ElasticIterator`, `DataLoader` | full batches, over other shards | here |
| Grain's `MapDataset` | full batches, bit for bit | `test_grain.py` |
| Pallas in a scan, on a mesh | full batches | here |
| `defvjp_with_accums` | full batches | `test_custom_rules.py` |
| `jax.export` | the same step | `test_export.py` |
| two processes, uneven data | full batches | `test_processes.py` |
| Qwix, tokamax, jax-privacy, NetKet, NumPyro, Haliax | `test_crossings_of_others.py` | |
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
from flax import nnx
from helpers import relative_error
from jax.experimental import pallas
from optax import contrib

from optax_tokenaccum import make_train_step, reshard_state, token_accumulation
from optax_tokenaccum.nnx import make_train_step as make_nnx_step

K, PARAMS = 4, helpers.init_params(0)
FULL = [helpers.ragged_batch(seed, 8) for seed in range(2)]
MICRO = [batch for full in FULL for batch in helpers.cut(full, K)]
LABELS = {"embed": "adam", "hidden": "other", "out": "frozen"}


def shampoo(rate: float) -> optax.GradientTransformation:
    """Two matrices of statistics for each matrix, as SOAP and Shampoo keep."""

    def root(x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(x)
        return (vectors * values**-0.25) @ vectors.T

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: [1e-3 * jnp.eye(n) for n in p.shape], params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        def add(g: Any, s: Any) -> Any:
            return [s[0] + g @ g.T, s[1] + g.T @ g]

        def updates(g: Any, s: Any) -> Any:
            return -rate * root(s[0]) @ g @ root(s[1])

        state = jax.tree.map(add, grads, state)
        return jax.tree.map(updates, grads, state), state

    return optax.GradientTransformation(init, update)


def in_partition(other: Any) -> Any:
    parts = {"adam": optax.adam(0.01), "other": other, "frozen": optax.set_to_zero()}
    return optax.partition(parts, LABELS)


def lookahead(fast: Any) -> Any:
    """As `docs/optimizers.md` says: the slow parameters are in the state."""
    tx, pair = optax.lookahead(fast, 2, 0.5), optax.LookaheadParams

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, new = tx.update(grads, state[0], pair(params, state[1]))
        return updates.fast, (new, optax.apply_updates(state[1], updates.slow))

    return optax.GradientTransformation(lambda p: (tx.init(pair(p, p)), p), update)


OPTIMIZERS = {
    "muon in a partition": in_partition(contrib.muon(0.02)),
    "shampoo in a partition": in_partition(shampoo(0.02)),
    "schedule-free": contrib.schedule_free_sgd(0.5),
    "lookahead": lookahead(optax.sgd(0.5, momentum=0.9)),
}
MEAN = jax.jit(jax.grad(lambda *x: helpers.loss_mean_fn(*x)[0]))


def bare(tx: Any, batches: Any) -> Any:
    tx = optax.with_extra_args_support(tx)
    params, state, update = PARAMS, tx.init(PARAMS), jax.jit(tx.update)
    for batch in batches:
        updates, state = update(MEAN(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_a_step_that_donates(name: str):
    tx = OPTIMIZERS[name]
    step = make_train_step(helpers.loss_sum_fn, tx, K)
    first = state = step.init(PARAMS)
    state, _ = helpers.run_step(step, state, MICRO)
    assert any(x.is_deleted() for x in jax.tree.leaves(first.opt_state))

    def read(params: Any, state: Any) -> Any:
        if name == "schedule-free":
            params = contrib.schedule_free_eval_params(state, params)
        floats = [
            x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        return optax.tree.sub(params, PARAMS), floats

    expected = read(*bare(tx, FULL))
    got = read(state.params, state.opt_state.inner_opt_state)
    naive = bare(optax.MultiSteps(tx, K), MICRO)[0]
    for x, y in zip(got, expected, strict=True):
        assert relative_error(x, y) < 1e-5
    assert relative_error(optax.tree.sub(naive, PARAMS), expected[0]) > 0.1


BATCHES = problems.batches_of(1, 7, 2, 8)
WHOLE = jax.tree.map(lambda *x: np.concatenate(x), *BATCHES)


class Normed(nnx.Module):
    def __init__(self, kind: Any):
        linear = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        linear.kernel[...] *= 4
        self.layer = kind(linear, rngs=nnx.Rngs(1))


def normed_loss(model: Any, batch: Any) -> Any:
    return problems.squares(model.layer(batch["x"])[:, 0], batch)


def loss_of_copy(model: Any, batch: Any) -> Any:
    return normed_loss(nnx.clone(model), batch)


@pytest.mark.parametrize("kind", [nnx.SpectralNorm, nnx.WeightNorm])
def test_a_norm_that_overwrites_its_weight(kind: Any):
    """The first micro-batch of a window would be that of another weight."""

    def trained(loss_fn: Any, tx: Any, batches: Any) -> Any:
        model = Normed(kind)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, batch: Any) -> None:
            def mean(model: Any) -> Any:
                loss_sum, n = loss_fn(model, batch)
                return loss_sum / n, n

            grads, n = nnx.grad(mean, has_aux=True)(model)
            is_counted = {} if batches is whole else {"num_tokens": n}
            optimizer.update(model, grads, **is_counted)

        for batch in batches:
            step(model, optimizer, batch)
        return model.layer(WHOLE["x"])

    sgd, whole = optax.sgd(0.3), [WHOLE] * 2
    ours = token_accumulation(sgd, K, gradients="mean")
    expected = trained(loss_of_copy, sgd, whole)
    assert relative_error(trained(loss_of_copy, ours, BATCHES * 2), expected) < 1e-5
    without = trained(normed_loss, ours, BATCHES * 2)
    assert relative_error(without, trained(normed_loss, sgd, whole)) > 0.05

    model = Normed(kind)
    optimizer = nnx.Optimizer(model, token_accumulation(sgd, K), wrt=nnx.Param)
    with pytest.raises(ValueError, match="must not assign parameters"):
        make_nnx_step(normed_loss)(model, optimizer, BATCHES[0])
    step = make_nnx_step(loss_of_copy)
    for batch in BATCHES * 2:
        step(model, optimizer, batch)
    assert relative_error(model.layer(WHOLE["x"]), expected) < 1e-5


def renormalized(params: Any, state: Any, batch: Any) -> Any:
    x = batch["x"] @ params["w"]
    mean, scale = x.mean(0), jnp.sqrt(x.var(0) + 1e-3)
    r = jnp.clip(jax.lax.stop_gradient(scale / state["scale"]), 1 / 3, 3)
    shift = jax.lax.stop_gradient((mean - state["mean"]) / state["scale"])
    y = jnp.tanh((x - mean) / scale * r + jnp.clip(shift, -5, 5)) @ params["out"]
    new = {"mean": mean, "scale": scale}
    state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state, new)
    return problems.squares(y, batch), state


def test_batch_renormalization_is_a_sum_with_the_statistics_of_each_micro_batch():
    params = {"w": problems.normal(1, 8, 4), "out": problems.normal(2, 4)}
    start = {"mean": np.zeros(4, np.float32), "scale": np.ones(4, np.float32)}
    step = make_train_step(renormalized, problems.KEEPS, K, has_model_state=True)
    state, _ = helpers.run_step(step, step.init(params, start), BATCHES)
    got = state.opt_state.inner_opt_state

    def by_hand(batches: Any) -> Any:
        @jax.jit
        def gradient(params: Any, statistics: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                (loss_sum, n), new = renormalized(params, statistics, batch)
                return loss_sum, (n, new)

            return jax.grad(loss_fn, has_aux=True)(params)

        statistics, sums, tokens = start, jax.tree.map(np.zeros_like, params), 0
        for batch in batches:
            grads, (n, statistics) = gradient(params, statistics, batch)
            sums, tokens = jax.tree.map(np.add, sums, grads), tokens + n
        return jax.tree.map(lambda x: x / tokens, sums), statistics

    expected, statistics = by_hand(BATCHES)
    assert relative_error(got, expected) < 1e-5
    assert relative_error(state.model_state, statistics) < 1e-5
    assert relative_error(got, by_hand([WHOLE])[0]) > 0.1


@pytest.mark.parametrize("each, k, done", [(False, 2, 3), (True, 6, 1)])
def test_orbax_restores_to_another_mesh_and_another_k(
    each: bool, k: int, done: int, tmp_path: Path
):
    """A window that has enough micro-batches closes with the next one."""
    batches = helpers.cut(helpers.ragged_batch(0, 64), 8)
    options = {"reduce_every": "micro_batch"} if each else {}
    old, new = meshes.make_mesh((8,)), meshes.make_mesh((2, 2))

    def step_on(mesh: Any, k: int, layout: Any) -> Any:
        placed = meshes.placed(mesh, layout) if each else PARAMS
        sgd = optax.sgd(0.1, momentum=0.0)  # its trace is the gradient
        step = meshes.make_step("two programs", sgd, mesh, k=k, **options)
        return step, step.init(placed)

    step, state = step_on(old, 4, meshes.FSDP)
    state, _ = helpers.run_step(step, state, batches[:done])
    step, like = step_on(new, k, meshes.BOTH)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        if each:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            state = checkpointer.restore(tmp_path / "state", target)
        else:
            target = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state
            )
            state = reshard_state(
                checkpointer.restore(tmp_path / "state", target), like
            )
    closes = max(k, done + 1)
    for i in range(done, closes):
        state, metrics = step(state, batches[i])
        assert metrics.updated == (i == closes - 1)
    got = jax.device_get(state.opt_state.inner_opt_state[0].trace)
    window = jax.tree.map(lambda *x: np.concatenate(x), *batches[:closes])
    exact = helpers.float64_gradient(PARAMS, window)
    gradients = [helpers.float64_gradient(PARAMS, x) for x in batches[:closes]]
    naive = jax.tree.map(lambda *x: sum(x) / len(x), *gradients)
    assert relative_error(got, exact) < helpers.RTOL["float32"]
    assert relative_error(naive, exact) > 0.02
    assert state.params["hidden"].sharding.mesh.shape == new.shape


ROWS = [jax.tree.map(operator.itemgetter(i), FULL[0]) for i in range(8)]
ROWS += [jax.tree.map(operator.itemgetter(i), FULL[1]) for i in range(8)]


class Rows:
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: Any) -> Any:
        return ROWS[i] | {"row": np.int32(i)}

    def __repr__(self) -> str:  # what a DataLoader compares, also in a new process
        return "Rows()"


def elastic(rows: int, shards: int) -> list[Any]:
    data = grain.MapDataset.source(Rows()).shuffle(seed=3).repeat(2)
    shard = [grain.sharding.ShardOptions(i, shards) for i in range(shards)]
    make = grain.experimental.ElasticIterator
    return [iter(make(data, rows, options)) for options in shard]


def loader(rows: int, shards: int) -> list[Any]:
    return [
        iter(
            grain.DataLoader(
                data_source=Rows(),
                sampler=grain.samplers.IndexSampler(16, shuffle=True, seed=3),
                operations=[grain.transforms.Batch(rows)],
            )
        )
    ]


@pytest.mark.parametrize("make, shards", [(elastic, 4), (loader, 1)])
def test_grain_resumes_within_a_window_over_other_shards(make: Any, shards: int):
    """Two micro-batches of 4 rows, and after the restart one of 8."""
    step = make_train_step(helpers.loss_sum_fn, optax.sgd(0.1, momentum=0.0))
    state, counts, rows = step.init(PARAMS), [], []

    def read(iterators: Any) -> Any:
        parts = [next(iterator) for iterator in iterators]
        batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        rows.extend(batch.pop("row").tolist())
        counts.append(batch)
        return batch

    iterators = make(4, 2)
    for _ in range(2):
        state, _ = step.accumulate(state, read(iterators))
    places = [iterator.get_state() for iterator in iterators]
    assert all(place == places[0] for place in places)
    place = json.loads(json.dumps(places[0])) if make is elastic else places[0]
    iterators = make(8, shards)
    for iterator in iterators:
        iterator.set_state(place)
    state, _ = step.accumulate(state, read(iterators))
    state, _ = step.close_window(state)
    assert sorted(rows) == [*range(16)]
    full = jax.tree.map(lambda *x: np.stack(x), *ROWS)
    exact = helpers.float64_gradient(PARAMS, full)
    gradients = [helpers.float64_gradient(PARAMS, batch) for batch in counts]
    naive = jax.tree.map(lambda *x: sum(x) / len(x), *gradients)
    got = state.opt_state.inner_opt_state[0].trace
    assert relative_error(got, exact) < helpers.RTOL["float32"]
    assert relative_error(naive, exact) > 0.02


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    def kernel(x: Any, w: Any, y: Any) -> None:
        y[...] = jnp.dot(x[...], w[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)


def backward(given: Any, g: jax.Array) -> Any:
    x, w = given
    return matmul(g, w.T), matmul(x.T, g)


product = jax.custom_vjp(matmul)
product.defvjp(lambda x, w: (matmul(x, w), (x, w)), backward)


@pytest.mark.parametrize("over", ["1", "8"])
def test_pallas_in_layers_of_a_scan(over: str):
    def network(multiply: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(multiply(x, w)), None

        return problems.loss_through(
            lambda params, x: jax.lax.scan(layer, x, params["layers"])[0]
        )

    options = meshes.over(over)
    got = problems.train_step(network(product), problems.FEW, BATCHES, **options)
    plain = network(jnp.matmul)
    exact = problems.by_hand(plain, problems.FEW, BATCHES)
    means = [x | {"weights": x["weights"] / x["weights"].sum()} for x in BATCHES]
    naive = problems.by_hand(plain, problems.FEW, means)
    assert relative_error(jax.device_get(got), exact) < helpers.RTOL["float32"]
    assert relative_error(naive, exact) > 0.1
