"""Interleaved timings in one process, and the ratios of pairs."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax


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
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Measures the seconds of every run in rounds, each in a different order.

    A disturbance of the machine that lasts for a while affects all runs of a round
    alike, so ratios are taken within rounds.

    Args:
      runs: the functions to time, including the wait for their results.
      rounds: how many, at most.
      warm_up: additional rounds at the start, which are not counted.
      seconds: when no more rounds start, once there are five.
      prepare: called with the name of a run before it; this time is not counted.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for turn in range(warm_up + rounds):
        if turn - warm_up >= 5 and time.perf_counter() - began > seconds:
            break
        start = turn % len(names)
        order = names[start:] + names[:start]
        for name in order[::-1] if turn // len(names) % 2 else order:
            prepare(name)
            began_run = time.perf_counter()
            jax.block_until_ready(runs[name]())
            if turn >= warm_up:
                times[name].append(time.perf_counter() - began_run)
    return times


def ratios(times: dict[str, list[float]], over: str) -> dict[str, Spread]:
    """The times of each run divided by those of `over` in the same rounds."""
    return {
        name: spread([a / b for a, b in zip(own, times[over], strict=True)])
        for name, own in times.items()
    }


def relative_error(got: Any, expected: Any) -> float:
    """The norm of the difference of two trees, divided by that of the second one."""
    difference = jax.tree.map(np.subtract, got, expected)
    return float(optax.tree.norm(difference) / optax.tree.norm(expected))


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
