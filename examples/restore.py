"""Reads the last checkpoint of a run, checks it and lays it out for the devices."""

import contextlib
import logging
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import processes
from checksum import checksum
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from run_directory import CheckpointError, Settings, check_settings

from optax_tokenaccum import StepState, regroup_sums


def checkpoints(directory: Path) -> list[int]:
    """The numbers of the complete checkpoints, in order."""
    with _reader(directory) as manager:
        return sorted(manager.all_steps())


def restore(
    directory: Path, numbers: list[int], settings: Settings, like: StepState
) -> tuple[StepState, dict[str, Any]]:
    """Reads the last checkpoint and checks it against the record saved with it.

    Args:
      directory: the directory of the run.
      numbers: the numbers of all checkpoints.
      settings: the settings of the run.
      like: the shapes and shardings of a state of the step that resumes.

    Returns:
      The state in the layout of `like`, and the record saved with it.

    Raises:
      CheckpointError: the checkpoint is damaged, or from a run with other settings.
      processes.PeerError: another process cannot read it.
    """
    number = numbers[-1]
    path = directory / str(number)
    with processes.together(), _or_damaged(directory, numbers):
        with _reader(directory) as manager:

            def read(name: str, args: Any) -> Any:
                items = ocp.args.Composite(**{name: args})
                return manager.restore(number, args=items)[name]

            record = read("position", ocp.args.JsonRestore())
            check_settings(path, record["settings"], settings)
            target = _as_saved(like, record["groups"])
            with _quiet_if_it_fails():
                state = read("state", ocp.args.StandardRestore(target))
        saved = record["micro_batches"], record["state_checksum"]
        record["metrics_bytes"] = int(record["metrics_bytes"])
    with _or_damaged(directory, numbers):
        if (number, checksum(state)) != saved:
            raise ValueError("this is not what was saved")
    return regroup_sums(state, like), record


def groups_of(state: StepState) -> int | None:
    """The number of sums of each gradient, or None if they have no leading axis."""
    sums, params = state.opt_state.acc_grads, state.params
    (sum_, *_), (param, *_) = map(jax.tree.leaves, (sums, params))
    return sum_.shape[0] if sum_.ndim > param.ndim else None


def _reader(directory: Path) -> ocp.CheckpointManager:
    """Makes a reader that does not wait for other processes, which may have failed.

    It does not remove the leftovers of a killed save: `train` does.
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
    return ocp.CheckpointManager(directory.absolute(), options=options)


@contextlib.contextmanager
def _quiet_if_it_fails() -> Generator[None, None, None]:
    """Hides the tracebacks of the reads that Orbax drops when another read fails.

    Some tracebacks are printed late, so they stay hidden after a failure: the program
    is about to end.
    """
    logger = logging.getLogger("asyncio")
    before = logger.disabled, sys.unraisablehook
    logger.disabled, sys.unraisablehook = True, lambda _: None
    yield
    logger.disabled, sys.unraisablehook = before


@contextlib.contextmanager
def _or_damaged(directory: Path, numbers: list[int]) -> Generator[None, None, None]:
    """Turns any error into a `CheckpointError` about the last checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises many classes, even Exception itself.
        then = (
            f"resumes from {numbers[-2]}, the checkpoint before it"
            if len(numbers) > 1
            else "starts from the beginning, since there is no checkpoint before it"
        )
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(
            f"checkpoint {directory / str(numbers[-1])} is damaged, or was written by "
            f"another program ({textwrap.shorten(cause, 120)}). Nothing was changed: "
            f"move it out of {directory}, and the same command {then}"
        ) from error


def _as_saved(like: StepState, groups: int | None) -> StepState:
    """The shapes of a checkpoint with `groups` sums, for the devices of `like`."""

    def shape_of(acc: Any, param: Any) -> jax.ShapeDtypeStruct:
        shape = param.shape if groups is None else (groups, *param.shape)
        sharding = acc.sharding
        fits = shape == acc.shape or (
            len(shape) == acc.ndim and shape[0] % acc.shape[0] == 0
        )
        if not fits and isinstance(sharding, NamedSharding):
            # The devices cannot split the sums evenly, so each device gets all of them.
            sharding = NamedSharding(sharding.mesh, P())
        return jax.ShapeDtypeStruct(shape, acc.dtype, sharding=sharding)

    sums = jax.tree.map(shape_of, like.opt_state.acc_grads, like.params)
    return like._replace(opt_state=like.opt_state._replace(acc_grads=sums))
