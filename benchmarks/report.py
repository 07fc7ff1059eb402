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


def write(results: dict[str, Rows], folder: Path) -> None:
    """Writes `benchmarks.json`, `benchmarks.md` and, for speeds, `benchmarks.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    (folder / "benchmarks.json").write_text(as_json(where, results))
    (folder / "benchmarks.md").write_text(markdown(where, results))
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


def as_json(where: dict[str, Any], results: dict[str, Rows]) -> str:
    """`{"machine": ..., "suites": {name: rows}}`, one row per line."""
    suites = [
        f"{json.dumps(suite)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
        for suite, rows in results.items()
    ]
    beginning = f'{{"machine": {json.dumps(where)}, "suites": {{\n'
    return beginning + ",\n".join(suites) + "\n}}\n"


def markdown(where: dict[str, Any], results: dict[str, Rows]) -> str:
    """Tables of every suite; ratios are medians of pairs, minimum and maximum."""
    measured_on = ", ".join(f"{name} {value}" for name, value in where.items())
    parts = [f"# Benchmarks\n\n{measured_on}\n"]
    for suite, rows in results.items():
        parts.append(f"## {suite}\n")
        kinds: dict[tuple[str, ...], Rows] = {}
        for row in rows:
            kinds.setdefault(tuple(row), []).append(row)
        parts += [_table(alike) for alike in kinds.values()]
    return "\n".join(parts)


def picture(rows: Rows, path: Path) -> None:
    """Draws medians and spreads with AdamW, one panel per workload."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["optimizer"] == "AdamW" and "contender" in row]
    cases = {(row["workload"], row["k"]) for row in rows if row["k"] <= 8}
    workloads = {workload: k for workload, k in sorted(cases)}
    figure, panels = plt.subplots(
        1,
        len(workloads),
        figsize=(3.2 * len(workloads) + 1, 5),
        sharey=True,
        squeeze=False,
    )
    colours = {"limit": "0.6", "optax": "C1", "by hand": "C7", "ours": "C0"}
    for panel, case in zip(panels[0], workloads.items(), strict=True):
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
    figure.suptitle("A window with AdamW: median and spread")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _table(rows: Rows) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and not isinstance(value, Spread):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(x)}" for name, x in value.items())
    return str(value)
