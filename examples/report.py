"""Reports a comparison as a table, and the bug as a picture."""

from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

REFERENCE = "full-batch"


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


def write_picture(path: Path, tokens: list[int]) -> None:
    """Draws how much a token counts in a mean of means, by the micro-batch it is in.

    Args:
      path: the file to write.
      tokens: the number of loss tokens of each micro-batch in a window.
    """
    tokens = sorted(tokens)
    mean = sum(tokens) / len(tokens)
    figure = Figure(figsize=(5, 3.2), dpi=200, layout="constrained")
    figure.set_facecolor("white")
    axes = figure.subplots()
    axes.set_title("Weight of a token in a mean of means", fontweight="bold")
    places = range(len(tokens))
    axes.bar(places, [mean / n for n in tokens], color="#d1342f")
    axes.axhline(1, color="#1f6fb4", linewidth=3)
    axes.annotate(
        "right: 1 for every token",
        (len(tokens) - 0.5, 1.15),
        horizontalalignment="right",
        color="#1f6fb4",
        fontweight="bold",
    )
    axes.set_xticks(places, [str(n) for n in tokens], rotation=90)
    axes.set_xlabel(f"loss tokens in each of {len(tokens)} micro-batches")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
