"""Checkpoints in the middle of a window, of every kind of state.

`python tests/checkpoints/kinds.py DIRECTORY` writes them with the installed version of
the library. Each directory was written by the version of its name.
"""

import functools
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
WINDOWED = token_accumulation(ADAM, K)
INIT = np.arange(6.0, dtype=np.float32).reshape(2, 3) / 10


def batch_of(i: int) -> dict[str, Any]:
    """One row for each device; some rows have a token."""
    rng = np.random.default_rng(i)
    mask = np.arange(8) < [1, 4, 2, 3][i]
    return {"x": rng.normal(size=(8, 2)).astype(np.float32), "mask": mask}


def window_of(i: int) -> Any:
    """The window that the micro-batch ends, if it ends one."""
    if i % K != K - 1:
        return None
    return jax.tree.map(lambda *xs: np.stack(xs), batch_of(i - 1), batch_of(i))


def loss_fn(params: Any, batch: Any) -> Any:
    losses = jnp.sum((batch["x"] @ params["w"] - 1) ** 2, -1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def in_plain_jax(w: Any) -> jax.Array:
    """The weights after all windows, each of which is one batch here."""
    state = ADAM.init(w)
    for i in range(0, STEPS, K):
        pair = batch_of(i), batch_of(i + 1)
        batch = jax.tree.map(lambda *xs: np.concatenate(xs), *pair)
        grads, n = jax.grad(loss_fn, has_aux=True)({"w": w}, batch)
        updates, state = ADAM.update(grads["w"] / n, state, w)
        w = optax.apply_updates(w, updates)
    return w


gradient_of = jax.jit(jax.grad(loss_fn, has_aux=True))


class Kind(NamedTuple):
    """A way to train; every state is a tree of arrays."""

    init: Callable[[], Any]
    add: Callable[[Any, int], Any]  # (state, index of the micro-batch) -> state
    weights: Callable[[Any], Any]


def of_step(step: Any, batch_of: Any = batch_of, w: Any = INIT) -> Kind:
    """A window step is saved between windows, here after the first."""

    def add(state: Any, i: int) -> Any:
        batch = batch_of(i)
        return state if batch is None else step(state, batch)[0]

    return Kind(
        lambda: step.init({"w": jnp.asarray(w)}), add, lambda state: state.params["w"]
    )


def train_step(w: Any = INIT, **options: Any) -> Kind:
    return of_step(make_train_step(loss_fn, ADAM, K, **options), w=w)


def over_8(*spec: str | None, **options: Any) -> Kind:
    """A train step on 8 devices, of which each has a part of sharded parameters."""

    @functools.cache
    def kind() -> Kind:
        mesh, w = jax.sharding.Mesh(jax.devices(), "data"), INIT
        if spec:
            w = np.arange(16.0, dtype=np.float32).reshape(2, 8) / 10
            w = jax.device_put(w, NamedSharding(mesh, P(*spec)))
        return train_step(w, mesh=mesh, data_axes="data", **options)

    return Kind(
        lambda: kind().init(),
        lambda state, i: kind().add(state, i),
        lambda state: state.params["w"],
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
        params = {"w": jnp.asarray(INIT)}
        return TrainState.create(apply_fn=None, params=params, tx=WINDOWED)

    def add(state: Any, i: int) -> Any:
        grads, n = gradient_of(state.params, batch_of(i))
        return state.apply_gradients(grads=grads, num_tokens=n)

    return Kind(init, add, lambda state: state.params["w"])


class Model(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(INIT))

    def __call__(self, x: Any) -> jax.Array:
        return x @ self.w[...]


class DropoutModel(Model):
    """With batch statistics, and random streams, which no `rng` decides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> jax.Array:
        return self.dropout(self.norm(super().__call__(x)))


def nnx_kind(
    model: Any, tx: Any, init: Callable[..., None], add: Callable[[Any, int], None]
) -> Kind:
    """A model and its optimizer, to which `add` adds a micro-batch."""

    def whole(state: Any = None) -> Any:
        made = model()
        both = made, nnx.Optimizer(made, tx, wrt=nnx.Param)
        init(*both) if state is None else nnx.update(both, state)
        return both

    def after(state: Any, i: int) -> Any:
        both = whole(state)
        add(both, i)
        return nnx.state(both)

    return Kind(lambda: nnx.state(whole()), after, lambda state: state[0]["w"][...])


def nnx_transformation() -> Kind:  # saved as a dictionary
    def add(both: Any, i: int) -> None:
        model, optimizer = both
        grads, n = gradient_of({"w": model.w[...]}, batch_of(i))
        of_model = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(of_model, grads)
        optimizer.update(model, of_model, num_tokens=n)

    kind = nnx_kind(Model, WINDOWED, lambda *both: None, add)
    return Kind(
        lambda: nnx.to_pure_dict(kind.init()),
        lambda state, i: nnx.to_pure_dict(kind.add(state, i)),
        kind.weights,
    )


def nnx_step(make: Any, tx: Any, batch_of: Any) -> Kind:
    def model_loss_fn(model: Any, batch: Any) -> Any:
        losses = jnp.sum((model(batch["x"]) - 1) ** 2, -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    step = make(model_loss_fn)

    def add(both: Any, i: int) -> None:
        batch = batch_of(i)
        if batch is not None:
            step(*both, batch)

    return nnx_kind(DropoutModel, tx, step.init, add)


KINDS: dict[str, Kind] = {
    "train_step": train_step(),
    "train_step_that_skips": train_step(should_skip_update_fn=optax.skip_not_finite),
    # Sums of shape `[8, 2, 3]`, of which some are zeros.
    "train_step_on_8_devices": over_8(),
    "train_step_fsdp": over_8(None, "data", reduce_every="micro_batch"),
    "window_step": of_step(make_window_step(loss_fn, ADAM), window_of),
    "transformation": transformation(optax.chain(optax.scale(2.0), WINDOWED)),
    "multi_steps": transformation(MultiSteps(ADAM, K, gradients="sum")),
    "linen": linen(),
    "nnx": nnx_transformation(),
    "nnx_train_step": nnx_step(nnx_steps.make_train_step, WINDOWED, batch_of),
    "nnx_window_step": nnx_step(nnx_steps.make_window_step, ADAM, window_of),
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
