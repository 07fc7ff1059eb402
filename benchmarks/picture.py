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
WAYS = {
    "optax.MultiSteps": "optax.MultiSteps",
    "scan by hand": "scan by hand",
    "token_accumulation": "token_accumulation",
    "train step": "make_train_step",
    "window step": "make_window_step",
}
COLOURS = {"optax": "#e8710a", "by hand": "#8b949e", "ours": "#3b82f6"}
# A grey and colours that are readable on white and on black; text stays text.
STYLE = dict.fromkeys(("text.color", "xtick.color", "ytick.color"), "#7d8590") | {
    "axes.labelcolor": "#7d8590",
    "svg.fonttype": "none",
    "svg.hashsalt": "performance",
    "font.family": "sans-serif",
}


def draw(path: Path) -> None:
    """Draws memory and time of a window of 8 with AdamW, one row for each model."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    suites = json.loads(RESULTS.read_text())["suites"]
    speed = [x for x in suites["speed"]["rows"] if x["optimizer"] == "AdamW"]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(MODELS), 2, figsize=(6, 4.2), sharex="col", sharey=True
        )
        for (memory, time), (model, title) in zip(panels, MODELS.items(), strict=True):
            kinds, times = {}, {}
            for way, row in _of(model, speed).items():
                kinds[way], times[way] = row["kind"], row["time"]
            peaks = {
                way: [max(row["peak / gradients alone"].values())]
                for way, row in _of(model, suites["programs"]["rows"]).items()
            }
            for panel, values in (memory, peaks), (time, times):
                for way, label in WAYS.items():
                    median, *spread = values[way]
                    panel.barh(label, median, color=COLOURS[kinds[way]])
                    if spread:
                        panel.plot(spread, [label] * 2, color="#7d8590")
                    end = max([median, *spread])
                    panel.annotate(
                        f"{median:.2f}",
                        (end, label),
                        (3, 0),
                        textcoords="offset points",
                        va="center",
                    )
                panel.axvline(1, color="#7d8590", linestyle=":", linewidth=1)
                panel.spines[:].set_visible(False)
                panel.tick_params(length=0)
                panel.margins(x=0.25)
            memory.set_title(title, loc="left", fontsize=10)
        panels[0, 0].invert_yaxis()
        panels[-1, 0].set_xlabel("peak memory / gradients alone")
        panels[-1, 1].set_xlabel("time / (gradients + one step)")
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def _of(model: str, rows: Rows) -> dict[str, dict[str, Any]]:
    """The rows of a model, by their way to accumulate."""
    return {
        row["contender"]: row
        for row in rows
        if row["workload"] == model and row.get("contender") in WAYS
    }


if __name__ == "__main__":
    draw(PICTURE)
