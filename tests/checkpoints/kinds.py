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
from jax.flatten_util import ravel_pytree

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


def window_of(i: int) -> Any:
    """The window that the micro-batch ends, if it ends one."""
    if i % K != K - 1:
        return None
    return jax.tree.map(lambda *xs: np.stack(xs), batch_of(i - 1), batch_of(i))


def of_step(
    step: Any,
    batch_of: Callable[[int], Any] = batch_of,
    params: Any = lambda: {"w": jnp.asarray(INIT)},
    weights: Any = lambda state: state.params["w"],
) -> Kind:
    """A window step is saved between windows, here after the first."""

    def add(state: Any, i: int) -> Any:
        batch = batch_of(i)
        return state if batch is None else step(state, batch)[0]

    return Kind(lambda: step.init(params()), add, weights)


def train_step(batch_of: Any = batch_of, **options: Any) -> Kind:
    return of_step(make_train_step(loss_fn, ADAM, K, **options), batch_of)


def train_step_in_fp8() -> Kind:
    """Has a collection that is overwritten: its sums are maxima."""
    dense = nn.Dense(16, dot_general_cls=lambda: Fp8DirectDotGeneralOp(4))

    def wide(i: int) -> Any:
        return batch_of(i) | {"x": np.tile(batch_of(i)["x"], 8)}

    def fp8_loss_fn(params: Any, batch: Any) -> Any:
        losses = jnp.sum(dense.apply(params, batch["x"]), -1)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    return of_step(
        make_train_step(fp8_loss_fn, optax.sgd(0.1, momentum=0.9), K),
        wide,
        lambda: dense.init(jax.random.key(0), wide(0)["x"]),
        lambda state: ravel_pytree(state.params)[0],
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


class DropoutModel(nnx.Module):
    """With batch statistics, and random streams, which no `rng` decides."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


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

    return Kind(
        lambda: nnx.state(whole()),
        after,
        lambda state: state[0]["linear"]["kernel"][...],
    )


def nnx_transformation() -> Kind:
    """Saved as a dictionary."""

    def add(both: Any, i: int) -> None:
        model, optimizer = both
        grads, n = gradient_of({"w": model.w[...]}, batch_of(i))
        of_model = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(of_model, grads)
        optimizer.update(model, of_model, num_tokens=n)

    kind = nnx_kind(Model, token_accumulation(ADAM, K), lambda *both: None, add)
    return Kind(
        lambda: nnx.to_pure_dict(kind.init()),
        lambda state, i: nnx.to_pure_dict(kind.add(state, i)),
        lambda state: state[0]["w"],
    )


def nnx_step(make: Any, tx: Any, batch_of: Callable[[int], Any]) -> Kind:
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
    "train_step_with_noise": train_step(),  # of 0.2.0, which kept it in the state
    "train_step_in_fp8": train_step_in_fp8(),
    # Sums of shape `[8, 2, 3]`, of which some are zeros.
    "train_step_on_8_devices": train_step(
        lambda i: batch_of(i, rows=8),
        mesh=jax.sharding.Mesh(jax.devices(), "data"),
        data_axes="data",
    ),
    "window_step": of_step(make_window_step(loss_fn, ADAM), window_of),
    "transformation": transformation(
        optax.chain(optax.scale(2.0), token_accumulation(ADAM, K))
    ),
    "multi_steps": transformation(MultiSteps(ADAM, K, gradients="sum")),
    "linen": linen(),
    "nnx": nnx_transformation(),
    "nnx_train_step": nnx_step(
        nnx_steps.make_train_step, token_accumulation(ADAM, K), batch_of
    ),
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
        names = sys.argv[2:] or KINDS
        written = {name: saved_and_end(KINDS[name]) for name in names}
        checkpointer.save(Path(sys.argv[1]).absolute(), written)
