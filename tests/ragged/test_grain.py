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
import orbax.checkpoint as ocp
import pytest
from grain.python import ReadOptions

from optax_tokenaccum import make_train_step, make_window_step, pad_window, plan_window
from optax_tokenaccum.grain import PlannedMicroBatch, planned_micro_batches

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
# SGD whose trace is the gradient. Not donated, because every old state is resumed from.
SGD = optax.sgd(0.1, momentum=0.0)
STEP = make_train_step(helpers.loss_sum_fn, SGD, donate=False)


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


def train(state: Any, micro_batches: Iterable[PlannedMicroBatch]) -> list[Any]:
    states = [state]
    for micro_batch in micro_batches:
        state, _ = STEP.accumulate(state, micro_batch.batch)
        if micro_batch.is_last:
            state, _ = STEP.close_window(state)
        states.append(state)
    return states


def test_each_window_is_its_full_batch_and_a_mean_of_means_is_not():
    """Also where a whole window is one element, for which any Grain pipeline works."""
    grad = jax.jit(jax.grad(lambda *args: helpers.loss_mean_fn(*args)[0]))
    window_step = make_window_step(helpers.loss_sum_fn, SGD)
    pad = functools.partial(pad_window, pad_values=PADS, max_sequences=WINDOW, **PLAN)
    whole = thread(DATA.batch(WINDOW, batch_fn=pad).to_iter_dataset())
    state, by_window = STEP.init(PARAMS), window_step.init(PARAMS)
    windows = windows_of(planned())
    for number, (window, one) in enumerate(zip(windows, whole, strict=True)):
        rows = ORDER[number * WINDOW :][:WINDOW]
        assert sorted(sum(map(rows_of, window), [])) == sorted(rows)
        full = jax.tree.map(lambda x, rows=rows: x[rows], BATCH)
        exact = helpers.float64_gradient(state.params, full)
        means = [grad(state.params, micro_batch.batch) for micro_batch in window]
        naive = jax.tree.map(lambda *x: sum(x) / len(x), *means)
        state = train(state, window)[-1]
        applied = state.opt_state.inner_opt_state[0].trace
        assert helpers.relative_error(applied, exact) < helpers.RTOL["float32"]
        assert helpers.relative_error(naive, exact) > 0.01
        by_window, metrics = window_step(by_window, one)
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
    "two epochs": lambda: planned(DATA.repeat(2)),
    "an IterDataset": lambda: planned(DATA.to_iter_dataset().filter(is_long)),
    "threads before and behind": lambda: thread(
        planned(thread(DATA.to_iter_dataset()))
    ),
    "an iterator by hand": lambda: planned(DatasetByHand()),
    "mapped behind": lambda: planned().map(lambda x: x._replace(batch=x.batch["row"])),
}


SLOW = ["two epochs", "threads before and behind"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in PIPELINES
    ],
)
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


def test_training_goes_on_bit_for_bit_from_orbax(tmp_path):
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


# What would merge or lose windows is refused.

OTHER = {
    "window_size": 9,
    "max_tokens": 256,
    "length_buckets": [32, 64],
    "batch_multiple": 1,
}


@pytest.mark.parametrize("name", OTHER)
def test_other_settings_are_refused(name: str):
    iterator = iter(planned())
    next(iterator)
    stored = list(SETTINGS[name]) if name == "length_buckets" else SETTINGS[name]
    message = f"{name} was stored as {stored}, got {OTHER[name]}. Give"
    other = iter(planned(**{name: OTHER[name]}))
    with pytest.raises(ValueError) as error:
        other.set_state(iterator.get_state())
    assert message in str(error.value)
    assert rows_of(next(other)), "a refused state changes nothing"


def test_settings_are_compared_as_they_work():
    powers = [1, 2, 4, 8, 16, 32, 64]
    saved = iter(planned(length_buckets=None))
    next(saved)
    same = iter(planned(length_buckets=[np.int64(n) for n in reversed(powers)]))
    same.set_state(saved.get_state())
    chex.assert_trees_all_equal(list(same), list(saved))


class Flatten(grain.experimental.FlatMapTransform):
    max_fan_out = WINDOW

    def flat_map(self, element: Any) -> Any:
        return element


def test_grain_alone_merges_windows_of_other_settings():
    """The reason for the settings in the state: without them, this fails silently."""

    def pipeline(max_tokens: int) -> grain.DatasetIterator:
        def plan(window: list[Any]) -> list[list[int]]:
            lengths = [len(sequence["mask"]) for sequence in window]
            plans = plan_window(lengths, max_tokens=max_tokens, length_buckets=[64])
            return [[int(window[i]["row"]) for i in plan.indices] for plan in plans]

        windows = DATA.to_iter_dataset().batch(WINDOW, batch_fn=plan)
        return iter(grain.experimental.FlatMapIterDataset(windows, Flatten()))

    saved, other = pipeline(128), pipeline(256)
    window = next(saved)
    other.set_state(saved.get_state())
    while len(window) < WINDOW:
        window += next(other)
    assert sorted(window) != sorted(ORDER[:WINDOW])


@pytest.mark.parametrize(
    "other",
    [DATA.seed(1).shuffle(), DATA[:20], DATA[:16]],
    ids=["another order", "fewer in the window", "none left"],
)
def test_another_window_is_refused(other: Any):
    iterator = iter(planned())
    while iterator.get_state()["num_sequences_before"] < 16:
        next(iterator)
    resumed = iter(planned(other))
    with pytest.raises(ValueError, match="read again as it was.*from index 16"):
        resumed.set_state(iterator.get_state())


def filtered() -> Any:
    return planned().filter(lambda micro_batch: True)


CALLS = {
    "another state": (
        ValueError,
        "must be of an iterator of planned_micro",
        lambda: iter(planned()).set_state({"next_index": 3}),
    ),
    "filtered behind": (TypeError, "must be filtered, before planned", filtered),
    "a list": (TypeError, "grain.MapDataset or", lambda: planned(SEQUENCES)),
    "no window": (ValueError, "window_size must", lambda: planned(window_size=0)),
    "no tokens": (ValueError, "max_tokens must", lambda: planned(max_tokens=0)),
    "no room": (ValueError, "room for batch_mul", lambda: planned(max_tokens=64)),
    "no pad": (TypeError, "pad_val", lambda: planned_micro_batches(DATA, **SETTINGS)),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_are_named_at_once(case: str):
    error, message, call = CALLS[case]
    with pytest.raises(error, match=message):
        call()


def of_length(n: int) -> Any:
    return {
        name: np.resize(x, n) if np.ndim(x) else x for name, x in SEQUENCES[0].items()
    }


BAD = {
    "empty": (of_length(0), "from 1 token .* 64: got 0 at index 11 of the dataset"),
    "too long": (of_length(65), "got 65 at index 11 of the dataset"),
    "no tree": ("text", "structure of the first.* at index 3"),
    "a list": ({**of_length(4), "mask": [True] * 4}, "A list is a container"),
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
