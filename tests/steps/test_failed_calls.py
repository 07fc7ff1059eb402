"""Calls that fail when they are traced, compiled or run, and what is left then."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import problems
import pytest
from flax import nnx
from helpers import run_step, stack
from jax.experimental import io_callback

from optax_tokenaccum import make_train_step

BATCHES = [problems.batch_of(i, [i + 1.0] * 8) for i in range(4)]
K, MOMENTUM, WINDOW = 2, optax.sgd(0.1, momentum=0.5), [BATCHES[0]] * 2


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


def of_few_rows(params: Any, batch: Any) -> Any:
    """A loss that raises while it is traced with more than 8 rows, 1 on a device."""
    assert len(batch["x"]) in (1, 8), "while tracing"
    return problems.linear_loss(params, batch)


def restored(state: Any) -> Any:
    """The same state in new arrays."""
    if not isinstance(state, nnx_ways.State):
        return jax.tree.map(jnp.copy, state)
    nnx.update(tuple(state), jax.tree.map(jnp.copy, nnx.state(tuple(state))))
    return state


@pytest.mark.parametrize("over", ["1", "8"])
@pytest.mark.parametrize("begin", ["first call", "later", "restored", "other step"])
@pytest.mark.parametrize(
    "way", ["two programs", "one program", "window", *nnx_ways.WAYS]
)
def test_an_error_while_tracing_loses_nothing(way: str, begin: str, over: str):
    """The state that was given trains when the next call is right."""

    def new_step() -> Any:
        options = {"mesh": None, "data_axes": None} | meshes.over(over)
        return meshes.make_step(way, MOMENTUM, loss_fn=of_few_rows, k=K, **options)

    step, in_window = new_step(), way.endswith("window")
    window, windows = [stack(WINDOW)] if in_window else WINDOW, 1
    wrong = jax.tree.map(lambda x: np.concatenate([x, x]), WINDOW[0])
    state = step.init(problems.PARAMS)
    if begin != "first call":
        before = new_step() if begin == "other step" else step
        (state, _), windows = run_step(before, state, window), 2
    state = restored(state) if begin == "restored" else state
    with pytest.raises(AssertionError, match="while tracing"):
        step(state, stack([wrong] * K) if in_window else wrong)
    state, metrics = run_step(step, state, window)
    assert metrics.updated
    check_trained(state, windows)


@pytest.mark.parametrize("way", ["two programs", "nnx two programs"])
def test_a_guard_against_transfers_loses_nothing(way: str):
    step = meshes.make_step(
        way, MOMENTUM, None, loss_fn=of_few_rows, k=K, data_axes=None
    )
    state = restored(run_step(step, step.init(problems.PARAMS), WINDOW)[0])
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="transfer"):
        step(state, WINDOW[0])
    check_trained(run_step(step, state, WINDOW)[0], 2)


def test_sums_in_host_memory_raise_and_lose_nothing():
    step = make_train_step(problems.linear_loss, MOMENTUM, K)
    state = step.init(problems.PARAMS)
    [device] = state.opt_state.mini_step.devices()
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    sums = jax.device_put(state.opt_state.grad_sums, host)
    opt_state = state.opt_state._replace(grad_sums=sums)
    with pytest.raises(ValueError, match="memory_space of all inputs"):
        step(state._replace(opt_state=opt_state), WINDOW[0])
    check_trained(run_step(step, state, WINDOW)[0], 1)


def test_an_array_that_is_two_leaves_of_a_state_is_copied():
    params = {"a": jnp.ones(3), "b": jnp.full(3, 2.0)}

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.sum(params["a"] * x + params["b"] * x**2), x.size

    step = make_train_step(loss_fn, optax.sgd(1.0), 2)
    state = step.init(params)
    state = state._replace(params={"a": state.params["a"], "b": state.params["a"]})
    state, _ = run_step(step, state, [jnp.full(3, 2.0)] * 2)
    tied = {"a": 1 - jnp.full(3, 2 / 3), "b": 1 - jnp.full(3, 4 / 3)}
    chex.assert_trees_all_close(state.params, tied, rtol=1e-6)


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
    check_trained(state, 2)
    assert metrics.updated


def check_trained(state: Any, windows: int) -> None:
    params, moments = problems.PARAMS, MOMENTUM.init(problems.PARAMS)
    for _ in range(windows):
        gradient = jax.tree.map(jnp.float32, problems.exact(params, WINDOW[0]))
        updates, moments = MOMENTUM.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(state.params, params, rtol=1e-5)


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
