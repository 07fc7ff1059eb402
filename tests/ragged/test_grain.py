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
import numpy as np
import optax
import pytest
from grain.python import ReadOptions

from optax_tokenaccum import make_train_step, make_window_step
from optax_tokenaccum.grain import PlannedMicroBatch, planned_micro_batches
from optax_tokenaccum.ragged import pad_window

ROWS, WINDOW = 37, 8
PLAN: Any = {"max_tokens": 144, "length_buckets": (16, 64), "batch_multiple": 2}
SETTINGS: Any = {"window_size": WINDOW, **PLAN}
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
WINDOW_STEP = make_window_step(helpers.loss_sum_fn, SGD)


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
    """Also where a whole window is one element, for which any Grain pipeline works."""
    grad = jax.jit(jax.grad(lambda *args: helpers.loss_mean_fn(*args)[0]))
    pad = functools.partial(pad_window, pad_values=PADS, max_sequences=WINDOW, **PLAN)
    whole = thread(DATA.batch(WINDOW, batch_fn=pad).to_iter_dataset())
    state, by_window = STEP.init(PARAMS), WINDOW_STEP.init(PARAMS)
    windows = windows_of(planned())
    for number, (window, one) in enumerate(zip(windows, whole, strict=True)):
        rows = ORDER[number * WINDOW :][:WINDOW]
        assert sorted(sum(map(rows_of, window), [])) == sorted(rows)
        full = jax.tree.map(lambda x, rows=rows: x[rows], BATCH)
        exact = helpers.float64_gradient(state.params, full)
        means = [grad(state.params, micro_batch.batch) for micro_batch in window]
        naive = jax.tree.map(lambda *x: sum(x) / len(x), *means)
        for micro_batch in window:
            state, _ = STEP.accumulate(state, micro_batch.batch)
        state, _ = STEP.close_window(state)
        applied = state.opt_state.inner_opt_state[0].trace
        assert helpers.relative_error(applied, exact) < helpers.RTOL["float32"]
        assert helpers.relative_error(naive, exact) > 0.01
        by_window, metrics = WINDOW_STEP(by_window, one)
        assert metrics.num_tokens == full["mask"].sum()
    assert state.opt_state.gradient_step == len(windows) == 5
    error = helpers.relative_error(by_window.params, state.params)
    assert error < helpers.RTOL["float32"]
    shapes = {x.batch["mask"].shape for window in windows for x in window}
    assert shapes == {(8, 16), (2, 64)}


# Order, and resuming.


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


def is_long(sequence: Any) -> bool:
    return len(sequence["mask"]) > 20


PIPELINES: dict[str, Callable[[], grain.IterDataset]] = {
    "an IterDataset": lambda: planned(DATA.to_iter_dataset().filter(is_long)),
    "threads before and behind": lambda: thread(
        planned(thread(DATA.to_iter_dataset()))
    ),
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


def check_workers() -> None:
    """Workers before the windows keep the order; workers after them are refused."""
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    before = planned(DATA.to_iter_dataset().mp_prefetch(options))
    chex.assert_trees_all_equal(list(before), list(planned()))
    with pytest.raises(Exception, match="Workers must prefetch sequences, before"):
        next(iter(planned().mp_prefetch(options)))
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


# What would merge or lose windows is refused.

OTHER: Any = {
    "window_size": 9,
    "max_tokens": 256,
    "length_buckets": [32, 64],
    "batch_multiple": 1,
}


def test_other_settings_are_refused():
    iterator = iter(planned())
    next(iterator)
    other = iter(planned(**OTHER))
    with pytest.raises(ValueError, match="restored with the settings") as error:
        other.set_state(iterator.get_state())
    for name, got in OTHER.items():
        stored = list(SETTINGS[name]) if name == "length_buckets" else SETTINGS[name]
        assert f"{name} was stored as {stored}, got {got}" in str(error.value)
    assert rows_of(next(other)), "a refused state changes nothing"


def test_settings_are_compared_as_they_work():
    powers = [1, 2, 4, 8, 16, 32, 64]
    saved = iter(planned(length_buckets=None))
    next(saved)
    same = iter(planned(length_buckets=[np.int64(n) for n in reversed(powers)]))
    same.set_state(saved.get_state())
    chex.assert_trees_all_equal(list(same), list(saved))


@pytest.mark.parametrize(
    "other",
    [DATA.seed(1).shuffle(), DATA[:16]],
    ids=["another order", "none left"],
)
def test_another_window_is_refused(other: Any):
    iterator = iter(planned())
    while iterator.get_state()["num_sequences_before"] < 16:
        next(iterator)
    resumed = iter(planned(other))
    with pytest.raises(ValueError, match="read again as it was.*from index 16"):
        resumed.set_state(iterator.get_state())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "must be of an iterator of planned_micro",
            lambda: iter(planned()).set_state({"next_index": 3}),
        ),
        (
            TypeError,
            "must be filtered, before planned",
            lambda: planned().filter(lambda micro_batch: True),
        ),
        (TypeError, "grain.MapDataset or", lambda: planned(SEQUENCES)),
        (ValueError, "window_size must", lambda: planned(window_size=0)),
    ],
    ids=["another state", "filtered behind", "a list", "no window"],
)
def test_bad_calls_are_named_at_once(error: type, message: str, call: Any):
    with pytest.raises(error, match=message):
        call()


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
    """A source that fails to read one element, once."""

    def __init__(self, error: BaseException):
        super().__init__(SEQUENCES)
        self.errors = {11: error}

    def __getitem__(self, index: Any) -> Any:
        if index in self.errors:
            raise self.errors.pop(index)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("error", "threads"), [(OSError("timeout"), 2), (KeyboardInterrupt(), 1)], ids=repr
)
def test_no_sequence_is_lost_by_an_error(error: BaseException, threads: int):
    """The window whose reading failed is read again, as if nothing had happened."""
    whole = [rows_of(x) for x in planned(grain.MapDataset.source(SEQUENCES))]
    source = grain.MapDataset.source(Unreliable(error))
    options = ReadOptions(num_threads=threads, prefetch_buffer_size=2)
    iterator = iter(planned(source.to_iter_dataset(options)))
    done = []
    with pytest.raises(type(error)):
        while True:
            done.append(rows_of(next(iterator)))
    done += map(rows_of, iterator)
    assert done == whole
    assert sorted(sum(done, [])) == [*range(ROWS)]
