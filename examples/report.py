"""Reports a comparison as a table and as a picture."""

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

REFERENCE = "full-batch"
NAIVE = "optax.MultiSteps"


class Run(NamedTuple):
    """What was measured of one way, after every update.

    Attributes:
      distances: relative L2 distances to the reference's parameters.
      losses: mean losses per validation token.
    """

    distances: list[float]
    losses: list[float]


def table(runs: dict[str, Run]) -> str:
    """How far each way ends from training on the whole windows."""
    lines = [f"{'way':20}{'distance':>12}{'validation loss':>18}"]
    for way, (distances, losses) in runs.items():
        far = "reference" if way == REFERENCE else f"{distances[-1]:.1e}"
        lines.append(f"{way:20}{far:>12}{losses[-1]:>18.4f}")
    return "\n".join(lines)


def write_picture(path: Path, runs: dict[str, Run]) -> None:
    """Draws the loss and the distance to the reference against the updates."""
    figure = Figure(figsize=(11, 5.4), dpi=150, layout="constrained")
    title = "Averaging the micro-batches' means is not training on the batch"
    figure.suptitle(title, fontsize=15, fontweight="bold")
    left, right = figure.subplots(1, 2)
    left.set_title("Validation loss (nats a token)")
    right.set_title("Distance of the parameters to the reference's (relative L2)")
    right.set_yscale("log")
    updates = range(1, len(runs[REFERENCE].losses) + 1)
    tail = slice(len(updates) * 2 // 3, None)
    inset = left.inset_axes((0.43, 0.42, 0.54, 0.5))
    for place, (way, run) in enumerate(runs.items()):
        look = _look(way, place)
        left.plot(updates, run.losses, **look)
        inset.plot(updates[tail], run.losses[tail], **look)
        if way != REFERENCE:
            right.plot(updates, run.distances, **look)
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    for axes in (left, right):
        axes.set_xlabel("optimizer updates")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _look(way: str, place: int) -> dict[str, Any]:
    """The style of a way's curves: those of exact ways and of the reference coincide.

    The reference is therefore a wide band, and the markers of exact ways alternate.
    """
    if way == REFERENCE:
        return {"label": "full batch", "color": "0.8", "linewidth": 8}
    if way == NAIVE:
        return {"label": f"{NAIVE} (mean of means)", "color": "#d1342f", "linewidth": 2}
    look = {"marker": "os^"[place - 2], "markevery": (place, 6), "linewidth": 1.2}
    return {"label": f"{way} (exact)", "color": f"C{place - 2}", **look}
