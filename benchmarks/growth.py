"""How time, memory and tracing grow with k, with parameters, and with leaves."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import optax

from benchmarks.measure import interleaved, net_memory, ratios
from benchmarks.settings import Settings
from benchmarks.speed import BASE, CONTENDERS, Running
from benchmarks.workloads import Workload, many_leaves, square_layers, window_of

SHOWN = (BASE, "optax.MultiSteps", "token_accumulation", "train step", "window step")
K = 8


def run(settings: Settings) -> list[dict[str, Any]]:
    """A row for every point of the three lines and every contender."""
    rows = []
    for axis, value, k, workload in _points(settings):
        settings.say(f"growth with {axis}: {value}")
        running, costs = {}, {}
        for name in SHOWN:
            loop = CONTENDERS[name].build(workload, optax.adamw(1e-4), k)
            window = window_of(workload, k)
            began = time.perf_counter()
            lowered = loop.lower(loop.state, window)
            trace = time.perf_counter() - began
            memory = [net_memory(program.compile()) for program in lowered.values()]
            costs[name] = {"trace": trace, "net bytes": max(memory)}
            running[name] = Running(loop, window)
        times = interleaved(running, rounds=settings.rounds, seconds=settings.seconds)
        params = sum(x.nbytes for x in jax.tree.leaves(workload.params))
        for name, over_base in ratios(times, BASE).items():
            rows.append(
                {
                    "axis": axis,
                    "value": value,
                    "contender": name,
                    "time": over_base,
                    "net memory / parameters": costs[name]["net bytes"] / params,
                    "trace": costs[name]["trace"] / costs[BASE]["trace"],
                }
            )
    return rows


def _points(settings: Settings) -> Iterator[tuple[str, int, int, Workload]]:
    middle = settings.widths[len(settings.widths) // 2]
    for k in settings.ks:
        yield "k", k, k, square_layers(middle)
    for width in settings.widths:
        yield "parameters", 6 * width**2, K, square_layers(width)
    for leaves in settings.leaves:
        yield "leaves", leaves, K, many_leaves(leaves)
