"""`examples/finetune.py --checkpoint-dir` in processes, on a small data set."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import finetune

K, SAVE_EVERY = 4, 5


class Command(NamedTuple):
    """The command of one test file.

    Attributes:
      folder: for the data, and for compiled programs that processes share.
      options: those of this file, as words of the command line.
    """

    folder: Path
    options: tuple[Any, ...]

    def words(self, directory, *more):
        words = [
            *("--checkpoint-dir", directory, "--save-every", SAVE_EVERY),
            *("--gradient-accumulation-steps", K, "--data", self.folder / "data.jsonl"),
            *("--max-length", 48, "--d-model", 32, "--layers", 1),
            *self.options,
            *more,
        ]
        return [*map(str, words)]

    def start(self, log, directory, *more, devices=1, cached=False, variables=()):
        environment = os.environ | dict(variables)
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
        if cached:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "cache")
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        words = [sys.executable, finetune.__file__, *self.words(directory, *more)]
        with log.open("wb") as file:
            return subprocess.Popen(words, env=environment, stdout=file, stderr=file)


def new_command(folder, *options):
    """Write the data set to `folder`, and return a command that trains on it."""
    lines = (
        {"prompt": f"prompt {i}", "completion": "abcdefgh"[i % 8] * (1 + 7 * i % 29)}
        for i in range(40)
    )
    data = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "data.jsonl").write_text(data)
    return Command(folder, options)
