"""`examples/finetune.py --micro-batch-size auto`."""

import argparse
import re

import pytest
from fitting import num_bytes
from test_finetune import run_command

SMALL = ("--layers", 1, "--d-model", 32, "--max-length", 32, "--updates", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500MB", 500e6), ("2GB", 2e9), ("1.5GiB", 1.5 * 2**30), ("17 B", 17)],
)
def test_bytes(text: str, expected: float):
    assert num_bytes(text) == expected


@pytest.mark.parametrize("text", ["2", "GB", "2gb", "2GBB", "-2GB", "2KB", "1e3MB"])
def test_what_is_not_a_number_of_bytes(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="like 2GB, got"):
        num_bytes(text)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 2], ids=["full", "lora"])
def test_as_many_rows_as_fit(tmp_path, lora_rank):
    result = run_command(
        *("--micro-batch-size", "auto", "--memory-limit", "10MB", *SMALL),
        *("--gradient-accumulation-steps", 2, "--checkpoint-dir", tmp_path),
        *("--lora-rank", lora_rank),
    )
    assert result.returncode == 0, result.stderr
    printed = " ".join(result.stdout.split())
    rows, most, need = re.search(
        r"micro-batches of (\d+) rows: (\d+) need (\d+) of 10 MB", printed
    ).groups()
    assert 1 < int(rows) <= int(most)
    assert (rows != most) == ("has all pairs" in printed)
    assert int(need) >= 9
    assert "done: gradient_step 1" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory-limit", "1MB"), "A micro-batch must fit into 1,000,000 bytes"),
        ((), "limit_bytes must be given"),
    ],
)
def test_what_does_not_fit(words, message):
    result = run_command("--micro-batch-size", "auto", *words)
    assert result.returncode == 1
    assert result.stderr.startswith("error: --micro-batch-size, --memory-limit: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_limit_alone_decides_nothing():
    result = run_command("--memory-limit", "1GB")
    assert result.returncode == 2
    assert "give --micro-batch-size auto too" in " ".join(result.stderr.split())
