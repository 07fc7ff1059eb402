"""A step that knows a model's variables sees when the user changes its graph."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_tokenaccum import token_accumulation
from optax_tokenaccum.nnx import make_train_step, make_window_step

WIDTH, RATE = 4, 0.1
# Micro-batches of 1 and of 6 rows: a mean of means differs.
X = [np.linspace(-1.0, 1.0, n * WIDTH).reshape(n, WIDTH) ** 3 for n in (1, 6)]


class Net(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.sizes = nnx.data({"scale": nnx.Variable(jnp.ones(()))})

    def __call__(self, x: Any) -> jax.Array:
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return self.dropout(x) * self.sizes["scale"][...]


def loss_fn(model: Net, x: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(model(x) ** 2), jnp.float32(len(x))


def optimizer_of(model: Net, wrt: Any = nnx.Param) -> nnx.Optimizer:
    return nnx.Optimizer(model, token_accumulation(optax.sgd(RATE), len(X)), wrt=wrt)


def replace_layer(model: Net, optimizer: nnx.Optimizer) -> None:
    model.layers[1] = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(7))


def add_layer(model: Net, optimizer: nnx.Optimizer) -> nnx.Optimizer:
    model.layers.append(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(7)))
    return optimizer_of(model)


def share_layer(model: Net, optimizer: nnx.Optimizer) -> nnx.Optimizer:
    model.layers[2] = model.layers[0]
    return optimizer_of(model)


def share_variable(model: Net, optimizer: nnx.Optimizer) -> nnx.Optimizer:
    model.layers[2].kernel = model.layers[0].kernel
    return optimizer_of(model)


class Frozen(nnx.Variable):
    pass


def freeze_layer(model: Net, optimizer: nnx.Optimizer) -> nnx.Optimizer:
    model.layers[0].kernel = Frozen(model.layers[0].kernel.get_raw_value())
    return optimizer_of(model)


def freeze_by_metadata(model: Net, optimizer: nnx.Optimizer) -> nnx.Optimizer:
    model.layers[0].kernel.set_metadata(is_frozen=True)
    return optimizer_of(model, is_trained)


def is_trained(path: Any, x: Any) -> bool:
    return isinstance(x, nnx.Param) and not x.get_metadata().get("is_frozen", False)


def change_filter(model: Net, optimizer: nnx.Optimizer) -> nnx.Optimizer:
    return optimizer_of(model, nnx.All(nnx.Param, nnx.PathContains("bias")))


def update(model: Net, optimizer: nnx.Optimizer) -> None:
    nnx.update(model, jax.tree.map(lambda x: x / 2, nnx.state(model, nnx.Param)))


def load(model: Net, optimizer: nnx.Optimizer) -> None:
    other = Net(3)
    both = other, optimizer_of(other)
    other.dropout.deterministic = model.dropout.deterministic
    nnx.update((model, optimizer), nnx.state(both))


def replace_variable_in_dict(model: Net, optimizer: nnx.Optimizer) -> None:
    model.sizes["scale"] = nnx.Variable(jnp.full((), 3.0))


def evaluate(model: Net, optimizer: nnx.Optimizer) -> None:
    model.eval()


CHANGES = [
    replace_layer,
    add_layer,
    share_layer,
    share_variable,
    freeze_layer,
    freeze_by_metadata,
    change_filter,
    update,
    load,
    replace_variable_in_dict,
    evaluate,
]


def expected(model: Net, wrt: Any) -> Any:
    """The parameters after one window, by plain Flax and JAX."""
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def mean(params: Any, rows: Any) -> jax.Array:
        loss, count = loss_fn(nnx.merge(graphdef, params, rest), rows)
        return loss / count

    def after(gradient: Any) -> Any:
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    exact = after(jax.grad(mean)(params, np.concatenate(X)))
    means = [jax.grad(mean)(params, x) for x in X]
    naive = after(jax.tree.map(lambda *g: sum(g) / len(X), *means))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(naive, exact, rtol=1e-5)
    return exact


def values(model: Net, kind: Any) -> Any:
    arrays = nnx.to_flat_state(nnx.state(model, nnx.All(kind, nnx.Not(nnx.RngState))))
    return {path: np.array(x.get_raw_value()) for path, x in arrays}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_graph_is_trained_as_it_is(
    change: Callable[[Net, nnx.Optimizer], nnx.Optimizer | None],
):
    model, step = Net(), make_train_step(loss_fn)
    if change is not evaluate:
        model.eval()
    optimizer = optimizer_of(model)
    for x in X * 2:  # the second window is of a graph that the step knows
        step(model, optimizer, x)
    optimizer = change(model, optimizer) or optimizer
    want = expected(model, optimizer.wrt)
    kept = values(model, nnx.Not(optimizer.wrt))
    for x in X:
        step(model, optimizer, x)
    chex.assert_trees_all_close(nnx.state(model, optimizer.wrt), want, rtol=1e-5)
    chex.assert_trees_all_equal(values(model, nnx.Not(optimizer.wrt)), kept)


def test_a_window_step_sees_another_variable_of_its_optimizer():
    model, step = Net(), make_window_step(loss_fn)
    model.eval()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)
    window = np.stack([X[1], X[1] ** 3])
    for _ in range(2):
        step(model, optimizer, window)
    trace = optimizer.opt_state[0].trace["layers"][0]
    old = trace["kernel"]
    trace["kernel"] = nnx.Variable(jnp.zeros((WIDTH, WIDTH)))
    before, last = np.array(model.layers[0].kernel[...]), np.array(old[...])
    step(model, optimizer, window)
    moved = before - model.layers[0].kernel[...]  # without the momentum so far
    np.testing.assert_allclose(moved, RATE * trace["kernel"][...], atol=1e-6)
    assert np.abs(last).max() > 1e-3
    np.testing.assert_array_equal(old[...], last)


def test_a_known_graph_is_not_split_again(monkeypatch: pytest.MonkeyPatch):
    model, step = Net(), make_train_step(loss_fn)
    optimizer = optimizer_of(model)
    for x in X:
        step(model, optimizer, x)
    monkeypatch.setattr(nnx, "split", None)
    for x in X:
        step(model, optimizer, x)
    model.eval()
    with pytest.raises(TypeError, match="NoneType"):
        step(model, optimizer, X[0])


def test_an_entry_with_another_name_is_seen():
    model, step = Net(), make_train_step(loss_fn)
    optimizer = optimizer_of(model)
    for x in X:
        step(model, optimizer, x)
    model.sizes["other"] = model.sizes.pop("scale")
    with pytest.raises(KeyError, match="scale"):  # which the model reads
        step(model, optimizer, X[0])


def test_a_step_does_not_keep_a_model_alive():
    model, step = Net(), make_train_step(loss_fn)
    optimizer = optimizer_of(model)
    for x in X:
        step(model, optimizer, x)
    alive = [weakref.ref(model), weakref.ref(model.layers[0].kernel[...])]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
