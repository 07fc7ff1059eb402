"""Orbax checkpoints in the middle of a window, as in `docs/recipes`.

`docs/resuming.md` saves the state of a train step with a fixed k, and `test_grain.py`
the iterator of planned micro-batches; this file has other states and iterators.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chex
import helpers
import jax
import optax
import orbax.checkpoint as ocp
import pytest

from optax_tokenaccum import MultiSteps, StepState, make_train_step, token_accumulation

pytestmark = pytest.mark.slow

K = 4
PARAMS = helpers.init_params(0)
ROWS = helpers.ragged_batch(0)
# The trace accumulates gradients, and is not rounded to the parameters' size.
SGD = optax.sgd(1.0, momentum=0.9)
SKIPS: Any = {"should_skip_update_fn": optax.skip_not_finite}


class Way(NamedTuple):
    """A way to train that carries a `StepState`."""

    init: Callable[[Any], StepState]
    step: Callable[[StepState, Any], StepState]

    def states(self, state: StepState, batches: Any) -> list[StepState]:
        """Return the state before the first micro-batch and after each one."""
        result = [state]
        for batch in batches:
            result.append(self.step(result[-1], batch))
        return result


def by_train_step() -> Way:
    # Only the device knows where windows end.
    step = make_train_step(helpers.loss_sum_fn, SGD, lambda _: K, donate=False, **SKIPS)
    return Way(step.init, lambda state, batch: step(state, batch)[0])


def by_loop(optimizer: Any, loss_fn: Any) -> Way:
    def init(params: Any) -> StepState:
        return StepState(params, optimizer.init(params))

    step = helpers.micro_step(optimizer, loss_fn)
    return Way(init, lambda state, batch: StepState(*step(*state, batch)))


WAYS: dict[str, Callable[[], Way]] = {
    "make_train_step": by_train_step,
    "token_accumulation": lambda: by_loop(
        token_accumulation(SGD, every_n_tokens=int(ROWS["mask"].sum()), **SKIPS),
        helpers.loss_sum_fn,
    ),
    "MultiSteps": lambda: by_loop(MultiSteps(SGD, K), helpers.loss_mean_fn),
}


def trace_of(state: StepState) -> Any:
    return state.opt_state.inner_opt_state[0].trace


def exact_trace(states: list[StepState]) -> Any:
    """The trace after two windows, each of all rows, in float64."""
    first, second = (
        helpers.float64_gradient(state.params, ROWS) for state in (states[0], states[K])
    )
    return jax.tree.map(lambda x, y: 0.9 * x + y, first, second)


@pytest.mark.parametrize("name", WAYS)
def test_goes_on_from_every_micro_batch(name: str, tmp_path: Path):
    way, batches = WAYS[name](), helpers.cut(ROWS, K) * 2
    states = way.states(way.init(PARAMS), batches)
    exact = exact_trace(states)
    error = helpers.relative_error(trace_of(states[-1]), exact)
    assert error < helpers.RTOL["float32"]
    with ocp.StandardCheckpointer() as checkpointer:
        for done, state in enumerate(states):
            checkpointer.save(tmp_path / str(done), state)
            checkpointer.wait_until_finished()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, way.init(PARAMS))
    for done, state in enumerate(states):
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / str(done), target)
        chex.assert_trees_all_equal(restored, state)
        end = way.states(restored, batches[done:])[-1]
        chex.assert_trees_all_equal(end, states[-1])

        inner = state.opt_state.inner_opt_state
        begun = way.init(state.params)
        opt_state = begun.opt_state._replace(inner_opt_state=inner)
        naive = way.states(begun._replace(opt_state=opt_state), batches[done:])[-1]
        lost = helpers.relative_error(trace_of(naive), exact) > 0.01
        assert lost == (state.opt_state.mini_step > 0)


@pytest.mark.parametrize("prefetch", [False, True], ids=["as it is", "prefetched"])
def test_a_grain_iterator_goes_on_in_the_middle_of_a_window(
    prefetch: bool, tmp_path: Path
):
    grain = pytest.importorskip("grain")
    num_rows = helpers.ROWS
    rows = [jax.tree.map(lambda x, i=i: x[i], ROWS) for i in range(num_rows)]
    data = grain.MapDataset.source(rows).shuffle(seed=0).repeat(2)
    dataset = data.batch(num_rows // K).to_iter_dataset()
    if prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(
            dataset, prefetch_buffer_size=3
        )
    way = by_train_step()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, way.init(PARAMS))
    iterator, states = iter(dataset), [way.init(PARAMS)]
    with ocp.CheckpointManager(tmp_path) as manager:
        for done in range(2 * K + 1):
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(states[-1]),
                data=grain.checkpoint.CheckpointSave(iterator),
            )
            manager.save(done, args=args)
            if done < 2 * K:
                states.append(way.step(states[-1], next(iterator)))
    exact = exact_trace(states)
    error = helpers.relative_error(trace_of(states[-1]), exact)
    assert error < helpers.RTOL["float32"]
    for done, state in enumerate(states):
        with ocp.CheckpointManager(tmp_path) as manager:
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                data=grain.checkpoint.CheckpointRestore(iter(dataset)),
            )
            restored = manager.restore(done, args=args)
        chex.assert_trees_all_equal(restored.state, state)
        end = way.states(restored.state, restored.data)[-1]
        chex.assert_trees_all_equal(end, states[-1])
        if done % K:
            begun_anew = itertools.islice(dataset, 2 * K - done)
            naive = way.states(restored.state, begun_anew)[-1]
            assert helpers.relative_error(trace_of(naive), exact) > 0.01
