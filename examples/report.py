"""Describes the data, and reports a comparison as a table and as a picture."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data import Window
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

REFERENCE = "full-batch"
NAIVE = "optax.MultiSteps"
_FLOOR = 1e-10  # where a distance of zero is drawn: a log axis has no zero


@dataclass
class Run:
    """What was measured of one way.

    Attributes:
      way: its name.
      distances: relative L2 distances to the reference's parameters, one per update.
      losses: mean losses per validation token, one per update.
      memory: temporary + output - aliased bytes of its program; None where unknown.
    """

    way: str
    distances: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: int | None = None


def describe(windows: list[Window], train_size: int) -> str:
    """Describes the size and the raggedness of the training data."""
    counts = [int(batch.mask.sum()) for window in windows for batch in window[0]]
    epochs = sum(len(window.whole[0].inputs) for window in windows) / train_size
    return (
        f"{len(windows)} updates, {epochs:.1f} epochs; a micro-batch holds "
        f"{min(counts)} to {max(counts)} loss tokens"
    )


def make_table(runs: list[Run]) -> Table:
    """Makes a table of the runs for the terminal."""
    table = Table(
        title="How far each way ends from training on the whole window at once",
        caption="Distance: of the parameters, relative L2. Memory: temporary + output "
        "- aliased bytes of the program.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("way", no_wrap=True)
    for header in ["distance", "validation loss", "memory in MB"]:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.way,
            "reference" if run.way == REFERENCE else f"{run.distances[-1]:.1e}",
            f"{run.losses[-1]:.4f}",
            "-" if run.memory is None else f"{run.memory / 1e6:.1f}",
        )
    return table


def write_picture(path: Path, runs: list[Run], setting: str) -> None:
    """Draws the loss and the distance to the reference against the updates."""
    figure = Figure(figsize=(11, 5.4), dpi=150, layout="constrained")
    title = "Averaging the micro-batches' means is not training on the batch"
    figure.suptitle(title, fontsize=15, fontweight="bold")
    left, right = figure.subplots(1, 2)
    left.set_title("Validation loss (nats a token)")
    right.set_title("Distance of the parameters to the reference's (relative L2)")
    right.set_yscale("log")
    updates = range(1, len(runs[0].losses) + 1)
    tail = slice(len(updates) * 2 // 3, None)
    inset = left.inset_axes((0.43, 0.42, 0.54, 0.5))
    for place, run in enumerate(runs):
        look = _look(run, place)
        left.plot(updates, run.losses, **look)
        inset.plot(updates[tail], run.losses[tail], **look)
        if run.way != REFERENCE:
            right.plot(updates, [max(x, _FLOOR) for x in run.distances], **look)
    handles = left.get_legend_handles_labels()
    how = {"ncols": 4, "frameon": False, "title": setting}
    figure.legend(*handles, loc="outside lower center", **how)
    for axes in (left, right):
        axes.set_xlabel("optimizer updates")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _look(run: Run, place: int) -> dict[str, Any]:
    """Chooses a style for the curves of the run at that place.

    The curves of the exact ways and of the reference coincide. The reference is
    therefore a wide band, and each exact way has markers at different points.
    """
    if run.way == REFERENCE:
        return {"label": "full batch", "color": "0.8", "linewidth": 8}
    if run.way == NAIVE:
        return {"label": f"{NAIVE} (mean of means)", "color": "#d1342f", "linewidth": 2}
    color = f"C{(0, 1, 2, 4, 5)[place - 2]}"  # not C3, which is red
    look = {"marker": "os^Dv"[place - 2], "markevery": (place, 6), "linewidth": 1.2}
    return {"label": f"{run.way} (exact)", "color": color, **look}
