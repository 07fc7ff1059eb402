"""What the NNX steps do with variables; that they are exact is in test_promises.py."""

import contextlib
import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import SKIPS, numbers_of, slow
from jax.sharding import Mesh

import optax_tokenaccum
from optax_tokenaccum import reshard_state, token_accumulation
from optax_tokenaccum.losses import softmax_cross_entropy_sum
from optax_tokenaccum.nnx import (
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    window_value_and_grad,
)

K, LAYERS, SIZE, WIDTH = 4, 3, helpers.VOCABULARY, helpers.WIDTH
SGD = optax.sgd(1.0, momentum=0.0)
BATCH = helpers.ragged_batch(0, rows=64)
MICRO_BATCHES = helpers.cut(BATCH, K)
RTOL = helpers.RTOL["float32"]


TABLE = jnp.zeros(2)


class Model(nnx.Module):
    """A model with statistics, dropout, a count of calls, a key and LoRA."""

    def __init__(self, rate: float = 0.0):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(SIZE, WIDTH, rngs=rngs)
        self.hidden = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.key = nnx.Variable(jax.random.key(1))
        if rate:
            self.table = TABLE  # in no variable
        self.out = nnx.Linear(WIDTH, SIZE, rngs=rngs)
        lora = self.hidden.lora.lora_b
        lora[...] = jax.random.normal(jax.random.key(2), lora.shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] += 1
        if hasattr(self, "table"):
            self.table = self.table + 1
        self.key[...], _ = jax.random.split(self.key[...])
        x = self.hidden(self.embed(tokens))
        self.norm(x)  # moves its statistics
        return self.out(self.dropout(nnx.tanh(x)))


dropping = functools.partial(Model, rate=0.5)


class Block(nnx.Module):
    def __init__(self, rngs: Any = None, rate: float = 0.0):
        rngs = rngs or nnx.Rngs(0)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.norm(x)
        return x + self.dropout(nnx.tanh(self.linear(x)))


class Scanned(nnx.Module):
    """Stacked layers in a scan between the ends of one embedding."""

    def __init__(self):
        rngs, init = nnx.Rngs(0), nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(SIZE, WIDTH, rngs=rngs, embedding_init=init)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        body = nnx.remat(lambda x, block: block(x))
        run = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(run(self.embed(tokens), self.blocks))


