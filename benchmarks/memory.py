"""How the memory of a window grows with its number of micro-batches."""

from pathlib import Path
from typing import Any

import matplotlib
import optax

from benchmarks.measure import net_memory
from benchmarks.settings import Settings
from benchmarks.speed import CONTENDERS
from benchmarks.workloads import window_of

BASE = "gradients alone"
# Colours and sizes, so that equal lines are visible behind each other.
STYLES = {
    BASE: ("0.4", 1),
    "optax.MultiSteps": ("C1", 2),
    "optax.microbatching": ("C3", 5),
    "scan by hand": ("0.7", 2),
    "train step": ("C0", 5),
    "window step": ("C9", 2),
}


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every k and way: the highest peak of its programs.

    A peak leaves out parameters, optimizer state and batch, as in the programs suite.
    """
    name = settings.grown_in_memory
    workload = settings.workloads[name]()
    rows = []
    for k in settings.memory_ks:
        settings.say(f"memory of {name}, k = {k}")
        window, peaks = window_of(workload, k), {}
        for way in STYLES:
            loop = CONTENDERS[way].build(workload, optax.adamw(1e-4), k)
            peaks[way] = max(
                net_memory(program.lowered.compile()) + program.held
                for program in loop.lower(loop.state, window).values()
            )
        rows += [
            {
                "workload": name,
                "k": k,
                "contender": way,
                "peak MB": round(peak / 1e6, 1),
                "peak / gradients alone": peak / peaks[BASE],
            }
            for way, peak in peaks.items()
        ]
    return rows


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the memory of every way against k."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4))
    ks = sorted({row["k"] for row in rows})
    ends: list[float] = []
    for way, (colour, size) in STYLES.items():
        ratios = [
            row["peak / gradients alone"] for row in rows if row["contender"] == way
        ]
        panel.plot(
            range(len(ks)),
            ratios,
            "--" if way == BASE else "o-",
            color=colour,
            label=way,
            linewidth=size,
            markersize=3 * size,
        )
        ends.append(ratios[-1])
    panel.set_xticks(range(len(ks)), [str(k) for k in ks])
    panel.set_ylim(0, 1.1 * max(row["peak / gradients alone"] for row in rows))
    panel.set_xlabel("micro-batches in a window (k)")
    panel.set_ylabel("peak / gradients alone")
    panel.set_title(f"Peak memory of a window: {rows[0]['workload']}")
    handles, labels = panel.get_legend_handles_labels()
    order = sorted(range(len(ends)), key=lambda i: -ends[i])
    panel.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
