"""Times taken in turn in one process, and the ratios of pairs."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Spread(NamedTuple):
    """Median, least and greatest of what was measured in every round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warm_up: int = 2,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """The seconds of every run, round by round, each round in another order.

    What disturbs the machine for a while disturbs the neighbours in a round alike:
    so ratios are taken within rounds.

    Args:
      runs: what to time; what a run returns is waited for.
      rounds: how many at most.
      warm_up: rounds before, not counted.
      seconds: after these there are no more rounds, once there are five.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for turn in range(warm_up + rounds):
        if turn - warm_up >= 5 and time.perf_counter() - began > seconds:
            break
        start = turn % len(names)
        order = names[start:] + names[:start]
        for name in order if turn % 2 else order[::-1]:
            began_run = time.perf_counter()
            jax.block_until_ready(runs[name]())
            if turn >= warm_up:
                times[name].append(time.perf_counter() - began_run)
    return times


def ratios(times: dict[str, list[float]], over: str) -> dict[str, Spread]:
    """The time of each over that of one, pair by pair of a round."""
    return {
        name: spread([a / b for a, b in zip(own, times[over], strict=True)])
        for name, own in times.items()
    }


def net_memory(program: jax.stages.Compiled) -> float:
    """Temporary + output - aliased bytes: what a call needs besides; NaN if unknown."""
    memory = program.memory_analysis()
    if memory is None:
        return math.nan
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
