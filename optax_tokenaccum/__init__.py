"""Exact gradient accumulation for JAX: sum gradients and tokens, divide once."""

from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._devices.reshard_state import reshard_state
from optax_tokenaccum._multi_steps import MultiSteps, from_multi_steps_state
from optax_tokenaccum._split_batch import split_batch
from optax_tokenaccum._steps.coupled import coupled_value_and_grad
from optax_tokenaccum._steps.state import StepMetrics, StepState
from optax_tokenaccum._steps.train_step import TrainStep, make_train_step
from optax_tokenaccum._steps.value_and_grad import (
    accumulate_over_window,
    window_value_and_grad,
)
from optax_tokenaccum._steps.window_step import WindowStep, make_window_step
from optax_tokenaccum._transformation import (
    close_window,
    has_updated,
    token_accumulation,
    window_gradient,
    with_num_tokens,
)

__version__ = "0.6.0"

__all__ = [
    "MultiSteps",
    "StepMetrics",
    "StepState",
    "TokenAccumulationState",
    "TrainStep",
    "WindowStep",
    "accumulate_over_window",
    "close_window",
    "coupled_value_and_grad",
    "from_multi_steps_state",
    "has_updated",
    "make_train_step",
    "make_window_step",
    "reshard_state",
    "split_batch",
    "token_accumulation",
    "window_gradient",
    "window_value_and_grad",
    "with_num_tokens",
]
