"""Interleaved timings in one process, and the ratios of pairs."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Spread(NamedTuple):
    """Median, minimum and maximum over the rounds."""

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
    """Measures the seconds of every run in rounds, each in a different order.

    A disturbance of the machine that lasts for a while affects all runs of a round
    alike, so ratios are taken within rounds.

    Args:
      runs: the functions to time, including the wait for their results.
      rounds: the maximum number of rounds.
      warm_up: additional rounds at the start, which are not counted.
      seconds: no round starts after this time, once there are five rounds.
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
    """The time of each run divided by the time of `over` in the same round."""
    return {
        name: spread([a / b for a, b in zip(own, times[over], strict=True)])
        for name, own in times.items()
    }


def net_memory(program: jax.stages.Compiled) -> float:
    """Temporary + output - aliased bytes, so without arguments; NaN if unknown."""
    memory = program.memory_analysis()
    if memory is None:
        return math.nan
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
