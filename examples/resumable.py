"""A training run that can be killed at any moment, and ends as if it never had been.

    position = resume(directory, settings, step, params)
    state = train(directory, settings, 50, step, position, micro_batches)

The same two lines begin a run and go on with it, also in the middle of a window:
parameters, optimizer state, sums, metrics and the order of the data are bit for bit
those of a run that nothing interrupted. The directory holds `settings.json`, which says
whose it is, `metrics.jsonl`, a line a micro-batch, and the last `KEPT` checkpoints,
each in a folder named after the micro-batches that were done.

Bit for bit, because the whole state is saved, the sums of the open window within; the
place in the data is the number of micro-batches done, and `micro_batches` depends on
`settings` alone; and metrics are on disk before the checkpoint that covers them. What
is left is to compute alike: the same device and versions, and on a GPU
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from optax_tokenaccum import StepMetrics, StepState, TrainStep

SETTINGS, METRICS = "settings.json", "metrics.jsonl"
TEMPORARY_SETTINGS = f"{SETTINGS}.tmp"
KEPT = 3
Settings = dict[str, str | int | float]


class CheckpointError(Exception):
    """The run cannot go on from here; the message says why and what to do."""


class Position(NamedTuple):
    """Where a run stands.

    Attributes:
      state: all that the step carries.
      micro_batches: how many are done, the place in the data.
      metrics_bytes: the size of their lines in the metrics file.
    """

    state: StepState
    micro_batches: int
    metrics_bytes: int


def resume(
    directory: Path, settings: Settings, step: TrainStep, params: Any
) -> Position:
    """Reads the last complete checkpoint, or begins where there is none.

    It only reads: whatever it refuses to go on from is left as it is.

    Args:
      directory: of the run; it need not exist.
      settings: everything that decides on the arithmetic and on the order of the data,
        as JSON can hold it.
      step: from `make_train_step`.
      params: the parameters that the run begins with; of a run that goes on, their
        shapes are used.

    Raises:
      CheckpointError: the directory is not of such a run, began with other settings,
        or its last checkpoint or its metrics are damaged.
    """
    if not _is_of_a_run(directory):
        return Position(step.init(params), 0, 0)
    _check_settings(directory / SETTINGS, _read_settings(directory), settings)
    # Leftovers of a save that was killed are cleared away by `train`, not here.
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        numbers = sorted(manager.all_steps())
        if not numbers:
            return Position(step.init(params), 0, 0)
        return _restore(manager, directory, numbers, settings, step, params)


def train(
    directory: Path,
    settings: Settings,
    save_every: int,
    step: TrainStep,
    position: Position,
    micro_batches: Sequence[Any],
    after_micro_batch: Callable[[int], None] = lambda done: None,
    **loss_kwargs: Any,
) -> StepState:
    """Trains on the micro-batches that are not done yet.

    The device is waited for only where a checkpoint is due. It is written while the
    training goes on, and counts only once it is complete.

    Args:
      directory: of the run.
      settings: as given to `resume`.
      save_every: micro-batches from checkpoint to checkpoint; one more at the end.
      step: from `make_train_step`.
      position: from `resume`; its state is donated to the step.
      micro_batches: all of the run, the same ones in the same order at every start.
      after_micro_batch: called with the number of micro-batches done.
      **loss_kwargs: go to the step as they are.

    Returns:
      The state after the last micro-batch, which is also the last checkpoint.
    """
    _write_settings(directory, settings)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(KEPT),
        cleanup_tmp_directories=True,
    )
    state, done, _ = position
    waiting: list[StepMetrics] = []
    with (
        _open_metrics(directory / METRICS, position.metrics_bytes) as log,
        ocp.CheckpointManager(directory.absolute(), options=options) as manager,
    ):
        for batch in micro_batches[done:]:
            state, metrics = step(state, batch, **loss_kwargs)
            waiting.append(metrics)
            done += 1
            if done % save_every == 0 or done == len(micro_batches):
                begin = done - len(waiting)
                fetched = jax.device_get(waiting)
                for number, metrics in enumerate(fetched, start=begin + 1):
                    log.write(_line(number, micro_batches[number - 1], metrics))
                # A checkpoint must never cover a line that a crash can take away.
                log.flush()
                os.fsync(log.fileno())
                record = {
                    "micro_batches": done,
                    "metrics_bytes": log.tell(),
                    "state_sha256": fingerprint(state),
                    "settings": settings,
                }
                manager.save(
                    done,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardSave(state),
                        position=ocp.args.JsonSave(record),
                    ),
                )
                waiting.clear()
            after_micro_batch(done)
    return state


def fingerprint(tree: Any) -> str:
    """The SHA-256 of every array's dtype, shape and bytes."""
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        sha256.update(f"{array.dtype}{array.shape}".encode())
        sha256.update(array.tobytes())
    return sha256.hexdigest()


