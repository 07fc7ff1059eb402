"""Measures what averaging micro-batches' means does, next to published figures.

    python examples/published_figures.py

The program measures the error of one gradient against the number of micro-batches k and
the spread of the lengths, reproduces other projects' fixtures, and measures how far
trained parameters end from full-batch training. The model is a small Llama initialized
with PyTorch's random numbers, so it reproduces Soup's fixture to six digits.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from llama import MAX_LENGTH, init, loss_fn, make_rows
from matplotlib.figure import Figure
from methods import NAIVE, REFERENCE
from naive_or_exact import EXACT, compare, gradient, train
from options import positive_int
from published_fixtures import FIXTURES, LEARNING_RATE
from rich import box
from rich.console import Console
from rich.table import Table

# k -> the naive error of another two-layer Llama, on other rows of 2 to 64 tokens.
EARLIER = {2: 0.10, 4: 0.11, 8: 0.27, 16: 0.42, 32: 0.94}

Found = list[dict[str, Any]]


def gradient_errors(k: int, seeds: int, low: int, high: int) -> dict[str, Any]:
    """Compares a gradient to the full batch's, for `seeds` models and batches."""
    found: dict[str, Any] = {"k": k, "lengths": f"{low} to {high}"}
    found |= {"naive": [], "exact": [], "cosine": []}
    for seed in range(seeds):
        run = loss_fn, init(seed, width=32, layers=2), make_rows(seed, low, high)
        full = gradient(REFERENCE, *run)
        naive = compare(full, gradient(NAIVE, *run, k))
        exact = compare(full, gradient(EXACT, *run, k))
        found["naive"].append(naive["relative L2"])
        found["cosine"].append(naive["cosine"])
        found["exact"].append(exact["relative L2"])
    return found


def trained_distances(ks: Iterable[int], updates: int) -> Found:
    """Compares parameters to full-batch training after `updates` updates, by k."""
    batches = [make_rows(1000 + i) for i in range(updates)]
    run = loss_fn, init(0, width=32, layers=2), batches
    full, losses = train(REFERENCE, *run, 1, LEARNING_RATE)
    found = []
    for k in ks:
        naive, _ = train(NAIVE, *run, k, LEARNING_RATE)
        exact, _ = train(EXACT, *run, k, LEARNING_RATE)
        row: dict[str, Any] = {"k": k, "full_batch_losses": losses}
        row["naive"] = compare(full, naive)["relative L2"]
        row["exact"] = compare(full, exact)["relative L2"]
        found.append(row)
    return found


def show(x: float) -> str:
    """Formats a number: four digits, or one digit if it can only be rounding."""
    return f"{x:.0e}" if 0 < abs(x) < 1e-5 else f"{x:.4g}"


def print_table(
    console: Console, title: str, headers: list[str], rows: Iterable[list[str]]
) -> None:
    """Prints a table: the first column left-aligned, the numbers right-aligned."""
    table = Table(title=title, box=box.SIMPLE_HEAD, min_width=len(title))
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_errors(console: Console, title: str, found: Found) -> None:
    """Prints the errors of one gradient, summarized over the seeds."""
    headers = ["k", "lengths", "naive", "least", "most", "cosine", "earlier", "exact"]
    rows = []
    for row in found:
        values = np.median(row["naive"]), min(row["naive"]), max(row["naive"])
        earlier = EARLIER[row["k"]] if row["lengths"] == f"2 to {MAX_LENGTH}" else ""
        cosine, exact = np.median(row["cosine"]), np.median(row["exact"])
        cells = [str(row["k"]), row["lengths"], *(f"{value:.2g}" for value in values)]
        rows.append([*cells, f"{cosine:.2f}", str(earlier), f"{exact:.0e}"])
    print_table(console, title, headers, rows)


def write_picture(path: Path, errors: Found, trained: Found) -> None:
    """Draws the error of one gradient, and the distance of trained parameters."""
    figure = Figure(figsize=(9.6, 4.4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("Error of one gradient (relative L2)")
    right.set_title("Distance of trained parameters (relative L2)")
    ks = [row["k"] for row in errors]
    looks = [("naive", NAIVE, "#d1342f"), ("exact", EXACT, "#1f6fb4")]
    for name, method, color in looks:
        values = np.array([row[name] for row in errors])
        look = {"color": color, "marker": "o", "label": f"{name}: {method}"}
        left.plot(ks, np.median(values, axis=1), **look)
        left.fill_between(ks, values.min(1), values.max(1), color=color, alpha=0.2)
        right.plot(ks, [row[name] for row in trained], **look)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.set_xlabel("micro-batches in a window, k")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=9,
        metavar="N",
        help="models and batches behind an error of one gradient (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer k, lengths and updates"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("published_figures"),
        metavar="DIRECTORY",
        help="for figures.json and the_bug.png (%(default)s)",
    )
    options = parser.parse_args()
    ks, spreads, updates = tuple(EARLIER), (0, 8, 16, 24), 40
    if options.quick:
        ks, spreads, updates = (2, 8, 32), (0,), 3
    console = Console(highlight=False, markup=False)
    # By default, a GPU rounds the factors of float32 matrix products to TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    options.out.mkdir(parents=True, exist_ok=True)

    console.print(
        f"naive: {NAIVE}, exact: {EXACT}; earlier: the naive error of another Llama of "
        "two layers on other rows, expected to grow alike, not to be equal"
    )
    fixtures = [row for measure in FIXTURES for row in measure()]
    print_table(
        console,
        "What others published, and what comes out here",
        ["published by", "quantity", "right", "exact", "wrong", "naive"],
        ([*row[:3], show(row.exact), row.wrong, show(row.naive)] for row in fixtures),
    )
    title = f"Relative L2 error of one gradient, median of {options.seeds}"
    errors = [gradient_errors(k, options.seeds, 2, MAX_LENGTH) for k in ks]
    print_errors(console, title, errors)
    spread = [gradient_errors(ks[-1], options.seeds, 33 - s, 33 + s) for s in spreads]
    spread.append(errors[-1])
    print_errors(console, title, spread)
    trained = trained_distances(ks, updates)
    losses = trained[0]["full_batch_losses"]
    print_table(
        console,
        f"Relative L2 distance after {updates} updates "
        f"(full batch's loss: {losses[0]:.2f} to {losses[-1]:.2f})",
        ["k", "naive", "exact"],
        ([str(row["k"]), show(row["naive"]), show(row["exact"])] for row in trained),
    )

    content = {
        "jax": jax.__version__,
        "optax": optax.__version__,
        "device": str(jax.devices()[0].device_kind),
        "fixtures": [row._asdict() for row in fixtures],
        "errors": errors,
        "spread": spread,
        "trained": trained,
    }
    text = json.dumps(content, indent=2) + "\n"
    (options.out / "figures.json").write_text(text, encoding="utf-8")
    write_picture(options.out / "the_bug.png", errors, trained)
    console.print(f"written: figures.json and the_bug.png in {options.out}")


if __name__ == "__main__":
    main()
