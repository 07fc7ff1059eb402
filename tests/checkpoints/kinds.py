"""Checkpoints in the middle of a window, of every kind of state.

`python tests/checkpoints/kinds.py DIRECTORY` writes them with the installed version of
the library; names of kinds may follow. Each directory was written by the version of its
name, on jax 0.10.2. `v0.2.0_more` has the kinds that `v0.2.0` lacks.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

from optax_tokenaccum import (
    MultiSteps,
    make_train_step,
    make_window_step,
    token_accumulation,
)
from optax_tokenaccum import nnx as nnx_steps
from optax_tokenaccum.linen import TrainState

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

K, SAVED, STEPS = 2, 3, 4  # the second window of two micro-batches is open
ADAM = optax.adam(0.1)
INIT = np.arange(6.0, dtype=np.float32).reshape(2, 3) / 10


def batch_of(i: int, rows: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    mask = np.arange(rows) < [1, 4, 2, 3][i]
    return {"x": rng.normal(size=(rows, 2)).astype(np.float32), "mask": mask}


def loss_fn(params: Any, batch: Any) -> Any:
    losses = jnp.sum((batch["x"] @ params["w"] - 1) ** 2, -1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


gradient_of = jax.jit(jax.grad(loss_fn, has_aux=True))


class Kind(NamedTuple):
    """A way to train; every state is a tree of arrays."""

    init: Callable[[], Any]
    add: Callable[[Any, int], Any]  # (state, index of the micro-batch) -> state
    weights: Callable[[Any], Any]


def train_step(**options: Any) -> Kind:
    step = make_train_step(loss_fn, ADAM, K, **options)
    return Kind(
        lambda: step.init({"w": jnp.asarray(INIT)}),
        lambda state, i: step(state, batch_of(i))[0],
        lambda state: state.params["w"],
    )


def window_step() -> Kind:
    """Saved between windows, here after the first."""
    step = make_window_step(loss_fn, ADAM)

    def add(state: Any, i: int) -> Any:
        if i % K == 0:
            return state
        window = jax.tree.map(lambda *xs: np.stack(xs), batch_of(i - 1), batch_of(i))
        return step(state, window)[0]

    init = train_step().init().params
    return Kind(lambda: step.init(init), add, lambda state: state.params["w"])


def train_step_on_8_devices() -> Kind:
    """Sums of shape `[8, 2, 3]`, of which some are zeros."""
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    options: Any = {"mesh": mesh, "data_axes": "data"}
    step = make_train_step(loss_fn, ADAM, K, **options)
    return Kind(
        lambda: step.init({"w": jnp.asarray(INIT)}),
        lambda state, i: step(state, batch_of(i, rows=8))[0],
        lambda state: state.params["w"],
    )


def train_step_in_fp8() -> Kind:
    """Has a collection that is overwritten: its sums are maxima."""
    dense = nn.Dense(16, dot_general_cls=lambda: Fp8DirectDotGeneralOp(4))

    def inputs_of(i: int) -> Any:
        return np.tile(batch_of(i)["x"], 8)

    def fp8_loss_fn(params: Any, batch: Any) -> Any:
        losses = jnp.sum(dense.apply(params, batch["x"]), -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    step = make_train_step(fp8_loss_fn, optax.sgd(0.1, momentum=0.9), K)
    return Kind(
        lambda: step.init(dense.init(jax.random.key(0), inputs_of(0))),
        lambda state, i: step(state, batch_of(i) | {"x": inputs_of(i)})[0],
        lambda state: jnp.concatenate(
            [*map(jnp.ravel, jax.tree.leaves(state.params))],
        ),
    )


def transformation(tx: Any) -> Kind:
    def init() -> Any:
        params = {"w": jnp.asarray(INIT)}
        return {"params": params, "opt_state": tx.init(params)}

    def add(state: Any, i: int) -> Any:
        params = state["params"]
        grads, n = gradient_of(params, batch_of(i))
        updates, opt_state = tx.update(grads, state["opt_state"], params, num_tokens=n)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}

    return Kind(init, add, lambda state: state["params"]["w"])


def linen() -> Kind:
    def init() -> Any:
        params, tx = {"w": jnp.asarray(INIT)}, token_accumulation(ADAM, K)
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def add(state: Any, i: int) -> Any:
        grads, n = gradient_of(state.params, batch_of(i))
        return state.apply_gradients(grads=grads, num_tokens=n)

    return Kind(init, add, lambda state: state.params["w"])


class Model(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(INIT))


def of_nnx() -> Kind:
    tx = token_accumulation(ADAM, K)

    def whole() -> Any:
        model = Model()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    graph, _ = nnx.split(whole())

    def add(state: Any, i: int) -> Any:
        both = whole()
        nnx.update(both, state)
        model, optimizer = nnx.merge(graph, nnx.state(both))
        grads, n = gradient_of({"w": model.w[...]}, batch_of(i))
        of_model = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(of_model, grads)
        optimizer.update(model, of_model, num_tokens=n)
        return nnx.to_pure_dict(nnx.state((model, optimizer)))

    return Kind(lambda: nnx.to_pure_dict(nnx.state(whole())), add, lambda s: s[0]["w"])


class DropoutModel(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def nnx_step(step: Any, tx: Any, add: Callable[[Any, Any, int], None]) -> Kind:
    """A model with batch statistics and random streams, which no `rng` decides."""

    def whole() -> Any:
        model = DropoutModel()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def init() -> Any:
        both = whole()
        step.init(*both)
        return nnx.state(both)

    def after(state: Any, i: int) -> Any:
        both = whole()
        nnx.update(both, state)
        add(step, both, i)
        return nnx.state(both)

    return Kind(init, after, lambda state: state[0]["linear"]["kernel"][...])


def model_loss_fn(model: Any, batch: Any) -> Any:
    losses = jnp.sum((model(batch["x"]) - 1) ** 2, -1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def nnx_train_step() -> Kind:
    def add(step: Any, both: Any, i: int) -> None:
        step(*both, batch_of(i))

    step = nnx_steps.make_train_step(model_loss_fn)
    return nnx_step(step, token_accumulation(ADAM, K), add)


def nnx_window_step() -> Kind:
    """Saved between windows, here after the first."""

    def add(step: Any, both: Any, i: int) -> None:
        if i % K:
            batches = batch_of(i - 1), batch_of(i)
            step(*both, jax.tree.map(lambda *xs: np.stack(xs), *batches))

    return nnx_step(nnx_steps.make_window_step(model_loss_fn), ADAM, add)


KINDS: dict[str, Kind] = {
    "train_step": train_step(),
    "train_step_that_skips": train_step(should_skip_update_fn=optax.skip_not_finite),
    "train_step_with_noise": train_step(gradient_noise=True),
    "train_step_in_fp8": train_step_in_fp8(),
    "train_step_on_8_devices": train_step_on_8_devices(),
    "window_step": window_step(),
    "transformation": transformation(
        optax.chain(optax.scale(2.0), token_accumulation(ADAM, K))
    ),
    "multi_steps": transformation(MultiSteps(ADAM, K, gradients="sum")),
    "linen": linen(),
    "nnx": of_nnx(),
    "nnx_train_step": nnx_train_step(),
    "nnx_window_step": nnx_window_step(),
}


def after(kind: Kind, state: Any, micro_batches: range) -> Any:
    for i in micro_batches:
        state = kind.add(state, i)
    return state


def saved_and_end(kind: Kind) -> dict[str, Any]:
    """The state in the open window, and the weights after it."""
    state = after(kind, kind.init(), range(SAVED))
    saved = jax.tree.map(jnp.copy, state)  # the next call donates the state
    end = kind.weights(after(kind, state, range(SAVED, STEPS)))
    return {"state": saved, "end": end}


if __name__ == "__main__":
    with ocp.StandardCheckpointer() as checkpointer:
        names = sys.argv[2:] or KINDS
        written = {name: saved_and_end(KINDS[name]) for name in names}
        checkpointer.save(Path(sys.argv[1]).absolute(), written)
