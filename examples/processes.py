"""Several processes that train as one: each has some of the devices, and their rows.

    start("10.0.0.1:1234", num_processes=2, process_id=0)
    mesh = make_mesh()
    state, metrics = step(state, spread_rows(batch, mesh))

Every process runs the same program on the same batches, and its devices get their rows
of each. What one process cannot do, none does: `together` and `agree`. One that dies
ends the others in about `TIMEOUT` seconds, and jax says so on their stderr. That is an
abort: no `finally` runs.
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
    """Connects the processes, before jax is asked for anything.

    Where one of them does not come, jax aborts the others after `2 * TIMEOUT` seconds.

    Args:
      coordinator: host and port on which process 0 listens. Without these three jax
        finds out by itself, on Slurm, GKE, Open MPI and Cloud TPU.
      num_processes: how many there are.
      process_id: which of them this is, from 0.

    Raises:
      PeerError: jax did not find out.
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
    # jax would keep it for a service of its own, and nobody could end the run with it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def make_mesh() -> Mesh:
    """All devices of all processes, in one row."""
    return jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(AxisType.Auto,))


def spread_rows(batch: Any, mesh: Mesh) -> Any:
    """Puts each device's rows of a batch on it.

    Args:
      batch: arrays of the host, the same on every process: all rows of all of them.
      mesh: from `make_mesh`; the rows must be a multiple of its devices.
    """
    rows = NamedSharding(mesh, P(DATA))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(rows, x, x.shape), batch
    )


def on_every_device(tree: Any, mesh: Mesh) -> Any:
    """Puts whole arrays on each device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


@contextlib.contextmanager
def together() -> Generator[None, None, None]:
    """Ends its block with an error on every process, if it fails on one.

    The others raise a `PeerError` that tells the cause. Nothing in the block may wait
    for other processes.
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
            raise PeerError(f"process {process} cannot go on. {error}")


def agree(values: dict[str, Any]) -> None:
    """Makes sure that every process has the same values.

    Processes with batches of other shapes would wait for each other for ever, and with
    other rows they would train on a mixture of both.

    Raises:
      PeerError: on every process, where they differ.
    """
    first, *others = map(json.loads, _exchange(json.dumps(values)))
    for process, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise PeerError(
                    f"all processes must begin alike: {name} is {value} on process 0 "
                    f"and {other.get(name)} on process {process}. Give them the same "
                    "command, the same data and a directory that they share"
                )


def _exchange(text: str) -> list[str]:
    """What every process says, in their order."""
    said = np.frombuffer(text.encode() + b"\n", np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(said)))
    padded = np.pad(said, (0, sizes.max() - len(said)))
    rows = multihost_utils.process_allgather(padded)
    return [
        row[: size - 1].tobytes().decode()
        for row, size in zip(rows, sizes, strict=True)
    ]


def _bound_reductions_on_cpu() -> None:
    """Ends, on CPUs, the wait for a process that lives and does not come.

    Before jax 0.9 XLA has no such flag, and a flag that it does not know ends it.
    """
    flag, given = "xla_cpu_collective_timeout_seconds", os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ >= (0, 9) and flag not in given:
        os.environ["XLA_FLAGS"] = f"{given} --{flag}={2 * TIMEOUT}"
