"""Writes the results as JSON and as Markdown tables."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import optax

from benchmarks.measure import Spread

Rows = list[dict[str, Any]]
# {name: {"machine": ..., "rows": ...}}
Suites = dict[str, dict[str, Any]]


def write(
    results: dict[str, Rows], folder: Path, where: dict[str, Any] | None = None
) -> None:
    """Writes `benchmarks.json` and `benchmarks.md`; keeps results of other suites.

    Args:
      results: the rows of suites.
      folder: of the results.
      where: what was measured on; by default, this machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, where = folder / "benchmarks.json", where or machine()
    suites = json.loads(file.read_text())["suites"] if file.exists() else {}
    suites |= {
        suite: {"machine": where, "rows": rows} for suite, rows in results.items()
    }
    file.write_text(as_json(suites))
    (folder / "benchmarks.md").write_text(markdown(suites, folder.name))


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
