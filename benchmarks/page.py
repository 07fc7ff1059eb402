"""Updates the tables of a page from the results in the repository.

    python -m benchmarks.page docs/performance.md

A table is between two comments. The first one says in JSON where it comes from:

    <!-- table {"suite": "speed", "where": {"k": [8]}, "columns": ["pair", "ratio"]} -->
    <!-- end -->

Rows come in the order of the results. With `"pivot": [column, value]` each value of
`column` is a column of its own, with the cells of `value`, which may also be a format
with the names of several: `"{v5e:.2f}; {H200:.2f}"`. With `"largest": true`, a way that
has several programs shows the largest one.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import Rows, table

RESULTS = Path(__file__).parent / "results"
TABLE = re.compile(r"<!-- table (\{.*?\}) -->\n.*?<!-- end -->", re.DOTALL)


def updated(text: str) -> str:
    """Returns the text of a page with the tables of the current results."""
    return TABLE.sub(_replacement, text)


def _replacement(found: re.Match[str]) -> str:
    wanted = json.loads(found[1])
    file = RESULTS / wanted.get("results", "cpu") / "benchmarks.json"
    suite = json.loads(file.read_text())["suites"][wanted["suite"]]
    rows = suite["rows"]
    for name, values in wanted["where"].items():
        rows = [row for row in rows if row.get(name) in values]
    columns = wanted["columns"]
    needed = [*columns, *wanted.get("pivot", [])[:1]]
    rows = [row for row in rows if all(name in row for name in needed)]
    if wanted.get("largest"):
        rows = [{name: _largest(x) for name, x in row.items()} for row in rows]
    if "pivot" in wanted:
        rows = _pivoted(rows, columns, *wanted["pivot"])
    else:
        rows = [{name: row[name] for name in columns} for row in rows]
    # Blank lines, because a comment begins a block of HTML.
    versions = "jax {jax}, optax {optax}".format(**suite["machine"])
    compilers = [x["compiled by"] for x in suite["rows"] if "compiled by" in x]
    versions = ", ".join([versions, *compilers])
    made = f"{table(rows)}\n({versions})\n" if rows else "Not measured yet.\n"
    return f"<!-- table {found[1]} -->\n\n{made}\n<!-- end -->"


def _largest(value: Any) -> Any:
    return max(value.values()) if isinstance(value, dict) else value


def _pivoted(rows: Rows, columns: list[str], column: str, value: str) -> Rows:
    headings = list(dict.fromkeys(row[column] for row in rows))
    pivoted: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in columns)
        empty = dict(zip(columns, key, strict=True)) | dict.fromkeys(headings)
        made = row[value] if value in row else value.format(**row)
        pivoted.setdefault(key, empty)[row[column]] = made
    return list(pivoted.values())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument)
        page.write_text(updated(page.read_text()))
