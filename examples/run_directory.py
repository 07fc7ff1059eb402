"""Identifies the run in a directory by `settings.json`, which must not change."""

import json
import os
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"
TEMPORARY_SETTINGS = f"{SETTINGS}.tmp"
Settings = dict[str, str | int | float]


class CheckpointError(Exception):
    """The run cannot continue; the message says why and what to do."""


def is_of_run(directory: Path, settings: Settings) -> bool:
    """Whether a run with these settings began here; False if nothing is here yet.

    Raises:
      CheckpointError: the directory holds something else.
    """
    if not directory.exists():
        return False
    if directory.is_dir():
        names = {path.name for path in directory.iterdir()}
        if SETTINGS in names:
            check_settings(directory / SETTINGS, _read_settings(directory), settings)
            return True
        if names <= {TEMPORARY_SETTINGS}:
            return False
    raise CheckpointError(
        f"{directory} must be a new or empty directory or that of a run, and has no "
        f"{SETTINGS}: give another. Nothing was changed"
    )


def last_checkpoint(directory: Path) -> int | None:
    """The number of the last complete checkpoint, found by folder names alone."""
    names = (path.name for path in directory.glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=None)


def write_settings(directory: Path, settings: Settings) -> None:
    """Writes `settings.json` if the directory does not have one yet."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SETTINGS).exists():
        temporary = directory / TEMPORARY_SETTINGS
        with temporary.open("w") as file:
            json.dump(settings, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / SETTINGS)


def check_settings(path: Path, found: Any, settings: Settings) -> None:
    """Raises `CheckpointError` if the settings found at `path` differ."""
    if not isinstance(found, dict) or found.keys() != settings.keys():
        raise CheckpointError(
            f"{path} must hold the settings of a run, {', '.join(settings)}, and holds "
            "something else: give another directory. Nothing was changed"
        )
    for name, value in settings.items():
        if found[name] != value:
            raise CheckpointError(
                f"a run must keep the settings that it started with: {name} is "
                f"{found[name]} in {path}, and {value} was given. Give the former, or "
                "another directory for a new run. Nothing was changed"
            )


def _read_settings(directory: Path) -> Any:
    try:
        return json.loads((directory / SETTINGS).read_bytes())
    except ValueError:
        return None
