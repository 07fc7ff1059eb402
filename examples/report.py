"""Describes the data, and reports a comparison as a table, as JSON and as a picture."""

import json
import platform
from pathlib import Path
from typing import Any

import jax
import optax
from batches import PAD, Batch, Window, plan_settings
from compare import Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from methods import NAIVE, REFERENCE
from rich import box
from rich.table import Table

from optax_tokenaccum import plan_window

_EXACT_LOOKS = [
    ("#1f6fb4", "o"),
    ("#2a9d63", "s"),
    ("#7b4fb5", "^"),
    ("#c77d0a", "D"),
    ("#17a3b8", "v"),
    ("#8c564b", "P"),
    ("#52606d", "X"),
]
_FLOOR = 1e-10  # where a distance of zero is drawn: a log axis has no zero


def describe(windows: list[Window], train_size: int) -> str:
    """Describes the size, the raggedness and the padding of the training data."""
    micro_batches = [batch for window in windows for batch in window.micro_batches]
    wholes = [window.whole for window in windows]
    loss_tokens = [int(batch.mask.sum()) for batch in micro_batches]
    rows = sum(len(whole.inputs) for whole in wholes)

    def padding(batches: list[Batch]) -> float:
        real = sum(int((batch.inputs != PAD).sum()) for batch in batches)
        return 1 - real / sum(batch.inputs.size for batch in batches)

    return (
        f"{len(windows)} updates, {rows / train_size:.1f} epochs; a micro-batch holds "
        f"{min(loss_tokens)} to {max(loss_tokens)} loss tokens; padding is "
        f"{padding(micro_batches):.0%} of the micro-batches and {padding(wholes):.0%} "
        "of the whole windows"
    )


def describe_plans(windows: list[Window]) -> str:
    """Describes the number, the shapes and the padding of planned micro-batches."""
    settings = plan_settings(windows)
    lengths = [[len(row.inputs) for row in window.sequences] for window in windows]
    plans = [plan for window in lengths for plan in plan_window(window, **settings)]
    shapes = sorted({(plan.num_rows, plan.length) for plan in plans}, reverse=True)
    padded = sum(plan.num_rows * plan.length for plan in plans)
    return (
        f"planned: {len(plans)} micro-batches of "
        f"{', '.join(f'{rows} x {length}' for rows, length in shapes)} tokens; padding "
        f"is {1 - sum(map(sum, lengths)) / padded:.0%}"
    )


