"""The memory of the programs of every way.

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


def _peaks(workload: Workload, way: str, k: int) -> dict[str, int]:
    """The peak of every program of a way."""
    loop = WAYS[way].build(workload, ADAMW, k)
    state = jax.eval_shape(loop.init, workload.params)
    programs = loop.lower(state, window_of(workload, k))
    return {name: program.peak() for name, program in programs.items()}
