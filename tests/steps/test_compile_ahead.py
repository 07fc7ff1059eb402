"""`compile` builds every program of a run in advance, so that the run builds none."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.progress
import tqdm

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    pad_window,
)

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(())}
BATCHES = [np.ones((rows, 3), np.float32) for rows in (2, 5)]
WINDOWS = [np.ones((k, 2, 3), np.float32) for k in (2, 4)]
KWARGS: dict[str, Any] = {
    "rng": jax.random.key(0),
    "frozen": np.ones(2, np.float32),
    "scale": "one",
}


def loss_fn(params: Any, x: Any, *, rng: Any, frozen: Any, scale: str) -> Any:
    assert scale == "one"
    y = x @ (params["w"] * frozen) + params["b"]
    return jnp.sum(y**2) + 0 * jax.random.uniform(rng), x.shape[0]


@pytest.mark.parametrize(
    ("make", "options", "kind"),
    [
        (make_train_step, {}, "real"),
        (make_train_step, {"every_k_schedule": 2}, "abstract"),
        (make_train_step, {"every_k_schedule": 2}, "committed"),
        (make_train_step, {"every_n_tokens": 6}, "real"),
        (make_window_step, {}, "abstract"),
        (make_window_step, {"num_micro_batches": 2}, "committed"),
    ],
)
def test_nothing_is_left_to_compile(make: Any, options: Any, kind: str):
    is_window = make is make_window_step
    kwargs = KWARGS | (options if is_window else {})
    step = make(loss_fn, optax.adamw(1e-3), **({} if is_window else options))
    params = PARAMS
    if kind == "committed":
        params = jax.device_put(PARAMS, jax.devices()[0])
    state, batches = step.init(params), WINDOWS if is_window else BATCHES
    given = state, batches
    if kind == "abstract":
        given = jax.eval_shape(lambda: given)
    with helpers.count_compilations() as ahead:
        step.compile(given[0], 2 * given[1], **kwargs)
    assert len(ahead) == len(BATCHES) + (not is_window)
    call = step if is_window or options else step.accumulate
    with helpers.count_compilations() as later:
        for _ in range(3):
            for batch in batches:
                state, metrics = call(state, batch, **kwargs)
        if not is_window:
            state, metrics = step.close_window(state)
    assert later == []
    assert metrics.gradient_step > 0
    with helpers.count_compilations() as another_shape:
        call(state, batches[0][:, :1] if is_window else batches[0][:1], **kwargs)
    assert len(another_shape) == 1, "a shape that was not given is compiled when met"


def test_nothing_is_left_for_planned_windows():
    def sum_fn(params: Any, x: Any) -> Any:
        return jnp.sum(params["w"]) * jnp.sum(x), jnp.sum(x != 0)

    def window_of(*lengths: int) -> Any:
        sequences = [np.ones(n, np.float32) for n in lengths]
        return pad_window(sequences, pad_values=0, max_tokens=8, max_sequences=5)

    step = make_window_step(sum_fn, optax.adamw(1e-3))
    state, first = step.init(PARAMS), window_of(1)
    with helpers.count_compilations() as ahead:
        step.compile(state, [first, window_of(3, 8, 1)])
    assert len(first.shapes) == 4 and len(ahead) == 1
    with helpers.count_compilations() as later:
        for window in (window_of(8, 2, 1, 4, 5), window_of(3)):
            state, _ = step(state, window)
        step.compile(state, [jax.eval_shape(lambda: first)])
    assert later == []


@pytest.mark.parametrize("bar", [tqdm.tqdm, rich.progress.track])
def test_progress_is_given_every_program(bar: Any, capsys: pytest.CaptureFixture[str]):
    step = make_train_step(loss_fn, optax.sgd(1.0), 2)
    totals = []

    def progress(programs: Any) -> Any:
        totals.append(len(programs))
        return bar(programs)

    state = jax.eval_shape(step.init, PARAMS)
    step.compile(state, iter([*BATCHES, *BATCHES]), progress=progress, **KWARGS)
    assert totals == [len(BATCHES) + 1]
    captured = capsys.readouterr()
    assert "100%" in captured.out + captured.err
