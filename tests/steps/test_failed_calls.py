"""Calls that fail: when they are traced, compiled or run.

A call that fails during tracing or compilation loses nothing of the open window.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import pytest
import ways_in
from flax import nnx
from helpers import run_step, stack
from jax.experimental import io_callback

from optax_tokenaccum import make_train_step, token_accumulation

BATCHES = [ways_in.batch_of(i, [1] * (i + 1) + [0] * (3 - i)) for i in range(4)]
ON_MESH = {"one device": {}} | {
    f"8 devices, {reduce_every}": {
        "mesh": meshes.make_mesh((8,)),
        "data_axes": "data",
        "reduce_every": reduce_every,
    }
    for reduce_every in ("window", "micro_batch")
}


class Failing:
    """A schedule that raises when it is first traced."""

    def __init__(self, error: BaseException):
        self.errors = [error]

    def __call__(self, count: Any) -> float:
        if self.errors:
            raise self.errors.pop()
        return 1.0


def run(step: Any, batches: Any, retries: Any = ()) -> Any:
    """Repeat each failed call, whose arguments must still be alive."""
    state, failures = step.init(ways_in.PARAMS), 0
    for batch in batches:
        try:
            state, metrics = step(state, batch)
        except retries as error:
            failures += 1
            assert str(error) == "once"
            state, metrics = step(state, batch)
    assert failures == (retries != ())
    return state, metrics


@pytest.mark.parametrize("options", ON_MESH.values(), ids=ON_MESH)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_optimizer_leaves_the_window_open(options: Any, error: Any):
    batches = [ways_in.batch_of(i, [1.0] * 8 * (i + 1)) for i in range(4)]
    make = make_train_step
    failing = make(ways_in.loss_fn, optax.sgd(Failing(error("once"))), 4, **options)
    got, metrics = run(failing, batches, error)
    expected, _ = run(make(ways_in.loss_fn, ways_in.SGD, 4, **options), batches)
    chex.assert_trees_all_equal(got.params, expected.params)
    assert metrics.updated and metrics.num_tokens == 80


def test_an_interrupted_compilation_leaves_the_window_open(
    monkeypatch: pytest.MonkeyPatch,
):
    """Interrupts the long compilation of the second program, when sums exist."""
    step = make_train_step(ways_in.loss_fn, ways_in.SGD, 2)
    compile_ = jax.stages.Lowered.compile

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
        raise KeyboardInterrupt("once")

    monkeypatch.setattr(jax.stages.Lowered, "compile", interrupted)
    got, _ = run(step, BATCHES[:2], KeyboardInterrupt)
    expected, _ = run(make_train_step(ways_in.loss_fn, ways_in.SGD, 2), BATCHES[:2])
    chex.assert_trees_all_equal(got, expected)


def test_another_model_through_the_same_step_is_made_ready_too():
    fails_on_vectors = optax.stateless(_refuse_vectors)
    step = make_train_step(
        lambda params, x: (jnp.sum(params) * jnp.sum(x), x.size), fails_on_vectors, 2
    )
    scalar, vector = step.init(jnp.zeros(())), step.init(jnp.zeros(3))
    for _ in range(2):
        scalar, _ = step(scalar, jnp.ones(2))
    vector, _ = step.accumulate(vector, jnp.ones(2))
    with pytest.raises(ValueError, match="a vector"):
        step(vector, jnp.ones(2))
    assert not vector.opt_state.acc_grads.is_deleted()
    assert float(step.accumulate(vector, jnp.ones(2))[1].num_tokens) == 4


def _refuse_vectors(updates: Any, params: Any) -> Any:
    if updates.ndim:
        raise ValueError("a vector")
    return updates


@pytest.mark.parametrize("way", ways_in.WAYS[2:])
def test_an_optimizer_that_takes_no_value(way: Callable[..., Any]):
    """Every other update of `sam` only moves to an adversarial point."""
    inner = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    windows = [BATCHES[:2], BATCHES[2:], BATCHES[1:3], BATCHES[:2]]
    got = way(ways_in.loss_fn, inner, 2)(ways_in.PARAMS, windows)
    params, state = ways_in.PARAMS, inner.init(ways_in.PARAMS)
    for window, after in zip(windows, got, strict=True):
        gradient = jax.tree.map(jnp.float32, ways_in.exact(params, *window))
        updates, state = inner.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(after, params, rtol=1e-5)


class FullDisk:
    """A loss with a callback that raises while the program runs, if it is told to."""

    def __init__(self, callback: str):
        self._callback, self.is_full = callback, False

    def __call__(self, params: Any, batch: Any) -> Any:
        loss_sum, n = ways_in.loss_fn(params, batch)
        if self._callback == "pure_callback":
            n = jax.pure_callback(self._write, jax.ShapeDtypeStruct((), n.dtype), n)
        elif self._callback == "io_callback":
            io_callback(self._log, None, n)
        else:
            jax.debug.callback(self._log, n)
        return loss_sum, n

    def _write(self, n: Any) -> Any:
        if self.is_full:
            raise OSError("disk full")
        return n

    def _log(self, n: Any) -> None:
        self._write(n)


CALLBACKS = ["pure_callback", "io_callback", "debug.callback"]
K, MOMENTUM = 2, optax.sgd(0.1, momentum=0.5)


def fail_in_the_second_window(way: str, callback: str, **options: Any) -> Any:
    """Return the step, the state before the failing call, and the batches left."""
    loss_fn = FullDisk(callback)
    options |= {"data_axes": None}
    step = meshes.make_step(way, MOMENTUM, None, loss_fn=loss_fn, k=K, **options)
    window = [stack(BATCHES[:2])] if "window" in way else BATCHES[:2]
    state, _ = run_step(step, step.init(ways_in.PARAMS), window)
    loss_fn.is_full = True
    with pytest.raises(Exception, match="disk full"):
        step(state, window[0])
    loss_fn.is_full = False
    return step, state, window


def after_two_windows() -> Any:
    params, state = ways_in.PARAMS, MOMENTUM.init(ways_in.PARAMS)
    for _ in range(2):
        gradient = jax.tree.map(jnp.float32, ways_in.exact(params, *BATCHES[:2]))
        updates, state = MOMENTUM.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("way", [*meshes.WAYS, *nnx_ways.WAYS])
def test_without_donation_a_call_that_failed_while_it_ran_can_be_repeated(
    way: str, callback: str
):
    step, state, window = fail_in_the_second_window(way, callback, donate=False)
    state, metrics = run_step(step, state, window)
    chex.assert_trees_all_close(state.params, after_two_windows(), rtol=1e-5)
    assert metrics.updated


@pytest.mark.parametrize("callback", CALLBACKS)
def test_after_a_call_that_failed_while_it_ran_parameters_and_moments_are_left(
    callback: str,
):
    step, state, window = fail_in_the_second_window("two programs", callback)
    with pytest.raises(ValueError, match="if it failed while it ran, restore"):
        step(state, window[0])
    new, inner = step.init(state.params), state.opt_state.inner_opt_state
    new = new._replace(opt_state=new.opt_state._replace(inner_opt_state=inner))
    state, _ = run_step(step, new, window)
    chex.assert_trees_all_close(state.params, after_two_windows(), rtol=1e-5)


@pytest.mark.parametrize("callback", CALLBACKS)
def test_after_a_call_that_failed_while_it_ran_an_nnx_model_is_left(callback: str):
    step, state, window = fail_in_the_second_window("nnx two programs", callback)
    for use in (lambda: step(state, window[0]), lambda: step._step.init(*state)):
        with pytest.raises(ValueError, match=r"begin with a new nnx\.Optimizer"):
            use()
    before = jax.tree.map(np.asarray, state.params)
    state = nnx_ways.State(
        state.model,
        nnx.Optimizer(state.model, token_accumulation(MOMENTUM, K), wrt=nnx.Param),
    )
    step._step.init(*state)
    state, _ = run_step(step, state, window)
    gradient = ways_in.exact(before, *BATCHES[:2])["w"]
    chex.assert_trees_all_close(
        state.params["w"], before["w"] - 0.1 * gradient, rtol=1e-5
    )


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("way", ["nnx two programs", "nnx window"])
def test_a_checkpoint_takes_the_place_of_what_a_failed_call_took(
    way: str, callback: str
):
    step, state, window = fail_in_the_second_window(way, callback)
    with pytest.raises(ValueError, match=r"Restore a checkpoint, nnx\.update"):
        step(state, window[0])
    loss_fn = ways_in.loss_fn
    other = nnx_ways.make_step(way, loss_fn, MOMENTUM, K)
    saved, _ = run_step(other, other.init(ways_in.PARAMS), window)
    nnx.update(tuple(state), nnx.state(tuple(saved)))
    state, _ = run_step(step, state, window)
    chex.assert_trees_all_close(state.params, after_two_windows(), rtol=1e-5)
