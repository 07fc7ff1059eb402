"""A training run that can be killed at any moment without changing its result.

    position = resume(directory, settings, step, params)
    state = train(directory, settings, 50, step, position, micro_batches)

The same two lines start a run and resume it, also in the middle of a window. Compared
with an uninterrupted run, parameters, optimizer state, sums, metrics and the order of
the data are equal bit for bit. The directory holds `settings.json`, which identifies
the run, `metrics.jsonl`, with one line per micro-batch, and the last `KEPT`
checkpoints, each in a folder named after the number of micro-batches done.

This works for three reasons. The whole state is saved, including the sums of the open
window. The place in the data is the number of micro-batches done, and `micro_batches`
depends only on `settings`. Metrics are on disk before the checkpoint that covers them.
In addition, the arithmetic must be the same: use the same devices and versions, and on
a GPU set `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.

A run can resume on more or fewer devices, and the result is then the same up to
rounding: the devices' sums of the open window are regrouped for the new devices. If
several processes train together, all of them call both functions with a directory that
they share, and the first process writes the settings and the metrics.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import textwrap
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import processes
from checksum import checksum
from restore import checkpoints, groups_of, restore
from run_directory import CheckpointError, Settings, is_of_run, write_settings

from optax_tokenaccum import StepMetrics, StepState, TrainStep

METRICS = "metrics.jsonl"
KEPT = 3


class Position(NamedTuple):
    """The progress of a run.

    Attributes:
      state: the state of the train step.
      micro_batches: the number of micro-batches done, which is the place in the data.
      metrics_bytes: the size of their lines in the metrics file.
    """

    state: StepState
    micro_batches: int
    metrics_bytes: int


def resume(
    directory: Path, settings: Settings, step: TrainStep, params: Any
) -> Position:
    """Reads the last complete checkpoint, or starts a new run if there is none.

    This function only reads: it leaves a directory that it rejects unchanged.

    Args:
      directory: the directory of the run; it need not exist.
      settings: everything that affects the arithmetic and the order of the data, as
        values that JSON can hold.
      step: from `make_train_step`.
      params: the initial parameters; only their shapes matter if the run resumes.

    Raises:
      CheckpointError: the directory holds something else or a run with other settings,
        or its last checkpoint or its metrics are damaged.
      processes.PeerError: another process cannot continue, or was given something else.
    """
    with processes.together():
        numbers = checkpoints(directory) if is_of_run(directory, settings) else []
    processes.agree(settings | {"the last checkpoint": max(numbers, default=None)})
    if not numbers:
        return Position(step.init(params), 0, 0)
    like = jax.tree.map(
        # Keeps only shapes: there may be no memory for a second state.
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        step.init(params),
    )
    state, record = restore(directory, numbers, settings, like)
    done, metrics_bytes = record["micro_batches"], record["metrics_bytes"]
    with processes.together():
        log = directory / METRICS
        if not log.is_file() or log.stat().st_size < metrics_bytes:
            raise CheckpointError(
                f"{log} must hold the {metrics_bytes} bytes of metrics that go with "
                f"checkpoint {directory / str(done)}, and is missing or shorter: put "
                "it back, or give another directory for a new run. Nothing was changed"
            )
    return Position(state, done, metrics_bytes)


def train(
    directory: Path,
    settings: Settings,
    save_every: int,
    step: TrainStep,
    position: Position,
    micro_batches: Sequence[Any],
    after_micro_batch: Callable[[int], None] = lambda done: None,
    after_fetch: Callable[[list[StepMetrics]], None] = lambda metrics: None,
    place: Callable[[Any], Any] = lambda batch: batch,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
    **loss_kwargs: Any,
) -> StepState:
    """Trains on the micro-batches that are not done yet.

    All programs are compiled first. The host waits for the device only when a
    checkpoint is due. A checkpoint is written while training continues, and counts only
    once it is complete.

    Args:
      directory: the directory of the run.
      settings: as given to `resume`.
      save_every: micro-batches between checkpoints; there is also one at the end.
      step: from `make_train_step`.
      position: from `resume`; its state is donated to the step.
      micro_batches: all micro-batches of the run, the same ones in the same order at
        every start.
      after_micro_batch: called with the number of micro-batches done.
      after_fetch: called before a checkpoint with the metrics since the previous one.
      place: puts a micro-batch on the devices.
      progress: wraps the list of programs to compile, see `TrainStep.compile`.
      **loss_kwargs: passed to the step unchanged.

    Returns:
      The state after the last micro-batch, which is also the last checkpoint.

    Raises:
      CheckpointError: a checkpoint cannot be written.
      OSError: the settings or the metrics cannot be written.
      processes.PeerError: another process cannot continue, or was given something else.
    """
    processes.agree({"save_every": save_every, "micro-batches": len(micro_batches)})
    with processes.together():
        if processes.is_first():
            write_settings(directory, settings)
        opened = _open_metrics(directory / METRICS, position.metrics_bytes)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(KEPT),
        cleanup_tmp_directories=True,
    )
    state, done, _ = position
    waiting: list[StepMetrics] = []
    with (
        opened as log,
        ocp.CheckpointManager(directory.absolute(), options=options) as manager,
    ):
        left = micro_batches[done:]
        shapes = {str(jax.tree.map(jax.typeof, batch)): batch for batch in left}
        if shapes:
            batches = map(place, shapes.values())
            step.compile(state, batches, progress=progress, **loss_kwargs)
        for batch in left:
            state, metrics = step(state, place(batch), **loss_kwargs)
            waiting.append(metrics)
            done += 1
            if done % save_every == 0 or done == len(micro_batches):
                begin = done - len(waiting)
                fetched = jax.device_get(waiting)
                after_fetch(fetched)
                for number, metrics in enumerate(fetched, start=begin + 1):
                    log.write(_line(number, micro_batches[number - 1], metrics))
                # A checkpoint must never cover a line that a crash can lose.
                log.flush()
                os.fsync(log.fileno())
                record = {
                    "micro_batches": done,
                    "metrics_bytes": log.tell(),
                    "state_checksum": checksum(state),
                    "groups": groups_of(state),
                    "settings": settings,
                }
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    position=ocp.args.JsonSave(record),
                )
                with _or_not_written(directory):
                    manager.save(done, args=items)
                waiting.clear()
            after_micro_batch(done)
        with _or_not_written(directory):
            manager.wait_until_finished()
    return state


@contextlib.contextmanager
def _or_not_written(directory: Path) -> Generator[None, None, None]:
    """Turns an error of this save, or of the previous one, into a `CheckpointError`."""
    try:
        yield
    except (OSError, ValueError) as error:  # TensorStore raises ValueError.
        raise CheckpointError(
            f"a checkpoint in {directory} could not be written "
            f"({textwrap.shorten(str(error), 200)}). The complete ones are intact: "
            "make room, and the same command resumes from the last of them"
        ) from error


def fingerprint(tree: Any) -> str:
    """The SHA-256 of the dtype, shape and bytes of every array on the host."""
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        sha256.update(f"{array.dtype}{array.shape}".encode())
        sha256.update(array.tobytes())
    return sha256.hexdigest()


def _line(number: int, batch: Any, metrics: StepMetrics) -> bytes:
    """Makes a line of the metrics file, from which floats read back exactly."""
    values = {
        name: value.item()
        for name, value in metrics._asdict().items()
        if value is not None
    }
    line = {"micro_batch": number, "batch_sha256": fingerprint(batch)} | values
    return json.dumps(line).encode() + b"\n"


def _open_metrics(path: Path, size: int) -> BinaryIO:
    """Opens the metrics file for appending, cut to the `size` of a checkpoint's lines.

    Only the first process writes this file; the others write to a temporary file.
    """
    if not processes.is_first():
        return tempfile.TemporaryFile()
    log = path.open("ab")
    log.truncate(size)
    return log
