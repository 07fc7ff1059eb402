"""Runs the suites and writes their measurements.

    python -m benchmarks --out results

The results are ratios of times, not times: the ways take turns in one process, and a
result is the median, the minimum and the maximum over the pairs. Before the timing,
every way must give the right gradient, or be known to be wrong by design. `--quick`
runs everything on small inputs, to check that it works. The results of other suites in
the folder are kept. `benchmarks.report` puts results into the tables of pages.
"""

import argparse
from pathlib import Path

from benchmarks import ahead, chips, host, ragged, report, speed, tracing

SUITES = {"speed": speed.run, "ragged": ragged.run, "ahead": ahead.run}
SUITES |= {"trace": tracing.run, "host": host.run}


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
        choices=SUITES,
        default=["speed", "ragged"],
        help="the suites to run (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="run on small inputs")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmark-results"),
        help="the folder for the results (default: %(default)s)",
    )
    options = parser.parse_args()
    if "ahead" in options.suite:
        chips.prepare()
    results = {name: SUITES[name](options.quick) for name in options.suite}
    print(report.write({x: rows for x, rows in results.items() if rows}, options.out))


if __name__ == "__main__":
    main()
