"""Checkpoints in the middle of a window, of every kind of state.

`python tests/checkpoints/kinds.py DIRECTORY` writes them with the installed version of
the library. Each directory was written by the version of its name, on jax 0.10.2.
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
from flax import nnx

from optax_tokenaccum import (
    MultiSteps,
    make_train_step,
    make_window_step,
    token_accumulation,
)
from optax_tokenaccum.linen import TrainState

K, SAVED, STEPS = 2, 3, 4  # the second window of two micro-batches is open
ADAM = optax.adam(0.1)
INIT = np.arange(6.0, dtype=np.float32).reshape(2, 3) / 10


def batch_of(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    mask = np.arange(4) < [1, 4, 2, 3][i]
    return {"x": rng.normal(size=(4, 2)).astype(np.float32), "mask": mask}


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


KINDS: dict[str, Kind] = {
    "train_step": train_step(),
    "train_step_that_skips": train_step(should_skip_update_fn=optax.skip_not_finite),
    "window_step": window_step(),
    "transformation": transformation(
        optax.chain(optax.scale(2.0), token_accumulation(ADAM, K))
    ),
    "multi_steps": transformation(MultiSteps(ADAM, K, gradients="sum")),
    "linen": linen(),
    "nnx": of_nnx(),
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
        written = {name: saved_and_end(kind) for name, kind in KINDS.items()}
        checkpointer.save(Path(sys.argv[1]).absolute(), written)
