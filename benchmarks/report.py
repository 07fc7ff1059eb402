"""Writes the results as JSON, as Markdown tables and as a picture."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import matplotlib
import optax

from benchmarks.measure import Spread

Rows = list[dict[str, Any]]
# {name: {"machine": ..., "rows": ...}}
Suites = dict[str, dict[str, Any]]


def write(results: dict[str, Rows], folder: Path) -> None:
    """Writes `benchmarks.json`, `benchmarks.md` and, for speeds, `benchmarks.png`.

    The results of other suites in the folder are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, where = folder / "benchmarks.json", machine()
    suites = json.loads(file.read_text())["suites"] if file.exists() else {}
    suites |= {
        suite: {"machine": where, "rows": rows} for suite, rows in results.items()
    }
    file.write_text(as_json(suites))
    (folder / "benchmarks.md").write_text(markdown(suites, folder.name))
    if "speed" in results:
        picture(results["speed"], folder / "benchmarks.png")


def machine() -> dict[str, Any]:
    """Describes the machine and the versions behind the figures."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform}, {device.device_kind}",
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
    }


def as_json(suites: Suites) -> str:
    """`{"suites": {name: {"machine": ..., "rows": [...]}}}`, one row per line."""
    parts = [
        f'{json.dumps(name)}: {{"machine": {json.dumps(suite["machine"])}, "rows": [\n'
        + ",\n".join(map(json.dumps, suite["rows"]))
        + "\n]}"
        for name, suite in suites.items()
    ]
    return '{"suites": {\n' + ",\n".join(parts) + "\n}}\n"


def markdown(suites: Suites, folder: str) -> str:
    """Returns a page with the tables of every suite."""
    parts = [
        f"# Benchmarks: {folder.replace('_', ' ')}\n",
        "The tables below are the results of `python -m benchmarks`. Ratios of times "
        "are medians, with the minimum and the maximum in brackets.\n",
    ]
    for name, suite in suites.items():
        measured_on = ", ".join(f"{x} {value}" for x, value in suite["machine"].items())
        parts.append(f"## {name}\n\n{measured_on}\n")
        kinds: dict[tuple[str, ...], Rows] = {}
        for row in suite["rows"]:
            kinds.setdefault(tuple(row), []).append(row)
        parts += [table(alike) for alike in kinds.values()]
    return "\n".join(parts)


def picture(rows: Rows, path: Path) -> None:
    """Draws medians and spreads with AdamW, one panel per workload."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["optimizer"] == "AdamW" and "contender" in row]
    cases = {(row["workload"], row["k"]) for row in rows if row["k"] <= 8}
    workloads = {workload: k for workload, k in sorted(cases)}
    columns = min(len(workloads), 4)
    lines = -(-len(workloads) // columns)
    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=(3.2 * columns + 1, 5 * lines),
        sharey=True,
        squeeze=False,
    )
    for unused in panels.flat[len(workloads) :]:
        unused.set_visible(False)
    colours = {"limit": "0.6", "optax": "C1", "by hand": "C7", "ours": "C0"}
    for panel, case in zip(panels.flat, workloads.items(), strict=False):
        for row in (row for row in rows if (row["workload"], row["k"]) == case):
            median, low, high = row["time"]
            colour = colours[row["kind"]]
            panel.plot([low, high], [row["contender"]] * 2, color=colour, alpha=0.4)
            panel.plot(median, row["contender"], "o", color=colour)
        panel.axvline(1, color="0.8", zorder=0)
        panel.set_title("{}, k = {}".format(*case))
        panel.set_xlabel("time / (gradients + one step)")
        panel.set_xlim(left=0)
    panels[0, 0].invert_yaxis()
    figure.suptitle("Time of a window with AdamW: median, minimum and maximum")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(rows: Rows) -> str:
    """Rows with the same columns; the results of this process or of a JSON file."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return str(Spread(*value))
    if isinstance(value, float) and not isinstance(value, Spread):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(x)}" for name, x in value.items())
    return str(value)
