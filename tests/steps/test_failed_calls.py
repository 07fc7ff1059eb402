"""Calls that fail when they are traced, compiled or run, and what is left then."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import optax
import problems
import pytest
from flax import nnx
from helpers import run_step, stack
from jax.experimental import io_callback

from optax_tokenaccum import make_train_step

BATCHES = [problems.batch_of(i, [i + 1.0] * 8) for i in range(4)]


def run(step: Any, batches: Any, retries: Any = ()) -> Any:
    """Repeat each failed call, whose arguments must still be alive."""
    state, failures = step.init(problems.PARAMS), 0
    for batch in batches:
        try:
            state, metrics = step(state, batch)
        except retries as error:
            failures += 1
            assert str(error) == "once"
            state, metrics = step(state, batch)
    assert failures == (retries != ())
    return state, metrics


def test_an_error_in_the_optimizer_leaves_the_window_open():
    errors = [KeyboardInterrupt("once")]

    def fails_when_first_traced(count: Any) -> float:
        if errors:
            raise errors.pop()
        return 1.0

    failing, works = (
        make_train_step(problems.linear_loss, optax.sgd(rate), 4, **meshes.over("8"))
        for rate in (fails_when_first_traced, 1.0)
    )
    got, metrics = run(failing, BATCHES, KeyboardInterrupt)
    chex.assert_trees_all_equal(got.params, run(works, BATCHES)[0].params)
    assert metrics.updated and metrics.num_tokens == 80


class FullDisk:
    """A loss with a callback that raises while the program runs, if it is told to."""

    is_full = False

    def __call__(self, params: Any, batch: Any) -> Any:
        loss_sum, n = problems.linear_loss(params, batch)
        return loss_sum, io_callback(self._write, jax.ShapeDtypeStruct((), n.dtype), n)

    def _write(self, n: Any) -> Any:
        if self.is_full:
            raise OSError("disk full")
        return n


on_a_cpu = pytest.mark.needs(cpu="a GPU only logs that a callback raised")
K, MOMENTUM = 2, optax.sgd(0.1, momentum=0.5)


def fail_in_the_second_window(way: str, **options: Any) -> Any:
    """Return the step, the state before the failing call, and the batches left."""
    loss_fn = FullDisk()
    options |= {"data_axes": None}
    step = meshes.make_step(way, MOMENTUM, None, loss_fn=loss_fn, k=K, **options)
    window = [stack([BATCHES[0]] * 2)] if "window" in way else [BATCHES[0]] * 2
    state, _ = run_step(step, step.init(problems.PARAMS), window)
    loss_fn.is_full = True
    with pytest.raises(Exception, match="disk full"):
        step(state, window[0])
    loss_fn.is_full = False
    return step, state, window


def after_two_windows() -> Any:
    params, state = problems.PARAMS, MOMENTUM.init(problems.PARAMS)
    for _ in range(2):
        gradient = jax.tree.map(jnp.float32, problems.exact(params, BATCHES[0]))
        updates, state = MOMENTUM.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@on_a_cpu
def test_without_donation_a_call_that_failed_while_it_ran_can_be_repeated():
    step, state, window = fail_in_the_second_window("two programs", donate=False)
    state, metrics = run_step(step, state, window)
    chex.assert_trees_all_close(state.params, after_two_windows(), rtol=1e-5)
    assert metrics.updated


@on_a_cpu
def test_after_a_call_that_failed_while_it_ran_parameters_and_moments_are_left():
    step, state, window = fail_in_the_second_window("two programs")
    with pytest.raises(ValueError, match="if it failed while it ran, restore"):
        step(state, window[0])
    new, inner = step.init(state.params), state.opt_state.inner_opt_state
    new = new._replace(opt_state=new.opt_state._replace(inner_opt_state=inner))
    state, _ = run_step(step, new, window)
    chex.assert_trees_all_close(state.params, after_two_windows(), rtol=1e-5)


@on_a_cpu
def test_a_checkpoint_takes_the_place_of_what_a_failed_call_took():
    way = "nnx two programs"
    step, state, window = fail_in_the_second_window(way)
    with pytest.raises(ValueError, match=r"Restore a checkpoint, nnx\.update"):
        step(state, window[0])
    other = nnx_ways.make_step(way, problems.linear_loss, MOMENTUM, K)
    saved, _ = run_step(other, other.init(problems.PARAMS), window)
    nnx.update(tuple(state), nnx.state(tuple(saved)))
    state, _ = run_step(step, state, window)
    chex.assert_trees_all_close(state.params, after_two_windows(), rtol=1e-5)
