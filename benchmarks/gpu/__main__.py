"""Runs the cases in processes of their own; see `benchmarks.gpu`."""

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

import benchmarks.gpu
from benchmarks import report
from benchmarks.gpu.cases import CASES, EXACT, NNX, TIMED

OURS = "train step", "window step", "window_value_and_grad"
BY_HAND = "scan by hand", "pair by hand", "gradient by hand"
MEMORY = {
    "float32": ("gradients alone", "optax.MultiSteps", *BY_HAND, *OURS),
    "bfloat16": ("gradients alone", *BY_HAND, *OURS),
}
SEARCHED = "train step", "pair by hand"
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

    def run(self, *case: str, part: float | None = None) -> dict[str, Any]:
        """Runs a case in this part of the device's memory."""
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
            failed = {"failed": log[-1500:] or f"exit code {ended.returncode}"}
            found = failed if ended.returncode else {"rows": json.loads(lines[-1])}
        except subprocess.TimeoutExpired:
            found = {"failed": "took too long, or no time was left"}
        row = {"case": case, "took": round(time.time() - began, 1)} | found
        with self._lock:
            with self._file.open("a") as file, self._log.open("a") as full:
                file.write(json.dumps(row) + "\n")
                full.write(f"{case}\n{log[-20_000:]}\n")
            at, short = time.time() - self._began, found.get("failed", "")[-300:]
            print(f"{at:4.0f} s {' '.join(case)} {row['took']} s {short}", flush=True)
        return row

    def together(self, processes: int, part: float | None, cases: Any) -> list[Any]:
        """Runs cases at the same time, and again alone if memory was too short."""
        with ThreadPoolExecutor(processes) as pool:
            rows = [*pool.map(lambda case: self.run(*case, part=part), cases)]
        return [
            self.run(*row["case"])
            if any(x in row.get("failed", "") for x in OUT_OF_MEMORY)
            else row
            for row in rows
        ]


def run_all(cases: Cases) -> None:
    """Everything, in the order of what matters most."""
    cases.run("environment")
    of_ahead = [("memory", model, x) for model, own in MEMORY.items() for x in own]
    with ThreadPoolExecutor(1) as other:  # these need little of the device
        few = [("exact", model) for model in EXACT]
        few += [("largest", method) for method in SEARCHED]
        of_few = other.submit(cases.together, len(few), None, few)
        cases.together(4, 0.16, of_ahead)
    cases.together(4, 0.23, [("memory", "decoder", x, "2") for x in TIMED if x != NNX])
    cases.run("timing")
    found = {row["case"]: row.get("rows") for row in of_few.result()}
    if ours := found["largest", "train step"]:
        for method in SEARCHED:  # by hand, it is too large
            cases.run("fit", method, str(ours[0]["rows"]), part=0.95)
    cases.run("train")


def run_few(cases: Cases) -> None:
    """One case of each kind."""
    cases.run("environment")
    some = [("exact", "float32"), ("largest", "train step"), ("timing",), ("train",)]
    some += [("memory", "bfloat16", "train step"), ("fit", "train step", "2")]
    cases.together(2, None, some)


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
    report.write(suites, file.parent, machine)
    return (file.parent / "benchmarks.md").read_text()


def main() -> None:
    """Reads the command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--small", action="store_true", help="tiny inputs, anywhere")
    parser.add_argument("--minutes", type=float, default=8.5, help="when to stop")
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
