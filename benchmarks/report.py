"""Writes results as JSON and as Markdown, and puts them into the tables of pages.

    python -m benchmarks.report docs/performance.md

updates a page from the results in the repository. Its tables are between two comments,
of which the first one says in JSON where the rows come from:

    <!-- table {"suite": "speed", "where": {"kind": ["ours"]}, "columns": ["way"]} -->
    <!-- end -->

Rows come in the order of the results. With `"pivot": [column, value]` each value of
`column` is a column of its own, with the cells of `value`, which may also be a format
with the names of several: `"{v5e:.2f}; {H200:.2f}"`. With `"largest": true`, a way that
has several programs shows the largest one.
"""

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import jax
import optax

from benchmarks.measure import Spread

Rows = list[dict[str, Any]]
Suites = dict[str, dict[str, Any]]  # {name: {"machine": ..., "rows": ...}}
RESULTS = Path(__file__).parent / "results"
TABLE = re.compile(r"<!-- table (\{.*?\}) -->\n.*?<!-- end -->", re.DOTALL)


def write(
    results: dict[str, Rows], folder: Path, where: dict[str, Any] | None = None
) -> str:
    """Writes `benchmarks.json`, and `benchmarks.md`, whose text it returns.

    Results of other suites in the folder are kept. By default, `where` they were
    measured is this machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, where = folder / "benchmarks.json", where or machine()
    suites: Suites = stored(file) if file.exists() else {}
    suites |= {name: {"machine": where, "rows": rows} for name, rows in results.items()}
    parts = [
        f'{json.dumps(name)}: {{"machine": {json.dumps(suite["machine"])}, "rows": [\n'
        + ",\n".join(map(json.dumps, suite["rows"]))
        + "\n]}"
        for name, suite in suites.items()
    ]
    file.write_text('{"suites": {\n' + ",\n".join(parts) + "\n}}\n")
    # As read: a spread is a list then.
    text = markdown(stored(file), folder.name)
    (folder / "benchmarks.md").write_text(text)
    return text


def stored(file: Path) -> Suites:
    return json.loads(file.read_text())["suites"]


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
    """Rows with the same columns."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return str(Spread(*value))
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(x)}" for name, x in value.items())
    return "" if value is None else str(value)


def updated(text: str) -> str:
    """Returns the text of a page with the tables of the current results."""
    return TABLE.sub(_replacement, text)


def _replacement(found: re.Match[str]) -> str:
    wanted = json.loads(found[1])
    folder = RESULTS / wanted.get("results", "cpu")
    suite = stored(folder / "benchmarks.json")[wanted["suite"]]
    columns, pivot = wanted["columns"], wanted.get("pivot")
    rows = [
        row
        for row in suite["rows"]
        if all(row.get(name) in values for name, values in wanted["where"].items())
        and {*columns} <= row.keys()
    ]
    if wanted.get("largest"):
        rows = [
            {x: max(y.values()) if isinstance(y, dict) else y for x, y in row.items()}
            for row in rows
        ]
    if pivot:
        rows = _pivoted(rows, columns, *pivot)
    else:
        rows = [{name: row[name] for name in columns} for row in rows]
    # Blank lines, because a comment begins a block of HTML.
    machine = suite["machine"]
    versions = ["jax {jax}, optax {optax}".format(**machine)]
    if "driver" in machine:  # a GPU
        card = "optax_tokenaccum {optax_tokenaccum}, {device}, driver {driver}"
        versions.insert(0, card.format(**machine))
    versions += [x["compiled by"] for x in suite["rows"] if "compiled by" in x]
    made = f"{table(rows)}\n({', '.join(versions)})"
    return f"<!-- table {found[1]} -->\n\n{made}\n\n<!-- end -->"


def _pivoted(rows: Rows, columns: list[str], column: str, value: str) -> Rows:
    headings = dict.fromkeys(row[column] for row in rows)
    pivoted: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in columns)
        empty = dict(zip(columns, key, strict=True)) | headings
        made = row[value] if value in row else value.format(**row)
        pivoted.setdefault(key, empty)[row[column]] = made
    return list(pivoted.values())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument)
        page.write_text(updated(page.read_text()))
