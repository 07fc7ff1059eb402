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
is left is to compute alike: the same devices and versions, and on a GPU
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`.

A run may go on on more devices or on fewer, and then ends alike but for rounding: the
sums that each device had of the open window are added up in as many groups as there are
now. Where several processes train together, all call both functions, with a directory
that they share, and the first one writes the settings and the metrics.
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
      processes.PeerError: another process cannot go on, or was given something else.
    """
    with processes.together():
        numbers = checkpoints(directory) if is_of_run(directory, settings) else []
    processes.agree(settings | {"the last checkpoint": max(numbers, default=None)})
    if not numbers:
        return Position(step.init(params), 0, 0)
    like = jax.tree.map(
        # Not the arrays: there may be no room for a second state.
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

    All programs are compiled first. The device is waited for only where a checkpoint is
    due. It is written while the training goes on, and counts only once it is complete.

    Args:
      directory: of the run.
      settings: as given to `resume`.
      save_every: micro-batches from checkpoint to checkpoint; one more at the end.
      step: from `make_train_step`.
      position: from `resume`; its state is donated to the step.
      micro_batches: all of the run, the same ones in the same order at every start.
      after_micro_batch: called with the number of micro-batches done.
      after_fetch: called before a checkpoint with the metrics since the one before it.
      place: puts a micro-batch on the devices.
      progress: wraps the list of programs to compile, see `TrainStep.compile`.
      **loss_kwargs: go to the step as they are.

    Returns:
      The state after the last micro-batch, which is also the last checkpoint.

    Raises:
      CheckpointError: a checkpoint cannot be written.
      OSError: the settings or the metrics cannot be written.
      processes.PeerError: another process cannot go on, or was given something else.
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
                # A checkpoint must never cover a line that a crash can take away.
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
    """Says what an error of this save, or of the one before it, means for the run."""
    try:
        yield
    except (OSError, ValueError) as error:  # The second is TensorStore's.
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
    """A line of the metrics file; a float's shortest text gives it back exactly."""
    values = {
        name: value.item()
        for name, value in metrics._asdict().items()
        if value is not None
    }
    line = {"micro_batch": number, "batch_sha256": fingerprint(batch)} | values
    return json.dumps(line).encode() + b"\n"


def _open_metrics(path: Path, size: int) -> BinaryIO:
    """Opens the metrics file for appending, cut to what the checkpoint covers.

    It is the first process's; what the others write goes nowhere.
    """
    if not processes.is_first():
        return tempfile.TemporaryFile()
    log = path.open("ab")
    log.truncate(size)
    return log
