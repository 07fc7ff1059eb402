"""Exact gradient accumulation for JAX: sum gradients and tokens, divide once."""

from optax_tokenaccum._audit.audit import audit
from optax_tokenaccum._audit.check_loss import LossReport, check_loss_fn
from optax_tokenaccum._audit.report import AuditReport, Verdict
from optax_tokenaccum._compiled.collectives import CollectiveReport, collectives
from optax_tokenaccum._compiled.memory import MemoryReport, memory
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._losses import reduce_loss, softmax_cross_entropy_sum
from optax_tokenaccum._multi_steps import MultiSteps, from_multi_steps_state
from optax_tokenaccum._noise import GradientNoise, gradient_noise
from optax_tokenaccum._ragged.pad import pad_micro_batch
from optax_tokenaccum._ragged.pad_window import pad_window
from optax_tokenaccum._ragged.plan import (
    MicroBatchPlan,
    choose_length_buckets,
    plan_window,
)
from optax_tokenaccum._ragged.planned_window import PlannedWindow
from optax_tokenaccum._steps.accumulate_over_window import accumulate_over_window
from optax_tokenaccum._steps.largest_micro_batch import (
    MicroBatchFit,
    largest_micro_batch,
)
from optax_tokenaccum._steps.regroup import regroup_sums
from optax_tokenaccum._steps.split_batch import split_batch
from optax_tokenaccum._steps.state import StepMetrics, StepState
from optax_tokenaccum._steps.train_step import TrainStep, make_train_step
from optax_tokenaccum._steps.window import window_value_and_grad
from optax_tokenaccum._steps.window_step import WindowStep, make_window_step
from optax_tokenaccum._transformation import (
    close_window,
    has_updated,
    token_accumulation,
)
from optax_tokenaccum._with_num_tokens import with_num_tokens

__version__ = "0.2.0"

__all__ = [
    "AuditReport",
    "CollectiveReport",
    "GradientNoise",
    "LossReport",
    "MemoryReport",
    "MicroBatchFit",
    "MicroBatchPlan",
    "MultiSteps",
    "PlannedWindow",
    "StepMetrics",
    "StepState",
    "TokenAccumulationState",
    "TrainStep",
    "Verdict",
    "WindowStep",
    "accumulate_over_window",
    "audit",
    "check_loss_fn",
    "choose_length_buckets",
    "close_window",
    "collectives",
    "from_multi_steps_state",
    "gradient_noise",
    "has_updated",
    "largest_micro_batch",
    "make_train_step",
    "make_window_step",
    "memory",
    "pad_micro_batch",
    "pad_window",
    "plan_window",
    "reduce_loss",
    "regroup_sums",
    "softmax_cross_entropy_sum",
    "split_batch",
    "token_accumulation",
    "window_value_and_grad",
    "with_num_tokens",
]
