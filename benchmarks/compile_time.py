"""The time to compile a window step, divided by that of the same scan by hand."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.loops import Loop, Optimizer, apply_sums, one_program
from benchmarks.measure import interleaved, ratio
from benchmarks.settings import ADAMW, Settings
from benchmarks.ways import sums_by_hand, window_step
from benchmarks.workloads import Window, Workload, square_layers, window_of


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every number of parameters, none of which are stacked.

    The scan by hand returns what the metrics of our step need: the loss and the norm of
    the gradient.
    """
    rows = []
    for leaves in settings.compiled_leaves:
        settings.say(f"compile time of {leaves} leaves")
        workload = square_layers(width=8, layers=leaves)
        window = window_of(workload, settings.k)
        loops = [f(workload, ADAMW, settings.k) for f in (window_step, _scan_with_norm)]
        ours, by_hand = (
            partial(_compile, loop, loop.init(workload.params), window)
            for loop in loops
        )
        times = interleaved(
            {"ours": ours, "by hand": by_hand},
            rounds=settings.rounds,
            warm_up=0,
            seconds=5 * settings.seconds,
        )
        time = ratio(times["ours"], times["by hand"])
        rows.append({"leaves": leaves, "time / by hand": time})
    return rows


def _compile(loop: Loop, state: Any, window: Window) -> None:
    jax.clear_caches()  # of traces
    loop.lower(state, window)["step"].lowered.compile()


def _scan_with_norm(workload: Workload, inner: Optimizer, k: int) -> Loop:
    def step(params: Any, opt_state: Any, micro_batches: Any, frozen: Any) -> Any:
        sums = sums_by_hand(workload, params, micro_batches, frozen)
        updated = apply_sums(inner, params, opt_state, sums)
        return *updated, optax.tree.norm(sums[2]) / jnp.maximum(sums[1], 1)

    return one_program(workload, inner.init, step, "stacked")
