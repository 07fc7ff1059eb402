"""Runs the suites and writes their measurements.

    python -m benchmarks --out results

The results are ratios of times, not times: the ways take turns in one process, and a
result is the median, the minimum and the maximum over the pairs. Before the timing,
every way must give the right gradient, or be known to be wrong by design. `--quick`
runs everything on small inputs, to check that it works. The results of other suites in
the folder are kept.

To put new results into docs/performance.md, run `python -m benchmarks.page
docs/performance.md` for its tables.
"""

import argparse
from pathlib import Path

from benchmarks import (
    ahead,
    chips,
    compile_time,
    host,
    programs,
    ragged,
    report,
    settings,
    speed,
)

SUITES = {
    "speed": speed.run,
    "programs": programs.run,
    "host": host.run,
    "compile": compile_time.run,
    "ragged": ragged.run,
}
ONLY_IF_NAMED = {"ahead": ahead.run}


def main() -> None:
    """Reads the command line; see `python -m benchmarks --help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--suite",
        nargs="+",
        choices=SUITES | ONLY_IF_NAMED,
        default=list(SUITES),
        help=f"the suites to run (default: all except {', '.join(ONLY_IF_NAMED)})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run on small inputs, to check that it works",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmark-results"),
        help="the folder for the results (default: %(default)s)",
    )
    options = parser.parse_args()
    if "ahead" in options.suite:
        chips.prepare()
    chosen = settings.QUICK if options.quick else settings.full()
    suites = SUITES | ONLY_IF_NAMED
    results = {name: suites[name](chosen) for name in options.suite}
    report.write({name: rows for name, rows in results.items() if rows}, options.out)
    print((options.out / "benchmarks.md").read_text())


if __name__ == "__main__":
    main()
