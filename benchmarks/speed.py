"""The time of a window, divided by the time of its gradients and one optimizer step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.measure import interleaved, ratios, relative_error, say
from benchmarks.report import Rows
from benchmarks.ways import ADAMW, WAYS, Loop
from benchmarks.workloads import (
    Window,
    Workload,
    square_layers,
    transformer_of,
    window_of,
)

BASE = "gradients + one step"
TOLERANCE = 1e-5  # above the rounding, far below the error of a mean of means
RATE = 2.0**30
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "square layers": square_layers,
    "stacked": partial(transformer_of, stacked=True),
    "LoRA": partial(transformer_of, rank=8),
}
TINY = {"LoRA": partial(transformer_of, 32, 2, 2, 8, rank=2)}


def run(quick: bool) -> Rows:
    """Returns a row for every workload and way, with AdamW."""
    rows, k = [], 2 if quick else 8
    for workload_name, make in (TINY if quick else WORKLOADS).items():
        say(f"speed: {workload_name}")
        workload = make()
        errors, window = check(workload, k), window_of(workload, k)
        loops = {name: way.build(workload, ADAMW, k) for name, way in WAYS.items()}
        states = {name: loop.init(workload.params) for name, loop in loops.items()}
        runs = {name: partial(run_one, loops, states, window, name) for name in WAYS}
        times = interleaved(runs, rounds=1 if quick else 21, seconds=20)
        over_base = ratios(times, BASE)
        rows += [
            {
                "workload": workload_name,
                "k": k,
                "way": name,
                "gradient error": errors.get(name),
                "time": over_base[name],
            }
            for name in WAYS
        ]
    return rows


def run_one(
    loops: Mapping[str, Loop], states: dict[str, Any], window: Window, name: str
) -> Any:
    """Runs a window, and keeps the state for the next one."""
    states[name] = loops[name].run(states[name], window)
    return jax.tree.leaves(states[name])


def check(workload: Workload, k: int) -> dict[str, float]:
    """The relative error of every way's gradient of a window.

    Raises:
      AssertionError: an exact way is wrong, or an inexact one is right.
    """
    window = window_of(workload, k)
    # The update is far larger than the parameters, so none of it is rounded away.
    inner = optax.sgd(RATE)
    loops = {
        name: way.build(workload, inner, k)
        for name, way in WAYS.items()
        if way.exact is not None
    }
    errors = gradient_errors(workload, loops, window, window)
    for name, error in errors.items():
        right = error < TOLERANCE
        assert right == WAYS[name].exact, (name, k, error)
    return errors


def gradient_errors(
    workload: Workload, loops: Mapping[str, Loop], window: Window, same_as: Window
) -> dict[str, float]:
    """The relative error of the gradient that each loop applies for a window.

    Args:
      workload: what is trained.
      loops: with SGD at the learning rate `RATE`.
      window: what the loops run.
      same_as: has the gradient that is right, if gradients of its summed losses are
        added up in float64 and divided by its tokens.
    """
    gradient = jax.jit(jax.grad(workload.loss_fn, has_aux=True))
    terms, counts = zip(
        *(gradient(workload.params, x, workload.frozen) for x in same_as.micro_batches),
        strict=True,
    )
    tokens = float(sum(counts))
    exact = jax.tree.map(lambda *xs: sum(map(_wide, xs)) / tokens, *terms)
    errors = {}
    for name, loop in loops.items():
        after, *_ = loop.run(loop.init(workload.params), window)
        moved = jax.tree.map(
            lambda a, b: (_wide(a) - _wide(b)) / RATE, workload.params, after
        )
        errors[name] = relative_error(moved, exact)
    return errors


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
