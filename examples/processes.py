"""Several processes train as one: each has some of the devices and their rows.

    start("10.0.0.1:1234", num_processes=2, process_id=0)
    mesh = make_mesh()
    state, metrics = step(state, spread_rows(batch, mesh))

Every process runs the same program on the same batches, and each device gets its rows
of every batch. With `together` and `agree`, an error on one process is raised on all of
them. If a process dies, jax ends the others after about `TIMEOUT` seconds and says so
on their stderr. This is an abort: no `finally` block runs.
"""

import contextlib
import json
import os
import signal
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA = "data"
TIMEOUT = 30  # seconds


class PeerError(Exception):
    """Another process failed, was not found, or was given something else."""


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connects the processes; call this before any other use of jax.

    If one of them does not connect, jax aborts the others after `2 * TIMEOUT` seconds.

    Args:
      coordinator: host and port on which process 0 listens. Without these three
        arguments, jax detects the values on Slurm, GKE, Open MPI and Cloud TPU.
      num_processes: the number of processes.
      process_id: the index of this process, from 0.

    Raises:
      PeerError: the processes did not find each other.
    """
    _bound_reductions_on_cpu()
    by_hand: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
        "cluster_detection_method": "deactivate",
    }
    try:
        jax.distributed.initialize(
            **(by_hand if coordinator else {}),
            initialization_timeout=2 * TIMEOUT,
            heartbeat_timeout_seconds=TIMEOUT,
            shutdown_timeout_seconds=TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"the processes did not find each other: {error}") from error
    # Otherwise a service of jax catches SIGTERM, and the signal cannot end the run.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def make_mesh() -> Mesh:
    """Makes a mesh of all devices of all processes, with one axis."""
    return jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(AxisType.Auto,))


def spread_rows(batch: Any, mesh: Mesh) -> Any:
    """Splits the rows of a batch over all devices.

    Args:
      batch: host arrays with all rows of all processes, the same on every process.
      mesh: from `make_mesh`; its number of devices must divide the number of rows.
    """
    rows = NamedSharding(mesh, P(DATA))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(rows, x, x.shape), batch
    )


def on_every_device(tree: Any, mesh: Mesh) -> Any:
    """Puts a copy of every array on each device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


@contextlib.contextmanager
def together() -> Generator[None, None, None]:
    """Raises an error on every process if the block fails on one.

    The other processes raise a `PeerError` that names the cause. Nothing in the block
    may wait for other processes.
    """
    mine = None
    try:
        yield
    except Exception as error:
        mine = error
    said = _exchange("" if mine is None else f"{type(mine).__name__}: {mine}")
    if mine is not None:
        raise mine
    for process, error in enumerate(said):
        if error:
            raise PeerError(f"process {process} cannot continue. {error}")


def agree(values: dict[str, Any]) -> None:
    """Checks that every process has the same values.

    Processes with batches of different shapes would wait for each other indefinitely.
    Processes with different rows would train on a mixture of both.

    Raises:
      PeerError: on every process, if the values differ.
    """
    first, *others = map(json.loads, _exchange(json.dumps(values)))
    for process, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise PeerError(
                    f"all processes must start alike: {name} is {value} on process 0 "
                    f"and {other.get(name)} on process {process}. Give them the same "
                    "command, the same data and a directory that they share"
                )


def _exchange(text: str) -> list[str]:
    """Returns the texts of all processes, in the order of the processes."""
    said = np.frombuffer(text.encode() + b"\n", np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(said)))
    padded = np.pad(said, (0, sizes.max() - len(said)))
    rows = multihost_utils.process_allgather(padded)
    return [
        row[: size - 1].tobytes().decode()
        for row, size in zip(rows, sizes, strict=True)
    ]


def _bound_reductions_on_cpu() -> None:
    """Limits how long CPUs wait for a process that is alive but does not join.

    Before jax 0.9, XLA does not have this flag, and an unknown flag ends the process.
    """
    flag, given = "xla_cpu_collective_timeout_seconds", os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ >= (0, 9) and flag not in given:
        os.environ["XLA_FLAGS"] = f"{given} --{flag}={2 * TIMEOUT}"
