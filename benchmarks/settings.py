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
    """What all suites have in common.

    Attributes:
      workloads: by name.
      cases: of the speed suite.
      rounds: of an interleaved measurement, at most.
      seconds: that one may take, once there are five rounds.
      leaves: of the trees in the host and growth suites.
      ks: in the growth suite.
      widths: of the square layers in the growth suite.
      sequences: in a window of the ragged suite.
      windows: of real dialogue in the ragged suite.
      max_length: of a sequence in the ragged suite, in tokens.
      shapes: of micro-batches in the ragged suite.
      lengths: the distributions in the ragged suite, by name.
    """

    workloads: Workloads
    cases: tuple[Case, ...]
    rounds: int
    seconds: float
    leaves: tuple[int, ...]
    ks: tuple[int, ...]
    widths: tuple[int, ...]
    sequences: int
    windows: int
    max_length: int
    shapes: int
    lengths: tuple[str, ...]

    def say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


QUICK = Settings(
    workloads={"LoRA": TINY_WORKLOADS["LoRA"]},
    cases=(Case("LoRA", "AdamW", 2),),
    rounds=1,
    seconds=0,
    leaves=(3,),
    ks=(2,),
    widths=(16,),
    sequences=16,
    windows=1,
    max_length=64,
    shapes=2,
    lengths=("dialogue",),
)


def full() -> Settings:
    """For the machine at hand."""
    on_cpu = jax.default_backend() == "cpu"
    workloads = WORKLOADS if on_cpu else LARGE_WORKLOADS
    return Settings(
        workloads=workloads,
        # A star around AdamW and k = 8: everything crossed would take hours.
        cases=(
            *(Case(name, "AdamW", 8) for name in workloads),
            *(Case(name, "SGD", 8) for name in workloads),
            *(Case("square layers", "AdamW", k) for k in (1, 4, 32)),
            *(Case("transformer", "AdamW", k) for k in (1, 4, 32)),
        ),
        rounds=21,
        seconds=20,
        leaves=(10, 100, 1000, 10_000),
        ks=(1, 4, 16, 64),
        widths=(256, 512, 1024, 2048) if on_cpu else (1024, 2048, 4096, 8192),
        sequences=128,
        windows=7,
        max_length=512,
        shapes=6,
        lengths=("dialogue", "log-normal", "uniform", "two lengths"),
    )
