"""The time of a window, divided by the time of its gradients and one optimizer step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.loops import Loop
from benchmarks.measure import Running, interleaved, ratios, relative_error
from benchmarks.settings import ADAMW, Settings
from benchmarks.ways import WAYS
from benchmarks.workloads import Window, Workload, window_of

BASE = "gradients + one step"
# Above the rounding of each dtype, far below the error of a mean of means.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
RATE = 2.0**30


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every workload and way, with AdamW."""
    rows = []
    for workload_name, make in settings.workloads.items():
        settings.say(f"speed: {workload_name}")
        workload, running = make(), {}
        errors, window = check(workload, settings.k), window_of(workload, settings.k)
        for name, way in WAYS.items():
            loop = way.build(workload, ADAMW, settings.k)
            running[name] = Running(loop.run, loop.init(workload.params), window)
        times = interleaved(running, rounds=settings.rounds, seconds=settings.seconds)
        over_base = ratios(times, BASE)
        rows += [
            {
                "workload": workload_name,
                "k": settings.k,
                "way": name,
                "kind": way.kind,
                "gradient error": errors.get(name),
                "time": over_base[name],
            }
            for name, way in WAYS.items()
        ]
    return rows


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
        if way.kind != "limit"
    }
    errors = gradient_errors(workload, loops, window, window)
    for name, error in errors.items():
        right = error < TOLERANCE[jnp.dtype(workload.dtype).name]
        assert right == (WAYS[name].exact or k == 1), (name, k, error)
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
    exact = _gradient_in_float64(workload, same_as)
    errors = {}
    for name, loop in loops.items():
        after, *_ = loop.run(loop.init(workload.params), window)
        moved = jax.tree.map(
            lambda a, b: (_wide(a) - _wide(b)) / RATE, workload.params, after
        )
        errors[name] = relative_error(moved, exact)
    return errors


def _gradient_in_float64(workload: Workload, window: Window) -> Any:
    gradient = jax.jit(jax.grad(workload.loss_fn, has_aux=True))
    total, tokens = None, 0.0
    for batch in window.micro_batches:
        terms, n = gradient(workload.params, batch, workload.frozen)
        terms = jax.tree.map(_wide, terms)
        total = terms if total is None else jax.tree.map(np.add, total, terms)
        tokens += float(n)
    return jax.tree.map(lambda x: x / tokens, total)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
