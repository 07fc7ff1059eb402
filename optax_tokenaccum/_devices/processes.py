"""Checks that all processes that run a program give it the same shapes."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from optax_tokenaccum._core.trees import Batch

TIMEOUT_SECONDS = 300
# A counter per group of processes: the groups of other meshes may have made more or
# fewer comparisons.
_comparisons: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """Compares a step's arguments across the processes of a mesh, once per new shape.

    Processes that disagree run different programs, which still communicate with each
    other: they compute garbage, or wait for each other forever. So each new shape is
    compared before its first use, over the channel that `jax.distributed` keeps between
    processes. No program waits on this channel.
    """

    def __init__(self, mesh: Mesh):
        self._processes = tuple(sorted({d.process_index for d in mesh.devices.flat}))
        self._agreed: set[str] = set()

    def check(self, batch: Batch, *others: Any) -> None:
        """Raises if another process gives other shapes, or other numbers as `others`.

        A number is `None` if it is not known. `TimeoutError`: another process did not
        reach a new shape in `TIMEOUT_SECONDS`.
        """
        if len(self._processes) == 1:
            return
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        shapes = [
            f"{jax.tree_util.keystr(path)} "
            f"{jnp.result_type(x)}{list(jnp.shape(x))}".strip()
            for path, x in leaves
        ]
        numbers = [str(x) for x in others if x is not None]
        mine = ", ".join([*shapes, *numbers])
        if mine not in self._agreed:
            _compare(self._processes, mine)
            self._agreed.add(mine)


def _compare(processes: tuple[int, ...], mine: str) -> None:
    # jax has no public API for this; Orbax uses it too. If it goes, the first call of a
    # step over several processes raises: shapes are never left uncompared.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:  # without jax.distributed there is no channel
        return
    group = "-".join(map(str, processes))
    key = f"optax_tokenaccum/{group}/{next(_comparisons[processes])}"
    leader, *others = processes
    if jax.process_index() == leader:
        verdict = _AGREED
        for process in others:
            theirs = _read(client, f"{key}/{process}", process, mine)
            if theirs != mine:
                verdict = (
                    f"{_RULE}: process {leader} gave {mine}; process {process} gave "
                    f"{theirs}. {_ADVICE}"
                )
                break
        client.key_value_set(f"{key}/verdict", verdict)
    else:
        client.key_value_set(f"{key}/{jax.process_index()}", mine)
        verdict = _read(client, f"{key}/verdict", leader, mine)
    if verdict != _AGREED:
        raise ValueError(verdict)


def _read(client: Any, key: str, process: int, mine: str) -> str:
    try:
        return client.blocking_key_value_get(key, TIMEOUT_SECONDS * 1000)
    except Exception as error:
        raise TimeoutError(
            f"{_RULE}: process {jax.process_index()} came to a new one, {mine}, and "
            f"process {process} did not in {TIMEOUT_SECONDS} s. {_ADVICE}"
        ) from error


_AGREED = "agreed"
_RULE = "All processes must give a step the same shapes in the same order"
_ADVICE = (
    "Make plans from the lengths of the sequences of all processes, and let each take "
    "its rows of every micro-batch."
)
