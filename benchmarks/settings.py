"""How much to measure."""

import sys
from typing import NamedTuple

import jax
import optax

from benchmarks.workloads import LARGE_WORKLOADS, TINY_WORKLOADS, WORKLOADS, Workloads

ADAMW = optax.adamw(1e-4)


class Settings(NamedTuple):
    """The settings of all suites."""

    workloads: Workloads  # of the speed and programs suites, by name
    k: int = 8  # micro-batches in a window
    rounds: int = 21  # at most, of an interleaved measurement
    seconds: float = 20  # the limit of one measurement, once there are five rounds
    host_leaves: tuple[int, ...] = (10, 300, 3000)
    host_variables: tuple[int, ...] = (10, 100, 1000)  # of nnx models
    compiled_leaves: tuple[int, ...] = (300, 1000)
    # Of the ragged suite: sequences in a window, windows of real dialogue, the longest
    # sequence in tokens, shapes of micro-batches, and distributions of lengths.
    sequences: int = 128
    windows: int = 7
    max_length: int = 512
    shapes: int = 6
    lengths: tuple[str, ...] = ("dialogue", "uniform")
    # Of the ahead suite: layers, width, length and vocabulary. Gradients must not fit
    # into the on-chip memory of a TPU, 128 MiB.
    ahead_sizes: tuple[int, int, int, int] = (24, 2048, 512, 32_768)
    ahead_all: bool = True  # otherwise the few cases of its test

    def say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


QUICK = Settings(
    workloads={name: TINY_WORKLOADS[name] for name in ("LoRA", "stacked")},
    k=2,
    rounds=1,
    seconds=0,
    host_leaves=(3,),
    host_variables=(3,),
    compiled_leaves=(3,),
    sequences=16,
    windows=1,
    max_length=64,
    shapes=2,
    lengths=("dialogue",),
    ahead_sizes=(32, 1024, 256, 16_384),
    ahead_all=False,
)


def full() -> Settings:
    """Returns the settings for this machine."""
    on_cpu = jax.default_backend() == "cpu"
    return Settings(WORKLOADS if on_cpu else LARGE_WORKLOADS)
