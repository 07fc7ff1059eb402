"""Two more training loops, for `finetune.py --plan`, with windows cut by length.

The update does not depend on how a window is cut, so sequences of similar length share
a micro-batch, which needs less padding. The rest is as in `methods.py`.
"""

from functools import partial

import numpy as np
import optax
from batches import PADDING, Window, plan_settings
from methods import Loop, Method, loss_fn
from transformer import Params

from optax_tokenaccum import (
    MicroBatchPlan,
    make_train_step,
    make_window_step,
    pad_micro_batch,
    pad_window,
    plan_window,
)


def planned_train_step(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """One call per micro-batch, with several shapes.

    No call waits for the device: the host makes the next micro-batch meanwhile.
    """
    settings = plan_settings(windows)
    max_tokens, buckets = settings["max_tokens"], settings["length_buckets"]
    # A plan without sequences describes only a shape.
    shapes = [MicroBatchPlan(np.arange(0), max_tokens // n, n) for n in buckets]
    make = partial(pad_micro_batch, pad_values=PADDING)
    step = make_train_step(loss_fn, inner)
    state = step.init(params)
    batches = [make(windows[0].sequences, shape) for shape in shapes]
    step.compile(state, batches, frozen=frozen)

    for window in windows:
        lengths = [len(sequence.inputs) for sequence in window.sequences]
        for plan in plan_window(lengths, **settings):
            batch = make(window.sequences, plan)
            state, metrics = step.accumulate(state, batch, frozen=frozen)
        state, metrics = step.close_window(state)
        yield state.params
    largest = max(batches, key=lambda batch: batch.inputs.size)
    return {
        "accumulate": step.accumulate.lower(state, largest, frozen=frozen),
        "close_window": step.close_window.lower(state),
    }


def planned_window_step(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
) -> Loop:
    """One call per window, and one program for all plans."""
    settings = plan_settings(windows)
    step = make_window_step(loss_fn, inner)
    state = step.init(params)

    for window in windows:
        planned = pad_window(window.sequences, pad_values=PADDING, **settings)
        state, metrics = step(state, planned, frozen=frozen)
        yield state.params
    planned = pad_window(windows[0].sequences, pad_values=PADDING, **settings)
    return {"window_step": step.lower(state, planned, frozen=frozen)}


PLANNED: dict[str, Method] = {
    "planned train step": planned_train_step,
    "planned window step": planned_window_step,
}
