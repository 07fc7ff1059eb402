"""Grain pipelines: windows equal their full batches, and none is lost or merged."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import chex
import grain
import helpers
import jax
import optax
import orbax.checkpoint as ocp
import pytest
from grain_data import (
    BATCH,
    DATA,
    ORDER,
    PADS,
    PLAN,
    ROWS,
    SEQUENCES,
    WINDOW,
    planned,
    rows_of,
)

from optax_tokenaccum import make_train_step, make_window_step, pad_window
from optax_tokenaccum.grain import PlannedMicroBatch

PARAMS = helpers.init_params(0)
SGD = optax.sgd(1.0, momentum=0.0)
# Not donated, because every old state is resumed from.
STEP = make_train_step(helpers.loss_sum_fn, optax.adam(0.1), donate=False)


def thread(dataset: grain.IterDataset) -> grain.IterDataset:
    return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=3)


def windows_of(
    micro_batches: Iterable[PlannedMicroBatch],
) -> list[list[PlannedMicroBatch]]:
    windows = [[]]
    for micro_batch in micro_batches:
        windows[-1].append(micro_batch)
        if micro_batch.is_last:
            windows.append([])
    assert not windows.pop(), "the dataset ended within a window"
    return windows


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return helpers.loss_mean_fn(params, batch)[0]


def test_each_window_is_its_full_batch_and_a_mean_of_means_is_not():
    step = make_train_step(helpers.loss_sum_fn, SGD)
    state, grad = step.init(PARAMS), jax.jit(jax.grad(mean_loss))
    windows = windows_of(planned())
    for number, window in enumerate(windows):
        rows = ORDER[number * WINDOW :][:WINDOW]
        assert sorted(sum(map(rows_of, window), [])) == sorted(rows)
        full = jax.tree.map(lambda x, rows=rows: x[rows], BATCH)
        exact = helpers.float64_gradient(state.params, full)
        means = [grad(state.params, micro_batch.batch) for micro_batch in window]
        naive = jax.tree.map(lambda *x: sum(x) / len(x), *means)
        for micro_batch in window:
            state, _ = step.accumulate(state, micro_batch.batch)
        state, metrics = step.close_window(state)
        assert metrics.num_tokens == full["mask"].sum()
        applied = state.opt_state.inner_opt_state[0].trace
        assert helpers.relative_error(applied, exact) < helpers.RTOL["float32"]
        assert helpers.relative_error(naive, exact) > 0.01
    assert metrics.gradient_step == len(windows) == 5
    shapes = {x.batch["mask"].shape for window in windows for x in window}
    assert shapes == {(8, 16), (2, 64)}


class OnceOnly(grain.DatasetIterator):
    """Counts in its state dict itself, and must not be called after its end."""

    def __init__(self):
        super().__init__()
        self._state = {"next": 0}

    def __next__(self) -> Any:
        assert self._state["next"] <= ROWS, "asked again behind the end"
        self._state["next"] += 1
        if self._state["next"] > ROWS:
            raise StopIteration
        return SEQUENCES[self._state["next"] - 1]

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._state = state


class ByHand(grain.IterDataset):
    def __iter__(self) -> OnceOnly:
        return OnceOnly()


def is_long(sequence: Any) -> bool:
    return len(sequence["mask"]) > 20


PIPELINES: dict[str, Callable[[], grain.IterDataset]] = {
    "one epoch": planned,
    "two epochs": lambda: planned(DATA.repeat(2)),
    "filtered before": lambda: planned(DATA.filter(is_long)),
    "an IterDataset": lambda: planned(DATA.to_iter_dataset().filter(is_long)),
    "threads before and behind": lambda: thread(
        planned(thread(DATA.to_iter_dataset()))
    ),
    "an iterator by hand": lambda: planned(ByHand()),
    "mapped behind": lambda: planned().map(lambda x: x._replace(batch=x.batch["row"])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_goes_on_bit_for_bit_from_every_micro_batch(name):
    iterator = iter(PIPELINES[name]())
    states, whole = [iterator.get_state()], []
    for micro_batch in iterator:
        states.append(json.loads(json.dumps(iterator.get_state())))
        whole.append(micro_batch)
    assert len(whole) > 5
    for done, state in enumerate(states):
        iterator = iter(PIPELINES[name]())
        next(iterator)
        iterator.set_state(state)
        assert iterator.get_state() == state
        rest = list(iterator)
        assert len(rest) == len(whole) - done
        chex.assert_trees_all_equal(rest, whole[done:])


def test_order_is_that_of_the_dataset():
    whole = list(planned())
    threads = iter(PIPELINES["threads before and behind"]())
    chex.assert_trees_all_equal(list(threads), whole)
    once, twice = (planned(DATA.repeat(n)) for n in (1, 2))
    chex.assert_trees_all_equal(list(once), whole)
    chex.assert_trees_all_equal(list(once), whole)  # another epoch
    counts = [
        [sum(map(len, map(rows_of, window))) for window in windows_of(dataset)]
        for dataset in (once, twice)
    ]
    assert counts == [[8] * 4 + [5], [8] * 9 + [2]]


def train(state: Any, micro_batches: Iterable[PlannedMicroBatch]) -> list[Any]:
    states = [state]
    for micro_batch in micro_batches:
        state, _ = STEP.accumulate(state, micro_batch.batch)
        if micro_batch.is_last:
            state, _ = STEP.close_window(state)
        states.append(state)
    return states


def test_training_goes_on_bit_for_bit_from_every_micro_batch():
    iterator = iter(planned())
    positions = [iterator.get_state()]
    micro_batches = []
    for micro_batch in iterator:
        micro_batches.append(micro_batch)
        positions.append(iterator.get_state())
    states = train(STEP.init(PARAMS), micro_batches)
    assert len(states) == len(positions)
    for state, position in zip(states, positions, strict=True):
        iterator.set_state(position)
        chex.assert_trees_all_equal(train(state, iterator)[-1], states[-1])


def test_orbax_saves_it_beside_the_state(tmp_path):
    states = train(STEP.init(PARAMS), planned())
    iterator = iter(planned())
    state = train(STEP.init(PARAMS), (next(iterator) for _ in range(5)))[-1]
    assert state.opt_state.mini_step > 0, "not within a window"

    with ocp.CheckpointManager(tmp_path) as manager:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=grain.checkpoint.CheckpointSave(iterator),
        )
        manager.save(5, args=arguments)
        manager.wait_until_finished()
        next(iterator)

        def restore(iterator: grain.DatasetIterator) -> Any:
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            target = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
                jax.eval_shape(STEP.init, PARAMS),
            )
            arguments = ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                data=grain.checkpoint.CheckpointRestore(iterator),
            )
            return manager.restore(5, args=arguments)

        restored = restore(iter(planned()))
        chex.assert_trees_all_equal(
            train(restored["state"], restored["data"])[-1], states[-1]
        )
        with pytest.raises(ValueError, match="window_size was stored as 8, got 9"):
            restore(iter(planned(window_size=9)))


def check_workers() -> None:
    """Workers before the windows keep the order; workers after them are refused."""
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    whole = list(planned())
    before = iter(planned(DATA.to_iter_dataset().mp_prefetch(options)))
    chex.assert_trees_all_equal([next(before) for _ in range(5)], whole[:5])
    state = before.get_state()
    assert state["micro_batches_done"] > 0
    next(before)
    before.set_state(json.loads(json.dumps(state)))
    chex.assert_trees_all_equal(list(before), whole[5:])
    behind = iter(planned().mp_prefetch(options))
    with pytest.raises(Exception, match="Workers must prefetch sequences, before"):
        next(behind)
    print("checked")


@pytest.mark.slow
def test_workers():
    # In a separate process, which parses Grain's flags.
    code = "import sys, absl.flags, test_grain\n"
    code += "absl.flags.FLAGS(sys.argv[:1]); test_grain.check_workers()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "checked\n", done.stderr


def test_a_whole_window_as_one_element():
    """Needs no marks and no resuming within a window, so any Grain pipeline works."""
    pad = functools.partial(pad_window, pad_values=PADS, max_sequences=WINDOW, **PLAN)
    windows = thread(DATA.batch(WINDOW, batch_fn=pad).to_iter_dataset())
    step, by_micro_batches = (
        make(helpers.loss_sum_fn, SGD) for make in (make_window_step, make_train_step)
    )
    state, expected = step.init(PARAMS), by_micro_batches.init(PARAMS)
    iterator = iter(windows)
    for window, micro_batches in zip(iterator, windows_of(planned()), strict=True):
        state, metrics = step(state, window)
        for micro_batch in micro_batches:
            expected, _ = by_micro_batches.accumulate(expected, micro_batch.batch)
        expected, _ = by_micro_batches.close_window(expected)
    assert metrics.num_tokens == sum(BATCH["mask"][ORDER[-5:]].ravel())
    error = helpers.relative_error(state.params, expected.params)
    assert error < helpers.RTOL["float32"]
