"""The price of `gradient_noise=True`, in time and in the compiled programs.

Each step runs three times: without the noise, with it, and once more without. The ratio
of the first and the last shows which differences this machine can resolve. Where it
cannot resolve the price, the compiled programs say what they do in addition.
"""

import math
from typing import Any, NamedTuple

import optax

from benchmarks.limits import bytes_of_a_window
from benchmarks.loops import Loop
from benchmarks.measure import interleaved, net_memory, ratios
from benchmarks.ours import train_step, window_step
from benchmarks.settings import Settings
from benchmarks.speed import Running
from benchmarks.workloads import Window, window_of

K = 8
ADAMW = optax.adamw(1e-4)
STEPS = {"train step": train_step, "window step": window_step}
OFF, ON, AGAIN = "without", "with", "without, again"


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every workload and step."""
    rows = []
    for name in settings.noise_workloads:
        for step, build in STEPS.items():
            settings.say(f"noise: {name}, {step}")
            workload = settings.workloads[name]()
            window = window_of(workload, K)
            loops = {
                way: build(workload, ADAMW, K, gradient_noise=way == ON)
                for way in (OFF, ON, AGAIN)
            }
            off, on = (costs_of(loops[way], window) for way in (OFF, ON))
            times = interleaved(
                {way: Running(loop, window) for way, loop in loops.items()},
                rounds=settings.noise_rounds,
            )
            spreads = ratios(times, OFF)
            rows.append(
                {
                    "workload": name,
                    "step": step,
                    "k": K,
                    "time, with / without": spreads[ON],
                    "time, without / without": spreads[AGAIN],
                    "temporaries, with / without": on.peak / off.peak,
                    "more operations / parameters": (on.operations - off.operations)
                    / optax.tree.size(workload.params),
                    "more bytes / bytes a window must move": (on.bytes - off.bytes)
                    / bytes_of_a_window(workload, ADAMW, K),
                }
            )
    return rows


class Costs(NamedTuple):
    """What XLA says about the programs of a loop.

    XLA counts the body of a loop and of a condition once. The norm is in a condition
    that holds once in a window, so differences of these costs are those of a window.

    Attributes:
      peak: the temporary + output - aliased bytes of the largest program.
      operations: the floating-point operations of all programs.
      bytes: the bytes that all programs read and write.
    """

    peak: float
    operations: float
    bytes: float


def costs_of(loop: Loop, window: Window) -> Costs:
    programs = [
        program.lowered.compile() for program in loop.lower(loop.state, window).values()
    ]
    costs = [program.cost_analysis() or {} for program in programs]
    return Costs(
        max(map(net_memory, programs)),
        sum(cost.get("flops", math.nan) for cost in costs),
        sum(cost.get("bytes accessed", math.nan) for cost in costs),
    )
