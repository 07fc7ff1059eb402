"""How much to measure."""

import sys
from typing import NamedTuple

import jax

from benchmarks.workloads import (
    LARGE_WORKLOADS,
    TINY_WORKLOADS,
    WORKLOADS,
    Workloads,
)


class Case(NamedTuple):
    """One thing to time: a workload by name, an optimizer by name, and k."""

    workload: str
    optimizer: str
    k: int


class Settings(NamedTuple):
    """The settings of all suites.

    Attributes:
      workloads: the workloads by name.
      cases: the cases of the speed suite.
      rounds: the maximum number of rounds of an interleaved measurement.
      seconds: the time limit of one measurement, once there are five rounds.
      sequences: the number of sequences in a window of the ragged suite.
      windows: the number of windows of real dialogue in the ragged suite.
      max_length: the maximum length of a sequence in the ragged suite, in tokens.
      shapes: the number of micro-batch shapes in the ragged suite.
      lengths: the names of the length distributions in the ragged suite.
      grown_in_memory: the workload of the memory suite.
      memory_ks: the values of k in the memory suite.
      host_leaves: the numbers of leaves in the host suite.
      host_variables: the numbers of variables of nnx models in the host suite.
      tpu_layers: the number of layers, the width and the length in the tpu suite. The
        gradients must not fit into the on-chip memory of 128 MiB.
      tpu_vocabulary: the number of tokens that the tpu suite embeds.
    """

    workloads: Workloads
    cases: tuple[Case, ...]
    rounds: int
    seconds: float
    sequences: int
    windows: int
    max_length: int
    shapes: int
    lengths: tuple[str, ...]
    grown_in_memory: str = "stacked"
    memory_ks: tuple[int, ...] = (1, 2, 4, 8, 16)
    host_leaves: tuple[int, ...] = (10, 300, 3000)
    host_variables: tuple[int, ...] = (10, 100, 1000)
    tpu_layers: tuple[int, int, int] = (24, 2048, 512)
    tpu_vocabulary: int = 32_768

    def say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


QUICK = Settings(
    workloads={name: TINY_WORKLOADS[name] for name in ("LoRA", "stacked")},
    cases=(Case("LoRA", "AdamW", 2), Case("stacked", "AdamW", 2)),
    rounds=1,
    seconds=0,
    sequences=16,
    windows=1,
    max_length=64,
    shapes=2,
    lengths=("dialogue",),
    memory_ks=(1, 2),
    host_leaves=(3,),
    host_variables=(3,),
    tpu_layers=(32, 1024, 128),
    tpu_vocabulary=16_384,
)


def full() -> Settings:
    """Returns the settings for this machine."""
    on_cpu = jax.default_backend() == "cpu"
    workloads = WORKLOADS if on_cpu else LARGE_WORKLOADS
    return Settings(
        workloads=workloads,
        cases=(
            *(Case(name, "AdamW", 8) for name in workloads),
            Case("square layers", "SGD", 8),
        ),
        rounds=21,
        seconds=20,
        sequences=128,
        windows=7,
        max_length=512,
        shapes=6,
        lengths=("dialogue", "log-normal", "uniform", "two lengths"),
    )
