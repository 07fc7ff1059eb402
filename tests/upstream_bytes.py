"""Prints the bytes that ways to accumulate hold on stacked layers, as compiled.

    python tests/upstream_bytes.py

Programs are compiled and never run. `--tpu` compiles for one chip of a TPU v5e and
needs no TPU, only `pip install libtpu`. The tables are those of `docs/upstream.md`; if
the installed optax has the patches of that page, their rows are printed too.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from optax.experimental import aggregating
from optax.microbatching import AccumulationType, Accumulator

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    memory,
    token_accumulation,
)
from optax_tokenaccum.microbatching import token_mean

K, ROWS, LAYERS, WIDTH = 4, 8, 12, 4096
INNER = optax.adamw(1e-3)
GRADIENT_BYTES = LAYERS * WIDTH * WIDTH * 4

# Otherwise libtpu asks the network what machine this is.
WITHOUT_A_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

Loop = optax.GradientTransformation | optax.MultiSteps
# A way's name, its programs, and whether it keeps sums between calls.
Row = tuple[str, list[jax.stages.Lowered], bool]


def loss_fn(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A residual network of stacked layers; rows of zeros are padding."""
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, params)
    return jnp.sum(x**2), jnp.sum(jnp.any(batch != 0, axis=1))


value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)


def under_a_cond() -> optax.GradientTransformation:
    """`optax.MultiSteps` with a `cond`, and with accumulators that are never zeroed."""

    def init(params):
        return jnp.int32(0), INNER.init(params), jnp.zeros_like(params)

    def update(updates, state, params=None):
        n, inner, acc = state
        acc = jnp.where(n == 0, updates, acc + (updates - acc) / (n + 1))
        updates, inner = jax.lax.cond(
            n == K - 1,
            lambda inner, acc: INNER.update(acc, inner, params),
            lambda inner, acc: (jnp.zeros_like(acc), inner),
            inner,
            acc,
        )
        return updates, ((n + 1) % K, inner, acc)

    return optax.GradientTransformation(init, update)


def rows(place: Callable[[Any], Any]) -> Iterator[Row]:
    """Lowers every way.

    Args:
      place: puts a tree of shapes on the device to compile for.

    Yields:
      One row for every way.
    """
    params, batch, whole, window = place(
        [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in (
                (LAYERS, WIDTH, WIDTH),
                (ROWS, WIDTH),
                (K * ROWS, WIDTH),
                (K, ROWS, WIDTH),
            )
        ]
    )

    def state_of(init: Callable[[Any], Any]) -> Any:
        return place(jax.eval_shape(init, params))

    def loop(optimizer: Loop, has_count: bool) -> list[jax.stages.Lowered]:
        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, batch):
            (_, n), grads = value_and_grad(params, batch)
            count = {"num_tokens": n} if has_count else {}
            updates, state = optimizer.update(grads, state, params, **count)
            return optax.apply_updates(params, updates), state

        return [step.lower(params, state_of(optimizer.init), batch)]

    def microbatch(
        accumulator: Accumulator | AccumulationType | tuple, divides: bool = False
    ) -> list[jax.stages.Lowered]:
        window_gradient = optax.microbatching.microbatch(
            value_and_grad, argnums=1, microbatch_size=ROWS, accumulator=accumulator
        )

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, whole):
            (_, n), grads = window_gradient(params, whole)
            if divides:
                grads = jax.tree.map(lambda g: g / n, grads)
            updates, state = INNER.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return [step.lower(params, state_of(INNER.init), whole)]

    averages = aggregating.average_incrementally_updates(None, K)
    aggregated = aggregating.process(optax.identity(), averages, INNER)
    mean = (AccumulationType.MEAN, AccumulationType.SUM), AccumulationType.MEAN
    train_step, window_step = (
        make_train_step(loss_fn, INNER, K),
        make_window_step(loss_fn, INNER),
    )
    state, window_state = state_of(train_step.init), state_of(window_step.init)
    two_programs = [
        train_step.accumulate.lower(state, batch),
        train_step.close_window.lower(state),
    ]

    yield "gradients alone", [jax.jit(value_and_grad).lower(params, batch)], False
    yield "`optax.MultiSteps`", loop(optax.MultiSteps(INNER, K), False), True
    yield "the same by hand, with a `cond`", loop(under_a_cond(), False), True
    yield "`optax.experimental.aggregating`", loop(aggregated, False), True
    if "num_tokens" in aggregating.AccumulateAvgUpdatesState._fields:
        yield "`aggregating`, `num_tokens` of patch 3", loop(aggregated, True), True
    yield "`token_accumulation`", loop(token_accumulation(INNER, K), True), True
    yield "`make_train_step`", two_programs, True
    yield "`optax.microbatch`, `MEAN`", microbatch(mean), False
    summed = microbatch(AccumulationType.SUM, divides=True)
    yield "`optax.microbatch`, `SUM`, divided by hand", summed, False
    yield "`optax.microbatch`, our `token_mean`", microbatch(token_mean()), False
    if hasattr(optax.microbatching, "token_mean"):
        patched = microbatch(optax.microbatching.token_mean())
        yield "`optax.microbatch`, `token_mean` of patch 2", patched, False
    yield "`make_window_step`", [window_step.lower(window_state, window)], False


def held(program: jax.stages.Lowered) -> int:
    """Temporary + output - aliased bytes, from `memory_analysis()`."""
    found = memory(program.compile())
    return found.temporaries + found.outputs - found.aliased


def main() -> None:
    """Prints the table in sizes of the gradient."""
    device, name = None, jax.default_backend()
    if "--tpu" in sys.argv[1:]:
        os.environ.update(WITHOUT_A_TPU)
        topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
        device = jax.sharding.SingleDeviceSharding(topology.devices[0])
        name = "compiled for a TPU v5e"

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree
        )

    print("| way | temporary + output - aliased | kept sums | together |")
    print("|---|---|---|---|")
    for way, programs, keeps_sums in rows(place):
        gradients = max(map(held, programs)) / GRADIENT_BYTES
        total = gradients + keeps_sums
        print(f"| {way} | {gradients:.2f} | {keeps_sums:d} | {total:.2f} |")
    print(f"\n(jax {jax.__version__}, optax {optax.__version__}, {name})")


if __name__ == "__main__":
    main()
