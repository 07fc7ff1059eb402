"""The memory, the tracing and compile times, and the number of the programs.

The peak of a program leaves out parameters, optimizer state and batch: temporaries +
outputs - aliased outputs + gradients and sums of them among the arguments. It is
divided by the peak of gradients alone, which return a gradient and have no sums.
"""

import time
from typing import Any

import jax
import jax.monitoring
import optax

from benchmarks.measure import net_memory, spread
from benchmarks.settings import Settings
from benchmarks.speed import CONTENDERS
from benchmarks.workloads import Workload, square_layers, window_of

K, WINDOWS = 8, 20
BASE = "gradients alone"


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every workload and contender, with all its programs."""
    small = square_layers(16, 1)
    compilations = {name: _compilations(small, name) for name in CONTENDERS}
    rows = []
    for name, make in settings.workloads.items():
        settings.say(f"programs of {name}")
        workload = make()
        built = [_build_all(workload) for _ in range(min(settings.rounds, 2))]
        for contender in built[0]:
            if not built[0][contender]["programs"]:
                continue
            rows.append(
                {
                    "workload": name,
                    "contender": contender,
                    "net MB": {
                        program: round(size / 1e6, 1)
                        for program, size in built[0][contender]["programs"].items()
                    },
                    "peak / gradients alone": {
                        program: peak / _highest_peak(built[0][BASE])
                        for program, peak in built[0][contender]["peaks"].items()
                    },
                    "trace": _over_base(built, contender, "trace"),
                    "compile": _over_base(built, contender, "compile"),
                    "compilations": compilations[contender],
                }
            )
    return rows


def _build_all(workload: Workload) -> dict[str, dict[str, Any]]:
    """Lowers and compiles every program of every contender, in turn."""
    window = window_of(workload, K)
    built = {}
    for name, contender in CONTENDERS.items():
        loop = contender.build(workload, optax.adamw(1e-4), K)
        began = time.perf_counter()
        lowered = loop.lower(loop.state, window)
        traced = time.perf_counter()
        compiled = {program: x.lowered.compile() for program, x in lowered.items()}
        built[name] = {
            "trace": traced - began,
            "compile": time.perf_counter() - traced,
            "programs": {program: net_memory(x) for program, x in compiled.items()},
            "peaks": {
                program: net_memory(x) + lowered[program].held
                for program, x in compiled.items()
            },
        }
    return built


def _highest_peak(programs: dict[str, Any]) -> float:
    return max(programs["peaks"].values())


def _over_base(built: list[Any], contender: str, what: str) -> Any:
    return spread([x[contender][what] / x[BASE][what] for x in built])


def _compilations(workload: Workload, contender: str) -> int:
    """Counts the programs that XLA compiles in 20 windows, including the first call."""
    window = window_of(workload, K)
    loop = CONTENDERS[contender].build(workload, optax.adamw(1e-4), K)
    state = jax.block_until_ready(loop.state)
    before = len(_seen)
    for _ in range(WINDOWS):
        state = loop.run(state, window)
    return len(_seen) - before


_seen: list[str] = []


def _listen(event: str, duration_secs: float, **metadata: Any) -> None:
    if "backend_compile" in event:
        _seen.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)
