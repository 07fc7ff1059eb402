"""Two processes of 4 devices each that give a step different inputs.

Each runs this file: `python test_agreement.py PORT PROCESS`.
"""

import os
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import make_train_step, make_window_step
from optax_tokenaccum._devices import processes


def said_by_two_processes() -> list[dict[str, str]]:
    """Return what each process prints, by name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, port, str(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in pair]
    finally:
        for process in pair:
            process.kill()
    for out, error in outputs:
        assert "agree" in out, error[-3000:]
    return [
        dict(line.split(": ", 1) for line in out.splitlines()) for out, _ in outputs
    ]


@pytest.mark.slow
def test_two_processes():
    said = said_by_two_processes()
    # The rows of both are one batch.
    exact, mean_of_means = (2 + 8 * 10) / 9, (2 + 10) / 2
    for name in ("agree", "outer jit", "window in outer jit"):
        for process in said:
            assert -float(process[name]) == pytest.approx(exact, rel=1e-6)
            assert -float(process[name]) != pytest.approx(mean_of_means, rel=0.1)
    # Disagreement is an error on both.
    for name, mine, theirs in (
        ("another length", "float32[8, 3]", "float32[8, 4]"),
        ("another number", "float32[2, 8, 2], 1", "float32[2, 8, 2], 2"),
    ):
        for process in said:
            error = process[name]
            prefix = "ValueError: All processes must give a step the same"
            assert error.startswith(prefix), error
            assert f"process 0 gave {mine}; process 1 gave {theirs}." in error
    for process in said:
        assert "make_array_from_process_local_data" in process["host array"]
    # One that does not come to a shape is waited for in bounded time.
    assert said[0]["alone"].startswith("TimeoutError: All processes must give")
    assert "float32[8, 5], and process 1 did not in 2 s" in said[0]["alone"]


def test_an_array_for_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = make_train_step(loss_fn, optax.sgd(1.0), 1, mesh=mesh, data_axes="data")
    state = step.init(jax.ShapeDtypeStruct((), np.float32))
    # As on a mesh of `jax.experimental.topologies`, which a CPU has none of.
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    with pytest.raises(ValueError, match="not there") as raised:
        step.accumulate.lower(state, np.ones((8, 2), np.float32))
    assert "shape (8, 2)" in str(raised.value)
    assert "jax.ShapeDtypeStruct" in str(raised.value)
    step.accumulate.lower(state, jax.ShapeDtypeStruct((8, 2), np.float32))


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
    zero = np.zeros((), np.float32)
    state, batch = step.init(zero), rows(mine, mesh)
    attempt("outer jit", jax.jit(step), state, batch)
    attempt("agree", step, state, batch)
    attempt("host array", step, step.init(zero), mine)
    other = np.ones((4, 3 + process), np.float32)
    attempt("another length", step, step.init(zero), rows(other, mesh))
    window = make_window_step(loss_fn, optax.sgd(1.0), mesh=mesh, data_axes="data")
    state = window.init(zero)
    micro_batches = rows(np.stack([mine, mine]), mesh, micro_batches=2)
    attempt("window in outer jit", jax.jit(window), state, micro_batches)
    number = {"num_micro_batches": np.int64(1 + process)}
    attempt("another number", window, state, micro_batches, **number)
    state = step.init(zero)
    processes.TIMEOUT_SECONDS = 2
    if process == 0:
        attempt("alone", step, state, rows(np.ones((4, 5), np.float32), mesh))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