def make_table(runs: list[Run]) -> Table:
    """Makes a table of the runs for the terminal."""
    result = Table(
        title="How far each method ends from training on the whole window at once",
        caption="Distance: of the parameters, relative L2. Losses: summed over all "
        "tokens of the split, divided by their number. Tokens/s: what the model reads, "
        "with prompts and without padding, in windows that compiled nothing. Memory: "
        "temporary + output - aliased, per program.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    result.add_column("method", no_wrap=True)
    for header in ["distance", "train\nloss", "valid.\nloss", "tokens/s"]:
        result.add_column(header, justify="right", no_wrap=True)
    result.add_column("memory in MB", no_wrap=True)
    for run in runs:
        speed = run.tokens_per_second
        result.add_row(
            run.method,
            "reference" if run.method == REFERENCE else f"{run.distances[-1]:.1e}",
            f"{run.train_loss:.4f}",
            f"{run.validation_loss:.4f}",
            "-" if speed is None else f"{speed:,.0f}",
            "\n".join(
                f"{name} {'-' if size is None else f'{size / 1e6:.1f}'}"
                for name, size in run.memory.items()
            ),
        )
    return result


def write_json(
    path: Path, runs: list[Run], settings: dict[str, Any], sizes: dict[str, int]
) -> None:
    """Writes the table, the curves and everything that they depend on."""
    content = {
        "settings": settings,
        "parameters": sizes,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
        },
        "device": str(jax.devices()[0].device_kind),
        "table": [
            {
                "method": run.method,
                "distance": run.distances[-1],
                "train_loss": run.train_loss,
                "validation_loss": run.validation_loss,
                "tokens_per_second": run.tokens_per_second,
                "memory_bytes": run.memory,
            }
            for run in runs
        ],
        "curves": {
            run.method: {
                "distance": run.distances,
                "validation_loss": list(run.validation_losses.items()),
            }
            for run in runs
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_picture(path: Path, runs: list[Run], setting: str) -> None:
    """Draws the loss and the distance to the reference against the updates.

    Args:
      path: the PNG file.
      runs: the runs, the reference first.
      setting: a line of text below the picture.
    """
    figure = Figure(figsize=(11, 5.4), dpi=150, layout="constrained")
    figure.suptitle(
        "Averaging the micro-batches' means is not training on the batch",
        fontsize=15,
        fontweight="bold",
    )
    losses, distances = figure.subplots(1, 2)
    _draw_losses(losses, runs)
    _draw_distances(distances, runs)
    losses.set_title("Validation loss (nats a token)")
    distances.set_title("Distance of the parameters to the reference's (relative L2)")
    distances.set_yscale("log")
    distances.margins(y=0.1)
    figure.legend(
        *losses.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        title=setting,
    )
    for axes in (losses, distances):
        axes.set_xlabel("optimizer updates")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    """Draws the loss curves, and an enlarged inset of their last third."""
    points = list(runs[0].validation_losses)
    tail = [point for point in points if point >= points[-1] * 2 / 3]
    enlarged = [axes.inset_axes((0.43, 0.42, 0.54, 0.5))] if len(tail) > 2 else []
    for run, look in zip(runs, _looks(runs, len(points)), strict=True):
        axes.plot(points, list(run.validation_losses.values()), **look)
        for inset in enlarged:
            inset.plot(tail, [run.validation_losses[point] for point in tail], **look)
            inset.tick_params(labelsize=8)
            inset.grid(alpha=0.25)


def _draw_distances(axes: Axes, runs: list[Run]) -> None:
    """Draws the distances, and how many times farther the naive method ends."""
    looks = _looks(runs, len(runs[0].distances))
    ends = {}
    for run, look in list(zip(runs, looks, strict=True))[1:]:
        heights = [max(distance, _FLOOR) for distance in run.distances]
        axes.plot(range(1, len(heights) + 1), heights, **look)
        ends[run.method] = heights[-1]
    exact = [end for method, end in ends.items() if method != NAIVE]
    if NAIVE in ends and exact:
        top, bottom = ends[NAIVE], max(exact)
        place = 0.9 * len(runs[0].distances)
        arrow = {"arrowstyle": "<->", "color": "0.35", "shrinkA": 6, "shrinkB": 6}
        axes.annotate("", (place, top), (place, bottom), arrowprops=arrow)
        axes.annotate(
            f"{float(f'{top / bottom:.2g}'):,.0f} times  ",
            (place, (top * bottom) ** 0.5),
            ha="right",
            fontsize=12,
        )


def _looks(runs: list[Run], points: int) -> list[dict[str, Any]]:
    """Chooses a style for each run's curve of `points` points.

    The curves of the exact methods and of the reference coincide. The reference is
    therefore a wide band, and each exact method has markers at different points.
    """
    exact = [run.method for run in runs if run.method not in (REFERENCE, NAIVE)]
    every = max(1, points // 20)
    looks: list[dict[str, Any]] = []
    for run in runs:
        if run.method == REFERENCE:
            looks.append({"label": "full batch", "color": "0.8", "linewidth": 8})
        elif run.method == NAIVE:
            label = f"{NAIVE} (mean of means)"
            looks.append({"label": label, "color": "#d1342f", "linewidth": 2.4})
        else:
            place = exact.index(run.method)
            color, marker = _EXACT_LOOKS[place % len(_EXACT_LOOKS)]
            look: dict[str, Any] = {"color": color, "linewidth": 1.2}
            look["marker"] = marker
            look["label"] = f"{run.method} (exact)"
            look["markevery"] = (place * every % points, len(exact) * every)
            looks.append(look)
    return looks
