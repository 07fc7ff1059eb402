"""Two processes of 4 devices each that give a step different inputs."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    """Return what each process of one_of_two_processes.py prints, by name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
    script = pathlib.Path(__file__).parents[1] / "one_of_two_processes.py"
    processes = [
        subprocess.Popen(
            [sys.executable, script, port, str(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, error in outputs:
        assert "agree" in out, error[-3000:]
    return [
        dict(line.split(": ", 1) for line in out.splitlines()) for out, _ in outputs
    ]


@pytest.mark.parametrize("name", ["agree", "outer jit", "window in outer jit"])
def test_rows_of_both_processes_are_one_batch(said: list[dict[str, str]], name: str):
    exact, mean_of_means = (2 + 8 * 10) / 9, (2 + 10) / 2
    for process in said:
        assert -float(process[name]) == pytest.approx(exact, rel=1e-6)
        assert -float(process[name]) != pytest.approx(mean_of_means, rel=0.1)


@pytest.mark.parametrize(
    ("name", "mine", "theirs"),
    [
        ("another length", "float32[8, 3]", "float32[8, 4]"),
        ("another number, int", "float32[2, 8, 2], 1", "float32[2, 8, 2], 2"),
        ("another number, int64", "float32[2, 8, 2], 1", "float32[2, 8, 2], 2"),
    ],
)
def test_disagreement_is_an_error_on_both(
    said: list[dict[str, str]], name: str, mine: str, theirs: str
):
    for process in said:
        error = process[name]
        assert error.startswith("ValueError: All processes must give a step the same")
        assert f"process 0 gave {mine}; process 1 gave {theirs}." in error


def test_groups_of_processes_are_not_in_each_others_way(said: list[dict[str, str]]):
    assert [process["apart"] for process in said] == ["0.0", "0.0"]


def test_array_of_one_process_is_an_error(said: list[dict[str, str]]):
    for process in said:
        assert "make_array_from_process_local_data" in process["host array"]


def test_process_that_does_not_come_to_a_shape_is_waited_for_in_bounded_time(
    said: list[dict[str, str]],
):
    assert said[0]["alone"].startswith("TimeoutError: All processes must give")
    assert "float32[8, 5], and process 1 did not in 3 s" in said[0]["alone"]
