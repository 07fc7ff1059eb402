"""A loop with `nnx.make_train_step`, and the model that it trains."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import optax_tokenaccum.nnx
from benchmarks.ways import Loop, Optimizer
from benchmarks.workloads import Workload


class Holder(nnx.Module):
    """A model that is a tree of parameters and nothing else."""

    def __init__(self, params: Any):
        leaves, self.structure = jax.tree.flatten(params)
        self.leaves = nnx.List([nnx.Param(jnp.copy(x)) for x in leaves])

    def params(self) -> Any:
        return jax.tree.unflatten(self.structure, [x[...] for x in self.leaves])


def nnx_train_step(workload: Workload, inner: Optimizer, k: int) -> Loop:
    """`nnx.make_train_step`, like the loops of `benchmarks.ways`."""

    def loss_fn(model: Holder, batch: Any) -> Any:
        return workload.loss_fn(model.params(), batch, workload.frozen)

    step = optax_tokenaccum.nnx.make_train_step(loss_fn)
    tx = optax_tokenaccum.token_accumulation(inner, k)
    made: list[Any] = []

    def init(params: Any) -> Any:
        if not made:  # the first call of a new model takes longer
            model = Holder(params)
            made.append((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
        return made[0][0].params(), *made[0]

    def run(state: Any, window: Any) -> Any:
        _, model, optimizer = state
        for batch in window.micro_batches:
            step(model, optimizer, batch)
        return model.params(), model, optimizer

    return Loop(init, run)
