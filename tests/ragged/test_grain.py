"""Grain pipelines: windows equal their full batches, and none is lost or merged."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import absl.flags
import chex
import grain
import helpers
import jax
import numpy as np
import optax
import pytest
from grain.python import ReadOptions

from optax_tokenaccum import make_train_step
from optax_tokenaccum.grain import PlannedMicroBatch, planned_micro_batches

ROWS, WINDOW = 37, 8
SETTINGS: Any = {
    "window_size": WINDOW,
    "max_tokens": 144,
    "length_buckets": (np.int64(64), 16),
    "batch_multiple": 2,
}
PADS = {"tokens": 0, "labels": 0, "mask": False, "row": -1}

BATCH = helpers.ragged_batch(0, ROWS)
SEQUENCES = [
    {name: x[i, :n] for name, x in BATCH.items()} | {"row": np.int32(i)}
    for i, n in enumerate(BATCH["mask"].sum(1))
]
DATA = grain.MapDataset.source(SEQUENCES).shuffle(seed=3)
ORDER = [int(sequence["row"]) for sequence in DATA]

PARAMS = helpers.init_params(0)
SGD = optax.sgd(0.1, momentum=0.0)  # whose trace is the gradient
STEP = make_train_step(helpers.loss_sum_fn, SGD)


def planned(dataset: Any = DATA, **settings: Any) -> grain.IterDataset:
    return planned_micro_batches(dataset, pad_values=PADS, **SETTINGS | settings)


def rows_of(micro_batch: PlannedMicroBatch) -> list[int]:
    return [row for row in micro_batch.batch["row"].tolist() if row >= 0]


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


def test_each_window_is_its_full_batch_and_a_mean_of_means_is_not():
    grad = jax.jit(jax.grad(lambda *args: helpers.loss_mean_fn(*args)[0]))
    state, windows = STEP.init(PARAMS), windows_of(planned())
    for number, window in enumerate(windows):
        rows = ORDER[number * WINDOW :][:WINDOW]
        assert sorted(sum(map(rows_of, window), [])) == sorted(rows)
        full = jax.tree.map(lambda x, rows=rows: x[rows], BATCH)
        exact = helpers.float64_gradient(state.params, full)
        means = [grad(state.params, micro_batch.batch) for micro_batch in window]
        naive = jax.tree.map(lambda *x: sum(x) / len(x), *means)
        for micro_batch in window:
            state, _ = STEP.accumulate(state, micro_batch.batch)
        state, metrics = STEP.close_window(state)
        applied = state.opt_state.inner_opt_state[0].trace
        assert helpers.relative_error(applied, exact) < helpers.RTOL["float32"]
        assert helpers.relative_error(naive, exact) > 0.01
        assert metrics.num_tokens == full["mask"].sum()
    assert state.opt_state.gradient_step == len(windows) == 5
    shapes = {x.batch["mask"].shape for window in windows for x in window}
    assert shapes == {(8, 16), (2, 64)}


class ByHand(grain.DatasetIterator):
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


class DatasetByHand(grain.IterDataset):
    def __iter__(self) -> ByHand:
        return ByHand()


PIPELINES: dict[str, Callable[[], grain.IterDataset]] = {
    "threads": lambda: thread(planned(thread(DATA.to_iter_dataset()))),
    "an iterator by hand": lambda: planned(DatasetByHand()),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_goes_on_bit_for_bit_from_every_micro_batch(name: str):
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
    threads = iter(PIPELINES["threads"]())
    chex.assert_trees_all_equal(list(threads), whole)
    once, twice = (planned(DATA.repeat(n)) for n in (1, 2))
    chex.assert_trees_all_equal([list(once), list(once)], [whole, whole])
    counts = [
        [sum(map(len, map(rows_of, window))) for window in windows_of(dataset)]
        for dataset in (once, twice)
    ]
    assert counts == [[8] * 4 + [5], [8] * 9 + [2]]


@pytest.mark.slow
def test_workers_keep_the_order_before_the_windows_and_are_refused_behind():
    absl.flags.FLAGS(sys.argv[:1])  # Grain reads flags of its own
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    before = planned(DATA.to_iter_dataset().mp_prefetch(options))
    chex.assert_trees_all_equal(list(before), list(planned()))
    with pytest.raises(Exception, match="Workers must prefetch sequences, before"):
        next(iter(planned().mp_prefetch(options)))


def test_other_settings_are_refused():
    iterator = iter(planned())
    next(iterator)
    changed = {"window_size": 9, "max_tokens": 256, "length_buckets": [32, 64]}
    other = iter(planned(**changed))
    with pytest.raises(ValueError, match="restored with the settings") as error:
        other.set_state(iterator.get_state())
    for name, got in changed.items():
        stored = [16, 64] if name == "length_buckets" else SETTINGS[name]
        assert f"{name} was stored as {stored}, got {got}" in str(error.value)
    assert rows_of(next(other)), "a refused state changes nothing"


def test_another_window_is_refused():
    iterator = iter(planned())
    while iterator.get_state()["num_sequences_before"] < 16:
        next(iterator)
    resumed = iter(planned(DATA.seed(1).shuffle()))
    with pytest.raises(ValueError, match="read again as it was.*from index 16"):
        resumed.set_state(iterator.get_state())


def test_bad_calls_are_named_at_once():
    with pytest.raises(ValueError, match="must be of an iterator of planned_micro"):
        iter(planned()).set_state({"next_index": 3})
    with pytest.raises(TypeError, match="must be filtered, before planned"):
        planned().filter(lambda micro_batch: True)
    with pytest.raises(TypeError, match="grain.MapDataset or"):
        planned(SEQUENCES)


def of_length(n: int) -> Any:
    return {
        name: np.resize(x, n) if np.ndim(x) else x for name, x in SEQUENCES[0].items()
    }


BAD = {
    "empty": (of_length(0), "from 1 token .* 64: got 0 at index 11 of the dataset"),
    "too long": (of_length(65), "got 65 at index 11 of the dataset"),
    "uneven": ({**of_length(4), "mask": np.ones(3, bool)}, "one length: got"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sequences_are_named_again_and_take_no_others_along(case: str):
    bad, message = BAD[case]
    dataset = grain.MapDataset.source([*SEQUENCES[:11], bad, *SEQUENCES[11:]])
    iterator = iter(planned(dataset))
    while not next(iterator).is_last:  # the first window is right
        pass
    state = iterator.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as error:
            next(iterator)
        if "of the dataset" not in message:
            note = "Indices count from the window's first, sequence 8 of the dataset."
            assert error.value.__notes__[0] == note
    assert iterator.get_state() == state


class Unreliable(list):
    """A source that is interrupted while it reads one element, once."""

    is_interrupted = False

    def __getitem__(self, index: Any) -> Any:
        if index == 11 and not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_no_sequence_is_lost_by_an_error():
    """The window whose reading failed is read again, as if nothing had happened."""
    whole = [rows_of(x) for x in planned(grain.MapDataset.source(SEQUENCES))]
    source = grain.MapDataset.source(Unreliable(SEQUENCES))
    options = ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(planned(source.to_iter_dataset(options)))
    done = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            done.append(rows_of(next(iterator)))
    done += map(rows_of, iterator)
    assert done == whole
    assert sorted(sum(done, [])) == [*range(ROWS)]
