"""Exact gradient accumulation for JAX: sum gradients and tokens, divide once."""

from optax_tokenaccum._audit import audit
from optax_tokenaccum._audit_report import AuditReport, LossReport, Verdict
from optax_tokenaccum._check_loss_fn import check_loss_fn
from optax_tokenaccum._coupled import coupled_value_and_grad
from optax_tokenaccum._losses import (
    linear_cross_entropy_sum,
    reduce_loss,
    softmax_cross_entropy_sum,
)
from optax_tokenaccum._multi_steps import MultiSteps, from_multi_steps_state
from optax_tokenaccum._regroup import regroup_sums
from optax_tokenaccum._split_batch import split_batch
from optax_tokenaccum._state import StepMetrics, StepState, TokenAccumulationState
from optax_tokenaccum._train_step import TrainStep, make_train_step
from optax_tokenaccum._transformation import (
    close_window,
    has_updated,
    token_accumulation,
    window_gradient,
    with_num_tokens,
)
from optax_tokenaccum._whole_gradients import whole_gradients
from optax_tokenaccum._window import (
    accumulate_over_window,
    window_value_and_grad,
)
from optax_tokenaccum._window_step import WindowStep, make_window_step

__version__ = "0.5.0"

__all__ = [
    "AuditReport",
    "LossReport",
    "MultiSteps",
    "StepMetrics",
    "StepState",
    "TokenAccumulationState",
    "TrainStep",
    "Verdict",
    "WindowStep",
    "accumulate_over_window",
    "audit",
    "check_loss_fn",
    "close_window",
    "coupled_value_and_grad",
    "from_multi_steps_state",
    "has_updated",
    "linear_cross_entropy_sum",
    "make_train_step",
    "make_window_step",
    "reduce_loss",
    "regroup_sums",
    "softmax_cross_entropy_sum",
    "split_batch",
    "token_accumulation",
    "whole_gradients",
    "window_gradient",
    "window_value_and_grad",
    "with_num_tokens",
]
