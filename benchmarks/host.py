"""The host time of a call, in addition to the host time of `jit` itself."""

from functools import partial
from typing import Any

import jax
import optax

from benchmarks.measure import interleaved, spread
from benchmarks.settings import Settings
from benchmarks.workloads import Workload, many_leaves, window_of
from optax_tokenaccum import make_train_step, make_window_step

CALLS, K = 20, 8


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every number of leaves and every step."""
    rows = []
    for leaves in settings.host_leaves:
        settings.say(f"host time of {leaves} leaves")
        workload = many_leaves(leaves, total=leaves)
        steps = {"train step": _train_steps, "window step": _window_steps}
        if leaves > 1000:  # XLA compiles such a loop for many minutes
            del steps["window step"]
        for name, build in steps.items():
            pair = build(workload)
            times = interleaved(pair, rounds=20 * settings.rounds, seconds=20)
            ours, plain = (spread([1e6 * t / CALLS for t in times[x]]) for x in pair)
            pairs = zip(times["ours"], times["plain"], strict=True)
            more = spread([1e6 * (a - b) / CALLS for a, b in pairs])
            rows.append(
                {
                    "leaves": leaves,
                    "step": name,
                    "us of a plain call": round(plain.median, 1),
                    "us more": more,
                    "wanted at most": round(50 + 0.2 * plain.median, 1),
                }
            )
    return rows


def _train_steps(workload: Workload) -> dict[str, Any]:
    """Micro-batches of one window that stays open."""
    step = make_train_step(workload.loss_fn, optax.sgd(0.1), 1_000_000)
    batch = window_of(workload, 1).micro_batches[0]
    return _ours_and_plain(step, step.accumulate, step.init, workload, batch)


def _window_steps(workload: Workload) -> dict[str, Any]:
    step = make_window_step(workload.loss_fn, optax.sgd(0.1))
    stacked = window_of(workload, K).stacked
    return _ours_and_plain(step, step, step.init, workload, stacked)


def _ours_and_plain(
    ours: Any, traced: Any, init: Any, workload: Workload, data: Any
) -> dict[str, Any]:
    """Calls of a step, and of `jit` of the same program with the same arguments."""
    plain = jax.jit(
        lambda state, data: traced(state, data, frozen=None), donate_argnums=0
    )
    return {
        "ours": _Calls(partial(ours, frozen=None), init(workload.params), data),
        "plain": _Calls(plain, init(workload.params), data),
    }


class _Calls:
    """Makes `CALLS` calls in a row and does not wait for their results."""

    def __init__(self, step: Any, state: Any, data: Any):
        self._step, self._state, self._data = step, state, data

    def __call__(self) -> Any:
        metrics = None
        for _ in range(CALLS):
            self._state, metrics = self._step(self._state, self._data)
        return self._state, metrics
