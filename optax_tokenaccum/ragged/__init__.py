"""Sequences of many lengths, in micro-batches of few shapes."""

from optax_tokenaccum.ragged._pad import pad_micro_batch
from optax_tokenaccum.ragged._plan import (
    MicroBatchPlan,
    choose_length_buckets,
    plan_window,
)

__all__ = [
    "MicroBatchPlan",
    "choose_length_buckets",
    "pad_micro_batch",
    "plan_window",
]
