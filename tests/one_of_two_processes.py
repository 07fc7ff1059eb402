"""Run twice by test_agreement.py: `python one_of_two_processes.py PORT PROCESS`."""

import sys
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import make_train_step, make_window_step
from optax_tokenaccum._devices import processes


def rows(numbers: np.ndarray, mesh: Any, *, micro_batches: int = 0) -> jax.Array:
    """Return a global array, of which `numbers` is this process's half."""
    spec = P(None, "data") if micro_batches else P("data")
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), numbers)


def loss_fn(w: Any, x: Any) -> Any:
    return (w * x).sum(), (x != 0).sum()


def attempt(name: str, call: Any, *args: Any, **kwargs: Any) -> None:
    try:
        state, _ = call(*args, **kwargs)
        print(f"{name}: {np.asarray(state.params)}", flush=True)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)


def compare_alone(state: Any, process: int) -> Any:
    """Compare within a group of one process; process 1 compares twice."""
    for _ in range(1 + process):
        processes._compare((process,), "")
    return state, None


def main(port: int, process: int) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        2,
        process,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = make_train_step(loss_fn, optax.sgd(1.0), 1, mesh=mesh, data_axes="data")
    # Process 0 has one token of value 2, process 1 has eight of value 10.
    mine = np.full((4, 2), 10 * process, np.float32)
    mine[0, 0] += 2 * (1 - process)
    state, batch = step.init(np.zeros((), np.float32)), rows(mine, mesh)
    attempt("outer jit", jax.jit(step), state, batch)
    attempt("agree", step, state, batch)
    attempt("apart", compare_alone, step.init(np.zeros((), np.float32)), process)
    attempt("host array", step, step.init(np.zeros((), np.float32)), mine)
    other = np.ones((4, 3 + process), np.float32)
    attempt(
        "another length", step, step.init(np.zeros((), np.float32)), rows(other, mesh)
    )
    window = make_window_step(loss_fn, optax.sgd(1.0), mesh=mesh, data_axes="data")
    state = window.init(np.zeros((), np.float32))
    micro_batches = rows(np.stack([mine, mine]), mesh, micro_batches=2)
    attempt("window in outer jit", jax.jit(window), state, micro_batches)
    for integer in (int, np.int64):
        attempt(
            f"another number, {integer.__name__}",
            window,
            state,
            micro_batches,
            num_micro_batches=integer(1 + process),
        )
    state = step.init(np.zeros((), np.float32))
    processes.TIMEOUT_SECONDS = 3
    if process == 0:
        attempt("alone", step, state, rows(np.ones((4, 5), np.float32), mesh))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
