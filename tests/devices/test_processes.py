"""Two processes of 4 devices; each runs `python test_processes.py PORT PROCESS`."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import make_train_step

PAGE = Path(__file__).parents[2] / "docs/devices.md"


def said_by_two_processes() -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, port, process],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in "01"
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert all(out for out, _ in outputs), outputs
    return [out for out, _ in outputs]


@pytest.mark.slow
@pytest.mark.needs(cpu="each process simulates 4 devices")
def test_two_processes_are_exact_and_one_may_end_first():
    """Process 0 has micro-batches of 2 and 6 tokens, process 1 one of 8."""
    exact, mean_of_means = (2 * 1 + 6 * 2 + 8 * 5) / 16, (1 + 2 + 5) / 3
    for said in said_by_two_processes():
        assert "make_array_from_process_local_data" in said
        moved = -float(said.split()[-1])
        assert moved == pytest.approx(exact, rel=1e-6)
        assert moved != pytest.approx(mean_of_means, rel=0.1)


def loss_fn(w: Any, x: Any) -> Any:
    return (w * x).sum(), (x != 0).sum()


def rows(value: float, tokens: int) -> np.ndarray:
    return np.where(np.arange(8) < tokens, np.float32(value), 0).reshape(4, 2)


def main(port: int, process: int) -> None:
    place = f"127.0.0.1:{port}"
    jax.distributed.initialize(place, 2, process, cluster_detection_method="deactivate")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, data_axes="data")
    state = step.init(np.float32(0))
    try:
        step.accumulate(state, rows(1, 2))
    except ValueError as error:
        print(error)
    names: dict[str, Any] = {"np": np}
    code = PAGE.read_text().partition("\nimport itertools\n")[2]
    exec("import itertools\n" + code.partition("```")[0], names)
    mine = [rows(1, 2), rows(2, 6)] if process == 0 else [rows(5, 8)]
    for batch in names["until_all_end"](mine, rows(0, 0)):
        spread = NamedSharding(mesh, P("data"))
        batch = jax.make_array_from_process_local_data(spread, batch)
        state, _ = step.accumulate(state, batch)
    print(np.asarray(step.close_window(state)[0].params))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
