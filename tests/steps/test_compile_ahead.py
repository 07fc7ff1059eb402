"""`compile` builds every program of a run in advance, so that the run builds none."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tqdm

from optax_tokenaccum import make_train_step, make_window_step

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
        (make_train_step, {"every_k_schedule": 2}, "abstract"),
        (make_train_step, {"every_n_tokens": 6}, "committed"),
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


def test_progress_is_given_every_program(capsys: pytest.CaptureFixture[str]):
    step = make_train_step(loss_fn, optax.sgd(1.0), 2)
    totals = []

    def progress(programs: Any) -> Any:
        totals.append(len(programs))
        return tqdm.tqdm(programs)

    state = jax.eval_shape(step.init, PARAMS)
    step.compile(state, iter([*BATCHES, *BATCHES]), progress=progress, **KWARGS)
    assert totals == [len(BATCHES) + 1]
    assert "100%" in capsys.readouterr().err
