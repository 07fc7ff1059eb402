"""Sequences of many lengths, in micro-batches and windows of few shapes."""

from optax_tokenaccum.ragged._pad import pad_micro_batch
from optax_tokenaccum.ragged._plan import (
    MicroBatchPlan,
    choose_length_buckets,
    plan_window,
)
from optax_tokenaccum.ragged._planned_window import PlannedWindow, pad_window

__all__ = [
    "MicroBatchPlan",
    "PlannedWindow",
    "choose_length_buckets",
    "pad_micro_batch",
    "pad_window",
    "plan_window",
]
