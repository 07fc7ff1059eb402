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
from helpers import run_step
from jax.experimental import io_callback

from optax_tokenaccum import make_train_step

BATCHES = [problems.batch_of(i, [i + 1.0] * 8) for i in range(4)]


def test_an_error_in_the_optimizer_leaves_the_window_open():
    """The failed call can be repeated: its arguments are still alive."""
    errors = [KeyboardInterrupt("once")]

    def fails_when_first_traced(count: Any) -> float:
        if errors:
            raise errors.pop()
        return 1.0

    failing, works = (
        make_train_step(problems.linear_loss, optax.sgd(rate), 4, **meshes.over("8"))
        for rate in (fails_when_first_traced, 1.0)
    )
    state, failures = failing.init(problems.PARAMS), 0
    for batch in BATCHES:
        try:
            state, metrics = failing(state, batch)
        except KeyboardInterrupt:
            failures += 1
            state, metrics = failing(state, batch)
    expected, _ = run_step(works, works.init(problems.PARAMS), BATCHES)
    chex.assert_trees_all_equal(state.params, expected.params)
    assert failures == 1 and metrics.updated and metrics.num_tokens == 80


class FullDisk:
    """A loss with a callback that raises while the program runs, if it is told to."""

    is_full = False

    def __call__(self, params: Any, batch: Any) -> Any:
        loss_sum, n = problems.linear_loss(params, batch)
        io_callback(self._write, None, n)
        return loss_sum, n

    def _write(self, n: Any) -> None:
        if self.is_full:
            raise OSError("disk full")


on_a_cpu = pytest.mark.needs(cpu="a GPU only logs that a callback raised")
K, MOMENTUM, WINDOW = 2, optax.sgd(0.1, momentum=0.5), [BATCHES[0]] * 2


def fail_in_the_second_window(way: str, **options: Any) -> Any:
    """Return the step, and the state before the failing call."""
    loss_fn = FullDisk()
    options |= {"data_axes": None}
    step = meshes.make_step(way, MOMENTUM, None, loss_fn=loss_fn, k=K, **options)
    state, _ = run_step(step, step.init(problems.PARAMS), WINDOW)
    loss_fn.is_full = True
    with pytest.raises(Exception, match="disk full"):
        step(state, WINDOW[0])
    loss_fn.is_full = False
    return step, state


def check_goes_on(step: Any, state: Any) -> None:
    """The second window leads to the parameters of a loop by hand."""
    state, metrics = run_step(step, state, WINDOW)
    params, moments = problems.PARAMS, MOMENTUM.init(problems.PARAMS)
    for _ in range(2):
        gradient = jax.tree.map(jnp.float32, problems.exact(params, WINDOW[0]))
        updates, moments = MOMENTUM.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(state.params, params, rtol=1e-5)
    assert metrics.updated


@on_a_cpu
def test_without_donation_a_call_that_failed_while_it_ran_can_be_repeated():
    check_goes_on(*fail_in_the_second_window("two programs", donate=False))


@on_a_cpu
def test_after_a_call_that_failed_while_it_ran_parameters_and_moments_are_left():
    step, state = fail_in_the_second_window("two programs")
    with pytest.raises(ValueError, match="if it failed while it ran, restore"):
        step(state, WINDOW[0])
    new, inner = step.init(state.params), state.opt_state.inner_opt_state
    new = new._replace(opt_state=new.opt_state._replace(inner_opt_state=inner))
    check_goes_on(step, new)


@on_a_cpu
def test_a_checkpoint_takes_the_place_of_what_a_failed_call_took():
    way = "nnx two programs"
    step, state = fail_in_the_second_window(way)
    with pytest.raises(ValueError, match=r"Restore a checkpoint, nnx\.update"):
        step(state, WINDOW[0])
    other = nnx_ways.make_step(way, problems.linear_loss, MOMENTUM, K)
    saved, _ = run_step(other, other.init(problems.PARAMS), WINDOW)
    nnx.update(tuple(state), nnx.state(tuple(saved)))
    check_goes_on(step, state)
