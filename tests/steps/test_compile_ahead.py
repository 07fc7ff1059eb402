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
    MicroBatchPlan,
    make_train_step,
    make_window_step,
    pad_micro_batch,
    pad_window,
)

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(())}
BATCHES = [np.ones((rows, 3), np.float32) for rows in (2, 5)]
SHAPES = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in BATCHES]


def loss_fn(params: Any, x: Any, *, rng: Any, frozen: Any, scale: str) -> Any:
    assert scale == "one"
    y = x @ (params["w"] * frozen) + params["b"]
    return jnp.sum(y**2) + 0 * jax.random.uniform(rng), x.shape[0]


KWARGS: dict[str, Any] = {
    "rng": jax.random.key(0),
    "frozen": np.ones(2, np.float32),
    "scale": "one",
}


def state_for(step: Any, kind: str) -> Any:
    if kind == "real":
        return step.init(PARAMS)
    if kind == "committed":
        return step.init(jax.device_put(PARAMS, jax.devices()[0]))
    return jax.eval_shape(step.init, PARAMS)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ({}, "real"),
        ({"every_k_schedule": 2}, "real"),
        ({"every_k_schedule": 2}, "abstract"),
        ({"every_k_schedule": 2}, "committed"),
        ({"every_n_tokens": 6}, "abstract"),
    ],
    ids=["halves", "int k", "abstract", "committed", "token budget"],
)
def test_nothing_is_left_for_a_train_step_to_compile(schedule: Any, kind: str):
    step = make_train_step(loss_fn, optax.adamw(1e-3), **schedule)
    given = state_for(step, kind)
    state = given if kind == "committed" else step.init(PARAMS)
    batches = SHAPES if kind == "abstract" else BATCHES
    with helpers.count_compilations() as ahead:
        step.compile(given, [*batches, *batches], **KWARGS)
    assert len(ahead) == len(BATCHES) + 1
    with helpers.count_compilations() as later:
        for _ in range(3):
            for batch in BATCHES:
                call = step if schedule else step.accumulate
                state, metrics = call(state, batch, **KWARGS)
            if not schedule:
                state, metrics = step.close_window(state)
        if int(metrics.mini_step):
            state, metrics = step.close_window(state)
    assert later == []
    assert int(metrics.gradient_step) >= 3
    with helpers.count_compilations() as another_shape:
        step.accumulate(state, np.ones((7, 3), np.float32), **KWARGS)
    assert len(another_shape) == 1, "a shape that was not given is compiled when met"


@pytest.mark.parametrize(
    ("kind", "num_micro_batches"), [("real", None), ("committed", 2), ("abstract", 2)]
)
def test_nothing_is_left_for_a_window_step_to_compile(
    kind: str, num_micro_batches: int | None
):
    step = make_window_step(loss_fn, optax.adamw(1e-3))
    given = state_for(step, kind)
    state = given if kind == "committed" else step.init(PARAMS)
    windows = [np.ones((k, 2, 3), np.float32) for k in (2, 4, 2)]
    kwargs = KWARGS | {"num_micro_batches": num_micro_batches}
    with helpers.count_compilations() as ahead:
        step.compile(given, windows, **kwargs)
    assert len(ahead) == 2
    with helpers.count_compilations() as later:
        for window in windows:
            state, metrics = step(state, window, **kwargs)
            assert metrics.updated
    assert later == []


def test_nothing_is_left_for_planned_windows_and_micro_batches():
    def sum_fn(params: Any, x: Any) -> Any:
        return jnp.sum(params["w"]) * jnp.sum(x), jnp.sum(x != 0)

    def window_of(*lengths: int) -> Any:
        sequences = [np.ones(n, np.float32) for n in lengths]
        return pad_window(sequences, pad_values=0, max_tokens=8, max_sequences=5)

    first = window_of(1)
    window_step, train_step = (
        make(sum_fn, optax.adamw(1e-3)) for make in (make_window_step, make_train_step)
    )
    micro_batches = [
        pad_micro_batch(
            [np.ones(1, np.float32)],
            MicroBatchPlan(np.array([], int), *shape),
            pad_values=0,
        )
        for shape in first.shapes
    ]
    window_state, state = window_step.init(PARAMS), train_step.init(PARAMS)
    with helpers.count_compilations() as ahead:
        window_step.compile(window_state, [first, window_of(3, 8, 1)])
        train_step.compile(state, micro_batches)
    assert len(first.shapes) == 4
    assert len(ahead) == 1 + (4 + 1)
    with helpers.count_compilations() as later:
        for window in (window_of(8, 2, 1, 4, 5), window_of(3)):
            window_state, _ = window_step(window_state, window)
        for batch in micro_batches:
            state, _ = train_step.accumulate(state, batch)
        train_step.close_window(state)
        window_step.compile(window_state, [jax.eval_shape(lambda: first)])
    assert later == []


@pytest.mark.parametrize("bar", [tqdm.tqdm, rich.progress.track])
def test_progress_is_given_every_program(bar: Any, capsys: pytest.CaptureFixture[str]):
    step = make_train_step(loss_fn, optax.sgd(1.0), 2)
    totals, done = [], []

    def progress(programs: Any) -> Any:
        totals.append(len(programs))
        for program in bar(programs):
            yield program
            done.append(program)

    state = jax.eval_shape(step.init, PARAMS)
    step.compile(state, iter([*SHAPES, *SHAPES]), progress=progress, **KWARGS)
    assert (totals, len(done)) == ([3], 3)
    captured = capsys.readouterr()
    assert "100%" in captured.out + captured.err
