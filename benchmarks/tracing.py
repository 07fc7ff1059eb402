"""The time to trace and lower a step, over that of a scan by hand."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measure import interleaved, ratios, say
from benchmarks.report import Rows
from benchmarks.ways import ADAMW, WAYS
from benchmarks.workloads import Workload, stacked_layers, window_of

WAYS_TO_TRACE, K = ("scan by hand", "window step", "train step"), 2
MODELS = {
    "24 unrolled layers": partial(stacked_layers, 64, 24, length=8, scanned=False),
    "24 stacked layers": partial(stacked_layers, 64, 24, length=8),
}


def run(quick: bool) -> Rows:
    """Returns a row for every model and way; nothing is compiled."""
    rows: Rows = []
    for name, make in MODELS.items():
        say(f"trace: {name}")
        rounds = 1 if quick else 15
        over = ratios(measured(make, rounds), WAYS_TO_TRACE[0])
        rows += [{"model": name, "way": x, "time to trace": over[x]} for x in over]
    return rows


def measured(make: Callable[[], Workload], rounds: int) -> dict[str, list[float]]:
    given: dict[str, Any] = {}

    def prepare(way: str) -> None:
        workload = make()  # whose loss is new, so that JAX has not traced it
        loop = WAYS[way].build(workload, ADAMW, K)
        given[way] = loop, loop.init(workload.params), window_of(workload, K)
        gc.collect()

    def lower(way: str) -> None:
        loop, state, window = given[way]
        gc.disable()  # as `timeit` does: it would stop any of the ways
        loop.lower(state, window)
        gc.enable()

    runs = {way: partial(lower, way) for way in WAYS_TO_TRACE}
    return interleaved(runs, rounds=rounds, seconds=60, prepare=prepare)
