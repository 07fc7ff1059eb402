"""`window_value_and_grad` against a scan written by hand, on the same work.

    python benchmarks/window.py

Prints ratios of pairs measured in turn in one process, never a time, and the temporary
memory of the two programs. Above 1 ours costs more.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum import window_value_and_grad

ROUNDS, WARM_UP = 30, 5


def main() -> None:
    """Runs every case and prints a line for each."""
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'case':28} {'ratio':>6} {'min':>6} {'max':>6}   temporary MB")
    for width, rows in ((512, 4), (512, 64), (1024, 4)):
        for k in (1, 8, 32):
            params, micro_batches = problem(width, rows, k)
            programs = [
                jax.jit(f).lower(params, micro_batches).compile()
                for f in (window_value_and_grad(loss_fn), by_hand)
            ]
            ratios = interleaved_ratios(programs, params, micro_batches)
            ours, theirs = map(temporary_megabytes, programs)
            print(
                f"{f'width {width}, {rows} rows, k = {k}':28} "
                f"{statistics.median(ratios):6.2f} {min(ratios):6.2f} "
                f"{max(ratios):6.2f}   {ours:.2f} against {theirs:.2f}"
            )


def problem(width: int, rows: int, k: int) -> tuple[Any, jax.Array]:
    """Six square layers, and `k` micro-batches of `rows` rows."""
    keys = jax.random.split(jax.random.key(0), 7)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:6]]
    return params, jax.random.normal(keys[6], (k, rows, width))


def loss_fn(params: Any, batch: jax.Array) -> tuple[jax.Array, int]:
    """A summed loss and its count."""
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.sum(batch**2), len(batch)


def by_hand(params: Any, micro_batches: jax.Array) -> Any:
    """What people write: sums in a scan, a division behind it."""

    def body(sums: Any, batch: jax.Array) -> tuple[Any, None]:
        (loss_sum, n), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return jax.tree.map(jnp.add, sums, (loss_sum, n, grads)), None

    start = (0.0, 0, jax.tree.map(jnp.zeros_like, params))
    (loss_sum, n, grads), _ = jax.lax.scan(body, start, micro_batches)
    return (loss_sum / n, n), jax.tree.map(lambda g: g / n, grads)


def temporary_megabytes(program: jax.stages.Compiled) -> float:
    """What the program allocates beside arguments and results; NaN where unknown."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes / 1e6 if memory else float("nan")


def interleaved_ratios(programs: list[Any], *arguments: Any) -> list[float]:
    """The time of the first program over that of the second, pair by pair."""
    ratios = []
    for turn in range(WARM_UP + ROUNDS):
        times = {}
        for index in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            jax.block_until_ready(programs[index](*arguments))
            times[index] = time.perf_counter() - start
        if turn >= WARM_UP:
            ratios.append(times[0] / times[1])
    return ratios


if __name__ == "__main__":
    main()
