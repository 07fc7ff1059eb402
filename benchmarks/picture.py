"""Draws the picture at the top of docs/performance.md from the stored results.

Run it as `python -m benchmarks.picture`, after results have changed.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.report import Rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/cpu/benchmarks.json"
PICTURE = ROOT / "docs/images/performance.svg"
MODELS = {
    "stacked": "stacked layers, as in most large models",
    "square layers": "unrolled layers, expensive optimizer step",
}
OPTAX, BY_HAND, OURS = "#e8710a", "#8b949e", "#3b82f6"
WAYS = {
    "optax.MultiSteps": ("optax.MultiSteps", OPTAX),
    "scan by hand": ("scan by hand", BY_HAND),
    "token_accumulation": ("token_accumulation", OURS),
    "train step": ("make_train_step", OURS),
    "window step": ("make_window_step", OURS),
}
GREY = "#7d8590"
# The grey and the colours are readable on white and on black; text stays text.
STYLE = dict.fromkeys(("text.color", "xtick.color", "ytick.color"), GREY) | {
    "axes.labelcolor": GREY,
    "svg.fonttype": "none",
    "svg.hashsalt": "performance",
    "font.family": "sans-serif",
}


def draw(path: Path) -> None:
    """Draws memory and time of a window of 8 with AdamW, one row for each model."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    suites = json.loads(RESULTS.read_text())["suites"]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(MODELS), 2, figsize=(6, 4.2), sharex="col", sharey=True
        )
        for (memory, time), (model, title) in zip(panels, MODELS.items(), strict=True):
            peaks = _of(model, suites["programs"]["rows"], "peak / gradients alone")
            _bars(memory, {way: [max(peaks[way].values())] for way in WAYS})
            _bars(time, _of(model, suites["speed"]["rows"], "time"))
            memory.set_title(title, loc="left", fontsize=10)
        panels[0, 0].invert_yaxis()
        panels[-1, 0].set_xlabel("peak memory / gradients alone")
        panels[-1, 1].set_xlabel("time / (gradients + one step)")
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def _bars(panel: Any, values: dict[str, list[float]]) -> None:
    """Draws a bar for every way, and a line from the minimum to the maximum."""
    for way, (label, colour) in WAYS.items():
        median, *spread = values[way]
        panel.barh(label, median, color=colour)
        if spread:
            panel.plot(spread, [label] * 2, color=GREY)
        place = max(values[way]), label
        panel.annotate(
            f"{median:.2f}", place, (3, 0), textcoords="offset points", va="center"
        )
    panel.axvline(1, color=GREY, linestyle=":", linewidth=1)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    panel.margins(x=0.25)


def _of(model: str, rows: Rows, column: str) -> dict[str, Any]:
    """The values of a model, by the way to accumulate."""
    return {row["way"]: row[column] for row in rows if row["workload"] == model}


if __name__ == "__main__":
    draw(PICTURE)
