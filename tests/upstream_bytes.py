"""Prints the bytes that ways to accumulate hold on stacked layers, as compiled.

    python tests/upstream_bytes.py

Programs are compiled and never run. `--tpu` compiles for one chip of a TPU v5e and
needs no TPU, only `pip install libtpu`. `upstream/README.md` has what this prints; the
rows of its patches are printed if the optax that is imported has the patches.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from optax.experimental import aggregating
from optax.microbatching import AccumulationType, Accumulator

from optax_tokenaccum import make_window_step, memory, token_accumulation

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
# A way's name, how many sums it keeps between calls, and its program.
Row = tuple[str, int, jax.stages.Lowered]


def loss_fn(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A residual network of stacked layers; rows of zeros are padding."""
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, params)
    return jnp.sum(x**2), jnp.sum(jnp.any(batch != 0, axis=1))


value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)


def rows(device: jax.sharding.Sharding | None) -> Iterator[Row]:
    """Lowers every way for that device, or for the default one."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=device)

    def state_of(optimizer: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
            jax.eval_shape(optimizer.init, params),
        )

    params, batch = shape(LAYERS, WIDTH, WIDTH), shape(ROWS, WIDTH)

    def loop(optimizer: Loop, has_count: bool) -> jax.stages.Lowered:
        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, batch):
            (_, n), grads = value_and_grad(params, batch)
            count = {"num_tokens": n} if has_count else {}
            updates, state = optimizer.update(grads, state, params, **count)
            return optax.apply_updates(params, updates), state

        return step.lower(params, state_of(optimizer), batch)

    def microbatch(
        accumulator: Accumulator | AccumulationType, divides: bool = False
    ) -> jax.stages.Lowered:
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

        return step.lower(params, state_of(INNER), shape(K * ROWS, WIDTH))

    averages = aggregating.average_incrementally_updates(None, K)
    aggregated = aggregating.process(optax.identity(), averages, INNER)
    window_step = make_window_step(loss_fn, INNER)
    window = window_step.lower(state_of(window_step), shape(K, ROWS, WIDTH))

    yield "gradients alone", 0, jax.jit(value_and_grad).lower(params, batch)
    yield "`optax.MultiSteps`", 1, loop(optax.MultiSteps(INNER, K), False)
    yield "`token_accumulation`", 1, loop(token_accumulation(INNER, K), True)
    yield "`optax.experimental.aggregating`", 1, loop(aggregated, False)
    if "num_tokens" in aggregating.AccumulateAvgUpdatesState._fields:
        yield "`aggregating`, `num_tokens` of patch 3", 1, loop(aggregated, True)
    summed = microbatch(AccumulationType.SUM, divides=True)
    yield "`optax.microbatch`, `SUM`, divided by hand", 0, summed
    if hasattr(optax.microbatching, "token_mean"):
        patched = microbatch(optax.microbatching.token_mean())
        yield "`optax.microbatch`, `token_mean` of patch 2", 0, patched
    yield "`make_window_step`", 0, window


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
        name = "TPU v5e"
    print(f"| way | kept sums | {name} |")
    print("|---|---|---|")
    for way, sums, program in rows(device):
        print(f"| {way} | {sums} | {held(program) / GRADIENT_BYTES:.2f} |")
    print(f"\n(jax {jax.__version__}, optax {optax.__version__})")


if __name__ == "__main__":
    main()
