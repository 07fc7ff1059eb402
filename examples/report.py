"""Draws the bug."""

from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure


# Without a background, and grey: for light and dark pages.
@style.context(Path(__file__).parents[1] / "notebooks" / "figures.mplstyle")
def write_picture(path: Path, tokens: list[int]) -> None:
    """Draws how much a token counts in a mean of means, by the micro-batch it is in.

    Args:
      path: the file to write.
      tokens: the number of loss tokens of each micro-batch in a window.
    """
    tokens = sorted(tokens)
    mean = sum(tokens) / len(tokens)
    figure = Figure(figsize=(3.9, 3.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="x", visible=False)
    axes.set_title("Weight of a token in a mean of means", fontweight="bold", size=11)
    places = range(len(tokens))
    axes.bar(places, [mean / n for n in tokens], color="#d1342f")
    axes.axhline(1, color="#3f8fd4", linewidth=3)
    axes.annotate(
        "right: 1 for every token",
        (len(tokens) - 0.5, 1.6),
        horizontalalignment="right",
        color="#3f8fd4",
        fontweight="bold",
    )
    axes.set_xticks(places, [str(n) for n in tokens], rotation=90)
    axes.set_xlabel(f"loss tokens in each of {len(tokens)} micro-batches")
    figure.savefig(path)
