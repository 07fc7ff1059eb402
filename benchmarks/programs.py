"""The memory of the programs of every way, and how it grows with k.

The peak of a program leaves out parameters, optimizer state and batch: temporaries +
outputs - aliased outputs + gradients and sums of them among the arguments. It is
divided by the peak of gradients alone, which return a gradient and have no sums.
"""

from typing import Any

import jax

from benchmarks.settings import ADAMW, Settings
from benchmarks.ways import WAYS
from benchmarks.workloads import Workload, window_of

BASE = "gradients alone"
GROWN = (
    BASE,
    "optax.MultiSteps",
    "optax.microbatching",
    "scan by hand",
    "train step",
    "window step",
)


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every workload and way, with all its programs."""
    rows = []
    for name, make in settings.workloads.items():
        settings.say(f"programs of {name}")
        workload = make()
        peaks = {way: _peaks(workload, way, settings.k) for way in WAYS}
        (least,) = peaks[BASE].values()
        rows += [
            {
                "workload": name,
                "way": way,
                "peak / gradients alone": {x: own[x] / least for x in own},
            }
            for way, own in peaks.items()
        ]
    return rows


def run_growing(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every k and way: the highest peak of its programs."""
    name = "stacked"
    workload = settings.workloads[name]()
    rows = []
    for k in settings.memory_ks:
        settings.say(f"memory of {name}, k = {k}")
        peaks = {way: max(_peaks(workload, way, k).values()) for way in GROWN}
        rows += [
            {
                "workload": name,
                "k": k,
                "way": way,
                "peak MB": round(peak / 1e6, 1),
                "peak / gradients alone": peak / peaks[BASE],
            }
            for way, peak in peaks.items()
        ]
    return rows


def _peaks(workload: Workload, way: str, k: int) -> dict[str, int]:
    """The peak of every program of a way."""
    loop = WAYS[way].build(workload, ADAMW, k)
    state = jax.eval_shape(loop.init, workload.params)
    programs = loop.lower(state, window_of(workload, k))
    return {name: program.peak() for name, program in programs.items()}
