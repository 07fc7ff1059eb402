"""Runs the library on one CUDA GPU: is it exact, what does it hold, how fast is it?

    python -m benchmarks.gpu --out benchmarks/results/h200

It needs 80 GB of GPU memory, jax for CUDA, optax and flax, and takes at most eight
minutes. `--small` runs tiny inputs on any machine, to check that everything works; a
CPU does not tell the memory of a run.

A machine without a network gets all that it needs in the folder `.gpu`, next to jax:

    bash benchmarks/gpu/prepare.sh        # where there is a network
    bash .gpu/run.sh --out results        # on the machine, in the repository's root
    bash .gpu/run.sh pytest tests/core    # the same for tests of one device

Every case runs in a process of its own, because a device never forgets its peak, and
appends a line to `results.jsonl` when it ends: a run that is cut off tells something.
`--tables results.jsonl` writes the tables next to it again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import ahead, report
from benchmarks.gpu.cases import CASES, EXACT, NNX, SMALL, TIMED

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "Unable to initialize backend"


class Cases:
    """Runs cases; `out` gets `results.jsonl`, and `log.txt` with what cases print."""

    def __init__(self, out: Path, small: bool, minutes: float):
        out.mkdir(parents=True, exist_ok=True)
        self._file, self._log = out / "results.jsonl", out / "log.txt"
        self._small, self._lock, self._began = small, threading.Lock(), time.time()
        self._end = self._began + 60 * minutes
        self._environment = os.environ | {
            # What one process compiles, no other one has to.
            "JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp(),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if small:
            self._environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        else:  # jax must not take the CPU instead
            self._environment["JAX_PLATFORMS"] = "cuda"

    def run(self, *case: str, part: float | None = None) -> str:
        """Runs a case in this part of the device's memory; returns why it failed."""
        began, log = time.time(), ""
        of_memory = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": str(bool(part)).lower(),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(part or 0.95),
        }
        options = [*["--small"] * self._small, "--case", *case]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu", *options],
                env=self._environment | of_memory,
                capture_output=True,
                text=True,
                timeout=max(min(self._end - began, 240), 0.1),
            )
            log, lines = ended.stderr, ended.stdout.splitlines()
            found: dict[str, Any] = {"failed": log[-1500:] or "no message"}
            if not ended.returncode:
                found = {"rows": json.loads(lines[-1])}
        except subprocess.TimeoutExpired:
            found = {"failed": "took too long, or no time was left"}
        row = {"case": case, "took": round(time.time() - began, 1)} | found
        failed = found.get("failed", "")
        with self._lock:
            with self._file.open("a") as file, self._log.open("a") as full:
                file.write(json.dumps(row) + "\n")
                full.write(f"{case}\n{log[-20_000:]}\n")
            said = f"{' '.join(case)} {row['took']} s {failed[-300:]}"
            print(f"{time.time() - self._began:4.0f} s {said}", flush=True)
        return failed

    def together(self, processes: int, part: float | None, cases: Any) -> None:
        """Runs cases at the same time, and again alone if memory was too short."""
        with ThreadPoolExecutor(processes) as pool:
            failures = [*pool.map(lambda case: self.run(*case, part=part), cases)]
        for case, failed in zip(cases, failures, strict=True):
            if any(x in failed for x in OUT_OF_MEMORY):
                self.run(*case)


def run_all(cases: Cases) -> None:
    """Everything, in the order of what matters most."""
    cases.run("environment")
    of_ahead = [("memory", model, x) for model in EXACT[:2] for x in ahead.ALL_WAYS]
    with ThreadPoolExecutor(1) as other:  # these need little of the device
        few = [*(("exact", model) for model in EXACT), ("precision",)]
        other.submit(cases.together, len(few), None, few)
        cases.together(4, 0.16, of_ahead)
    cases.together(4, 0.23, [("memory", "decoder", x, "2") for x in TIMED if x != NNX])
    for model in ("decoder", *SMALL):
        cases.run("timing", model)


def run_few(cases: Cases) -> None:
    """One case of each kind."""
    some = [("environment",), ("exact", "float32"), ("timing", "decoder")]
    some += [("memory", "bfloat16", "train step"), ("timing", SMALL[0])]
    cases.together(2, None, [*some, ("precision",)])


def write_tables(file: Path) -> str:
    """Writes the tables of a `results.jsonl` next to it; returns them as text."""
    found = {}  # of a case that ran twice, the last
    for line in file.read_text().splitlines():
        row = json.loads(line)
        found[tuple(row["case"])] = row
    [machine] = found.pop(("environment",), {}).get("rows") or [{}]
    suites: dict[str, report.Rows] = {}
    for case, row in found.items():
        suites.setdefault(f"gpu {case[0]}", []).extend(row.get("rows", []))
        if "failed" in row:
            why = re.findall(r".*Error.*", row["failed"]) or [row["failed"]]
            failed = {"case": " ".join(case), "why": why[-1][:300]}
            suites.setdefault("failed", []).append(failed)
    return report.write(suites, file.parent, machine)


def main() -> None:
    """Reads the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--small", action="store_true", help="tiny inputs, anywhere")
    parser.add_argument("--minutes", type=float, default=8, help="when to stop")
    parser.add_argument("--case", nargs="+", help="run one case in this process")
    parser.add_argument("--tables", type=Path, help="write the tables of this file")
    options = parser.parse_args()
    if options.case:
        name, *arguments = options.case
        print(json.dumps(CASES[name](options.small, *arguments), default=float))
        return
    if not options.tables:
        cases = Cases(options.out, options.small, options.minutes)
        (run_few if options.small else run_all)(cases)
    text = write_tables(options.tables or options.out / "results.jsonl")
    print(text)
    sys.exit("\n## failed\n" in text)


if __name__ == "__main__":
    main()
