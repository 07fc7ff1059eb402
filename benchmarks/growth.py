"""How time, memory and tracing grow with k, with parameters, and with leaves."""

import time
from collections.abc import Iterator
from typing import Any

import optax

from benchmarks.loops import size_in_bytes
from benchmarks.measure import interleaved, net_memory, ratios
from benchmarks.settings import Settings
from benchmarks.speed import BASE, CONTENDERS, Running
from benchmarks.workloads import Workload, many_leaves, square_layers, window_of

SHOWN = (BASE, "optax.MultiSteps", "token_accumulation", "train step", "window step")
K = 8
TRACED_ALONE = (10_000,)  # compiling this many leaves takes minutes, with every way


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every point on the three axes and every contender."""
    rows = []
    for axis, value, k, workload in _points(settings):
        settings.say(f"growth with {axis}: {value}")
        running, traces, net_bytes = {}, {}, {}
        for name in SHOWN:
            loop = CONTENDERS[name].build(workload, optax.adamw(1e-4), k)
            window = window_of(workload, k)
            began = time.perf_counter()
            lowered = loop.lower(loop.state, window)
            traces[name] = time.perf_counter() - began
            if value in TRACED_ALONE:
                continue
            memory = [net_memory(x.lowered.compile()) for x in lowered.values()]
            net_bytes[name] = max(memory)
            running[name] = Running(loop, window)
        over_base = {}
        if running:
            rounds, seconds = min(settings.rounds, 9), settings.seconds / 2
            times = interleaved(running, rounds=rounds, seconds=seconds)
            over_base = ratios(times, BASE)
        params = size_in_bytes(workload.params)
        for name in SHOWN:
            rows.append(
                {
                    "axis": axis,
                    "value": value,
                    "contender": name,
                    "time": over_base.get(name),
                    "net memory / parameters": net_bytes[name] / params
                    if name in net_bytes
                    else None,
                    "trace": traces[name] / traces[BASE],
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
