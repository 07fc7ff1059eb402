"""Draws the bug, and what it does to a run."""

from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RIGHT, WRONG = "#3f8fd4", "#d1342f"


# Without a background, and grey: for light and dark pages.
@style.context(Path(__file__).parents[1] / "notebooks" / "figures.mplstyle")
def write_pictures(
    folder: Path,
    tokens: list[int],
    losses: dict[str, list[float]],
    distances: dict[str, float],
) -> tuple[Path, Path]:
    """Draws the weights of a window alone, and next to the results of a run.

    `tokens` are those of each micro-batch in a window, `losses` those of each window,
    and `distances` those from the parameters of full batches, which are the first
    method. Returns the paths.
    """
    alone, all_ = folder / "weights.png", folder / "results.png"
    figure = Figure(figsize=(3.9, 3.1), dpi=200, layout="constrained")
    draw_weights(figure.subplots(), tokens)
    figure.savefig(alone)
    figure = Figure(figsize=(12, 3.4), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    draw_weights(left, tokens)
    first, *others = losses
    for name in others:
        difference = np.abs(np.subtract(losses[name], losses[first]))
        middle.plot(range(1, len(difference) + 1), difference, label=name)
    middle.set_yscale("log", nonpositive="mask")
    title = "Difference of the loss to full batches"
    middle.set_title(title, fontweight="bold", size=11)
    middle.set_xlabel("updates")
    middle.legend()
    colors = [WRONG if name == "optax.MultiSteps" else RIGHT for name in distances]
    right.barh([*distances], [*distances.values()], color=colors)
    right.set_xscale("log")
    title = "Distance to full batches (relative L2)"
    right.set_title(title, fontweight="bold", size=11)
    figure.savefig(all_)
    return alone, all_


def draw_weights(axes: Axes, tokens: list[int]) -> None:
    """Draws how much a token counts in a mean of means, by the micro-batch it is in."""
    tokens = sorted(tokens)
    mean = sum(tokens) / len(tokens)
    axes.grid(axis="x", visible=False)
    axes.set_title("Weight of a token in a mean of means", fontweight="bold", size=11)
    places = range(len(tokens))
    axes.bar(places, [mean / n for n in tokens], color=WRONG)
    axes.axhline(1, color=RIGHT, linewidth=3)
    axes.annotate(
        "right: 1 for every token",
        (len(tokens) - 0.5, 1.6),
        horizontalalignment="right",
        color=RIGHT,
        fontweight="bold",
    )
    axes.set_xticks(places, [str(n) for n in tokens], rotation=90)
    axes.set_xlabel(f"loss tokens in each of {len(tokens)} micro-batches")