class Trees(nnx.Module):
    """A model whose variables hold trees of arrays."""

    def __init__(self):
        self.weights = nnx.Param(helpers.init_params(0))
        self.stats = nnx.BatchStat((jnp.zeros(()), (jnp.zeros(2),)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        stats = self.stats.get_raw_value()
        self.stats.set_raw_value(jax.tree.map(lambda x: x + 1, stats))
        return helpers.logits_of(self.weights.get_raw_value(), tokens)


def loss_fn(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["tokens"])
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


class Run:
    """A model that is trained in one of the ways."""

    def __init__(
        self,
        way: str,
        model: nnx.Module,
        loss_fn: Any = loss_fn,
        inner: Any = SGD,
        wrt: Any = nnx.Param,
        **options: Any,
    ):
        self.way, self.model = way, model
        if way == "two programs":
            own = {name: options.pop(name) for name in SKIPS if name in options}
            self.step: Any = make_train_step(loss_fn, **options)
            inner = token_accumulation(inner, K, **own)
        elif way == "window":
            self.step = make_window_step(loss_fn, **options)
        else:
            value_and_grad = window_value_and_grad(loss_fn, wrt=wrt, **options)

            @nnx.jit
            def step(model: Any, optimizer: Any, window: Any) -> Any:
                values, grads = value_and_grad(model, window)
                chex.assert_trees_all_equal_structs(grads, nnx.state(model, wrt))
                optimizer.update(model, grads)
                return values

            self.step = step
        self.optimizer = nnx.Optimizer(model, inner, wrt=wrt)

    def window(self, batches: list[Any]) -> list[Any]:
        if self.way != "two programs":
            batches = [helpers.stack(batches)]
        return [self.step(self.model, self.optimizer, b) for b in batches]

    def given(self) -> list[np.ndarray]:
        """The last gradient given to SGD; parameter differences are rounded."""
        state = self.optimizer.opt_state
        state = state.inner_opt_state if self.way == "two programs" else state
        return numbers_of(state[0].trace)


def held(node: Any, kind: Any = ...) -> list[np.ndarray]:
    return numbers_of(nnx.state(node, kind))


@functools.cache
def gradient_fn(wrt: Any, loss_fn: Any = loss_fn) -> Any:
    of_wrt = nnx.DiffState(0, wrt)
    return nnx.jit(nnx.value_and_grad(loss_fn, argnums=of_wrt, has_aux=True))


def plain_window(model: Any, batches: list[Any], wrt: Any) -> tuple[Any, ...]:
    """The loss and gradient over the window, and the mean of means.

    What else the model has changes as without accumulation.
    """
    found = [gradient_fn(wrt)(model, batch) for batch in batches]
    grads, counts = [numbers_of(g) for _, g in found], [n for (_, n), _ in found]
    loss = sum(x for (x, _), _ in found) / sum(counts)
    means = [[x / n for x in g] for g, n in zip(grads, counts, strict=True)]
    exact = [sum(xs) / sum(counts) for xs in zip(*grads, strict=True)]
    return loss, exact, [sum(xs) / len(counts) for xs in zip(*means, strict=True)]


@pytest.mark.parametrize(
    ("way", "new", "loss_fn", "wrt", "over"),
    [
        ("two programs", dropping, loss_fn, nnx.Param, "1"),
        slow("two programs", Model, loss_fn, nnx.LoRAParam, "8"),
        slow("window", dropping, loss_fn, nnx.LoRAParam, "1"),
        slow("own loop", dropping, loss_fn, nnx.LoRAParam, "1"),
        slow("window", Scanned, nnx.remat(loss_fn), nnx.Param, "8, explicit"),
        slow("two programs", Trees, loss_fn, nnx.Param, "1"),
    ],
)
def test_windows_are_those_of_a_plain_loop(
    way: str, new: Any, loss_fn: Any, wrt: Any, over: str
):
    """In exact gradients, statistics and masks; transformations write variables back.

    Over devices, statistics are of each device's rows, and masks differ.
    """
    options = meshes.over(over)
    mesh = options.get("mesh")
    frozen, rest = nnx.All(nnx.Param, nnx.Not(wrt)), nnx.Not(nnx.Param)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        run, plain = Run(way, new(), loss_fn, wrt=wrt, **options), new()
        fixed = held(plain, frozen)
        loss, expected, naive = plain_window(plain, MICRO_BATCHES, wrt)
        if way != "own loop":
            run.step.init(run.model, run.optimizer)
        before = held(run.model, wrt)
        with helpers.count_compilations() as first:
            values = run.window(MICRO_BATCHES)[-1]
        given = run.given()
        after = jax.tree.map(np.subtract, before, given)
        chex.assert_trees_all_equal(held(run.model, wrt), after)
        own = values if way == "own loop" else (values.loss, (values[1],))
        np.testing.assert_allclose(own[0], loss, rtol=RTOL)
        assert own[1][0] == BATCH["mask"].sum()
        assert helpers.relative_error(given, expected) < RTOL
        assert helpers.relative_error(naive, expected) > 0.02
        moved = zip(held(run.model, rest), held(plain, rest), strict=True)
        are_alike = [np.allclose(x, y, RTOL, 1e-6) for x, y in moved]
        assert all(are_alike) == (mesh is None)
        with helpers.count_compilations() as second:
            run.window(MICRO_BATCHES)
    chex.assert_trees_all_equal(held(run.model, frozen), fixed)
    kept = [jax.tree.structure(nnx.state(x)) for x in (run.model, plain)]
    assert kept[0] == kept[1]
    if way != "own loop":
        in_parts = way == "two programs"
        assert run.optimizer.step[...] == 2
        assert (len(first), len(second)) == (1 + in_parts, 0)
    if isinstance(run.model, Model):
        assert run.model.calls[...] == 2 * K
        if way != "own loop" and not mesh:
            assert run.model.table[0] == 2 * K and TABLE[0] == 0  # which models share


ROWS = jnp.arange(48.0).reshape(16, 3) / 48


def sum_and_rows(model: Any, x: Any) -> Any:
    return jnp.sum(model(x) ** 2), len(x)


def linear(inner: Any = SGD, devices: int = 1, size: int = 3) -> Run:
    mesh = Mesh(jax.devices()[:devices], "data") if devices > 1 else None
    options = {"mesh": mesh, "data_axes": "data"} if mesh else {}
    model = nnx.Linear(size, 1, rngs=nnx.Rngs(0))
    return Run("two programs", model, sum_and_rows, inner, **options)


@pytest.mark.needs(devices=4)
def test_an_open_window_continues_on_other_devices():
    rows = [ROWS + i for i in range(2 * K)]
    straight, resumed = (linear(optax.adamw(0.1), devices) for devices in (4, 2))
    straight.window(rows[:2])
    resumed.step.init(resumed.model, resumed.optimizer)
    saved, target = (nnx.state((x.model, x.optimizer)) for x in (straight, resumed))
    saved = jax.device_get(saved)  # as a checkpoint does
    nnx.update((resumed.model, resumed.optimizer), reshard_state(saved, target))
    for run, devices in ((straight, 4), (resumed, 2)):
        sums = held(run.optimizer.opt_state.grad_sums)
        assert [x.shape for x in sums] == [(devices, 1), (devices, 3, 1)]
        run.step.init(run.model, run.optimizer)  # keeps what there is
        chex.assert_trees_all_equal(held(run.optimizer.opt_state.grad_sums), sums)
        run.window(rows[2:])
    both = [held(run.model) for run in (straight, resumed)]
    chex.assert_trees_all_close(*both, rtol=0.0, atol=1e-5)
    make_train_step(sum_and_rows).init(resumed.model, resumed.optimizer)
    sums = held(resumed.optimizer.opt_state.grad_sums)
    assert [x.shape for x in sums] == [(1,), (3, 1)]


class Adapted(nnx.Module):
    """Frozen layers in a scan with `nnx.remat`, which returns all that it is given."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))
        self.layers = nnx.split_rngs(splits=2)(make)(rngs)
        self.adapter = nnx.LoRA(3, 2, 1, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        layer = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
        run = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers) + self.adapter(x)


@pytest.mark.needs(devices=3)
def test_frozen_layers_are_neither_sent_nor_changed():
    """A mean over three devices rounds."""
    mesh, model = Mesh(jax.devices()[:3], "data"), Adapted()
    tx = token_accumulation(optax.sgd(0.1), 2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    step = make_train_step(sum_and_rows, mesh=mesh, data_axes="data")
    step.init(model, optimizer)
    before, x = held(model.layers), jnp.ones((3, 3))
    program = step.accumulate.lower(model, optimizer, x).compile().as_text()
    sent = [
        line.split("=")[1] for line in program.splitlines() if "all-reduce(" in line
    ]
    assert sent and all("f32[2,3" not in x.split("all-reduce")[0] for x in sent)
    step(model, optimizer, x)
    chex.assert_trees_all_equal(held(model.layers), before)


def test_an_optimizer_of_another_model_and_an_open_window_are_not_overwritten():
    small, large = linear(optax.adam(0.1)), linear(size=4)
    moments = held(small.optimizer)
    with pytest.raises(ValueError, match="must be of this model"):
        small.step(large.model, small.optimizer, jnp.ones((3, 4)))
    chex.assert_trees_all_equal(held(small.optimizer), moments)
    run, over = linear(), linear(devices=2)
    run.window([ROWS])
    arrays = jax.tree.map(np.asarray, nnx.state(run.optimizer))
    nnx.update(run.optimizer, arrays)
    with pytest.raises(ValueError, match="call close_window of the step that began"):
        over.step.init(run.model, run.optimizer)


def test_an_array_in_no_variable_may_be_shared_by_models():
    """Over devices too, where `device_put` shares its buffer."""
    run, shared = linear(devices=2), jnp.zeros(2)
    run.model.table = shared
    run.window([ROWS])
    assert not shared.is_deleted() and run.model.table[0] == 0


def test_the_model_may_be_its_own_teacher():
    """Its arrays are donated in the same call; a graph is static, a state is not."""

    def distilled(model: Any, x: Any, graph: Any, weights: Any) -> Any:
        return jnp.sum(model(x) * nnx.merge(graph, weights)(x)), len(x)

    models = [linear().model for _ in range(3)]
    for model, teacher in ((models[0], models[0]), models[1:]):
        run = Run("window", model, distilled)
        graph, weights = nnx.split(teacher)
        run.step(model, run.optimizer, ROWS[None], graph=graph, weights=weights)
    chex.assert_trees_all_close(held(models[0]), held(models[1]), rtol=1e-6)
    assert helpers.relative_error(held(models[0]), held(models[2])) > 1e-3


OBJECTS = [
    lambda: nnx.Rngs(0),
    lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
    lambda: {"teacher": Block()},
]


@pytest.mark.parametrize("new", OBJECTS, ids=["keys", "metrics", "model"])
def test_an_nnx_object_as_a_keyword_raises(new: Any):
    """Its keys, metrics and statistics would be as before in every call."""

    def summary(model: Any, x: Any, given: Any = None) -> Any:
        return model(x)

    def with_count(model: Any, x: Any, given: Any = None) -> Any:
        return jnp.sum(model(x)), 1.0

    def of_weights(w: Any, x: Any, given: Any = None) -> Any:
        return jnp.sum(x @ w), 1.0

    model = linear().model
    core = optax_tokenaccum.make_train_step(of_weights, SGD, 2)
    steps = Run("two programs", model, with_count)
    windows = Run("window", model, with_count)
    coupled = coupled_value_and_grad(summary, jnp.sum)
    calls = [
        lambda **kw: steps.step(model, steps.optimizer, ROWS, **kw),
        lambda **kw: windows.step(model, windows.optimizer, ROWS[None], **kw),
        lambda **kw: window_value_and_grad(with_count)(model, ROWS[None], **kw),
        lambda **kw: coupled(model, ROWS[None], **kw),
        lambda **kw: core(core.init(jnp.ones((3, 1))), ROWS, **kw),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"NNX object, .* at \['given'\]"):
            call(given=new())


def test_inside_of_nnx_jit_and_between_evaluations():
    run, plain = (Run("two programs", Block(), sum_and_rows) for _ in range(2))
    rows = [jax.random.normal(jax.random.key(i), (4, WIDTH)) for i in range(K)]
    evaluate = nnx.jit(lambda model, x: model(x).sum())
    outer = nnx.jit(lambda *args: run.step(*args))
    for i, x in enumerate(rows):
        run.model.eval()
        evaluate(run.model, x)
        run.model.train()
        metrics = (outer if i % 2 else run.step)(run.model, run.optimizer, x)
    plain.window(rows)
    assert metrics.updated and run.optimizer.step[...] == 1
    both = [held((x.model, x.optimizer)) for x in (run, plain)]
    chex.assert_trees_all_close(*both, rtol=RTOL, atol=1e-6)


def summary_fn(model: Any, x: Any) -> Any:
    y = model(x)
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def contrastive_loss_fn(y: Any) -> Any:
    y = jnp.concatenate(y)
    return jnp.mean(jnp.exp(3 * y @ y.T)), y.mean()


def test_coupled_losses_are_those_of_the_whole_window():
    """With masks that change from micro-batch to micro-batch."""
    window = jax.random.normal(jax.random.key(0), (K, 8, WIDTH))
    wrt = nnx.PathContains("kernel")

    def whole_window(model: Any, window: Any) -> Any:
        summaries = [summary_fn(model, x) for x in window]
        return contrastive_loss_fn(jnp.stack(summaries))

    ours, theirs = (Block(rate=0.5) for _ in range(2))
    f = coupled_value_and_grad(summary_fn, contrastive_loss_fn, has_aux=True)
    with pytest.raises(ValueError, match="change at norm/mean, norm/var"):
        f(ours, window)
    for model in (ours, theirs):
        model.norm.set_attributes(use_running_average=True)
    f = coupled_value_and_grad(
        nnx.remat(summary_fn), contrastive_loss_fn, has_aux=True, wrt=wrt
    )
    f, reference = nnx.jit(f), gradient_fn(wrt, whole_window)
    for _ in range(2):  # the second call begins with the keys that the first one left
        got, expected = f(ours, window), reference(theirs, window)
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)
        states = [held(model) for model in (ours, theirs)]
        chex.assert_trees_all_close(*states, rtol=1e-5)


def test_a_summary_assigns_no_parameters_and_a_keyword_may_have_any_name():
    def scaled(model: Any, x: Any, *, rest: Any, state: Any) -> Any:
        return rest * state * model(x)

    def assigns(model: Any, x: Any) -> Any:
        model.bias[...] = jnp.zeros(1)
        return model(x)

    f, model = nnx.jit(coupled_value_and_grad(scaled, jnp.sum)), linear().model
    (loss, _), _ = f(model, ROWS[None], rest=2.0, state=3.0)
    np.testing.assert_allclose(loss, 6 * np.sum(model(ROWS)), rtol=1e-5)
    with pytest.raises(
        ValueError, match="summary_fn must not assign parameters.* change at bias"
    ):
        coupled_value_and_grad(assigns, jnp.sum)(model, ROWS[None])


class Masked(nnx.Module):
    """Statistics of the rows that count."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        self.norm(x, mask=mask)
        return jnp.sum(jnp.where(mask, self.w * x, 0))


@pytest.mark.needs(devices=2)
def test_statistics_with_a_mask_are_exact_where_the_loss_sees_all_rows():
    """Over devices, Flax's mean is one of means, and NaN of a device of padding."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(*batch), jnp.sum(batch[1])

    def mean(counts: Any, reduce_every: Any) -> float:
        model, over = Masked(), {"mesh": mesh, "data_axes": "data"}
        step = make_train_step(loss_fn, reduce_every=reduce_every, **over)
        tx = token_accumulation(SGD, 1)
        x = jnp.array([[1.0], [1.0], [1.0], [3.0], [3.0], [3.0]])
        mask = np.concatenate([np.arange(3) < n for n in counts])[:, None]
        step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), (x, mask))
        return float(model.norm.mean[0])

    assert mean((1, 3), "micro_batch") == 2.5
    assert mean((1, 3), "window") == 2.0
    assert mean((0, 3), "micro_batch") == 3.0
    assert np.isnan(mean((0, 3), "window"))
