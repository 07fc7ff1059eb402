"""What a program holds and sends: read after it is compiled, before it runs."""

from optax_tokenaccum.compiled._collectives import CollectiveReport, collectives
from optax_tokenaccum.compiled._largest_micro_batch import (
    MicroBatchFit,
    largest_micro_batch,
)
from optax_tokenaccum.compiled._memory import MemoryReport, memory
from optax_tokenaccum.compiled._whole_gradients import whole_gradients

__all__ = [
    "CollectiveReport",
    "MemoryReport",
    "MicroBatchFit",
    "collectives",
    "largest_micro_batch",
    "memory",
    "whole_gradients",
]