def _line(number: int, batch: Any, metrics: StepMetrics) -> bytes:
    """A line of the metrics file; a float's shortest text gives it back exactly."""
    values = {
        name: value.item()
        for name, value in metrics._asdict().items()
        if value is not None
    }
    line = {"micro_batch": number, "batch_sha256": fingerprint(batch)} | values
    return json.dumps(line).encode() + b"\n"


def _open_metrics(path: Path, size: int) -> BinaryIO:
    """Opens the metrics file for appending, cut to what the checkpoint covers."""
    log = path.open("ab")
    log.truncate(size)
    return log


def _is_of_a_run(directory: Path) -> bool:
    """Whether a run began here; False where there is nothing at all."""
    if not directory.exists():
        return False
    if directory.is_dir():
        names = {path.name for path in directory.iterdir()}
        if SETTINGS in names:
            return True
        if names <= {TEMPORARY_SETTINGS}:
            return False
    raise CheckpointError(
        f"{directory} must be a new or empty directory or that of a run, and has no "
        f"{SETTINGS}: give another. Nothing was changed"
    )


def _read_settings(directory: Path) -> Any:
    try:
        return json.loads((directory / SETTINGS).read_bytes())
    except ValueError:
        return None


def _write_settings(directory: Path, settings: Settings) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SETTINGS).exists():
        temporary = directory / TEMPORARY_SETTINGS
        with temporary.open("w") as file:
            json.dump(settings, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / SETTINGS)


def _check_settings(path: Path, found: Any, settings: Settings) -> None:
    if not isinstance(found, dict) or found.keys() != settings.keys():
        raise CheckpointError(
            f"{path} must hold the settings of a run, {', '.join(settings)}, and holds "
            "something else: give another directory. Nothing was changed"
        )
    for name, value in settings.items():
        if found[name] != value:
            raise CheckpointError(
                f"a run goes on with the settings that it began with: {name} is "
                f"{found[name]} in {path}, and {value} was given. Give the former, or "
                "another directory for a new run. Nothing was changed"
            )


@contextlib.contextmanager
def _quiet_if_it_fails() -> Generator[None, None, None]:
    """Hides the tracebacks of the reads that Orbax drops when another one fails.

    Some are printed late, so after a failure this lasts: the program is to end.
    """
    logger = logging.getLogger("asyncio")
    before = logger.disabled, sys.unraisablehook
    logger.disabled, sys.unraisablehook = True, lambda _: None
    yield
    logger.disabled, sys.unraisablehook = before


def _restore(
    manager: ocp.CheckpointManager,
    directory: Path,
    numbers: list[int],
    settings: Settings,
    step: TrainStep,
    params: Any,
) -> Position:
    """Reads the last checkpoint, and checks it against what it says of itself."""
    number = numbers[-1]
    path = directory / str(number)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        jax.eval_shape(step.init, params),
    )

    def read(name: str, args: Any) -> Any:
        return manager.restore(number, args=ocp.args.Composite(**{name: args}))[name]

    try:
        record = read("position", ocp.args.JsonRestore())
        _check_settings(path, record["settings"], settings)
        with _quiet_if_it_fails():
            state = read("state", ocp.args.StandardRestore(target))
        saved = record["micro_batches"], record["state_sha256"]
        if (number, fingerprint(state)) != saved:
            raise ValueError("this is not what was saved")
        position = Position(state, number, int(record["metrics_bytes"]))
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises many classes, Exception itself too.
        then = (
            f"goes on from {numbers[-2]}, the checkpoint before it"
            if len(numbers) > 1
            else "begins anew, since there is no checkpoint before it"
        )
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(
            f"checkpoint {path} is damaged, or of another program "
            f"({textwrap.shorten(cause, 120)}). Nothing was changed: move it out of "
            f"{directory}, and the same command {then}"
        ) from error
    log = directory / METRICS
    if not log.is_file() or log.stat().st_size < position.metrics_bytes:
        raise CheckpointError(
            f"{log} must hold the {position.metrics_bytes} bytes of metrics that go "
            f"with checkpoint {path}, and is missing or shorter: put it back, or give "
            "another directory for a new run. Nothing was changed"
        )
    return position
