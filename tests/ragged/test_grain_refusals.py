"""A Grain pipeline that would merge or lose windows raises an error that says why."""

from typing import Any

import chex
import grain
import numpy as np
import pytest
from grain.python import ReadOptions
from grain_data import (
    DATA,
    ORDER,
    ROWS,
    SEQUENCES,
    SETTINGS,
    WINDOW,
    planned,
    rows_of,
)

from optax_tokenaccum import plan_window
from optax_tokenaccum.grain import planned_micro_batches

OTHER = {
    "window_size": 9,
    "max_tokens": 256,
    "length_buckets": [32, 64],
    "batch_multiple": 1,
}


@pytest.mark.parametrize("name", OTHER)
def test_other_settings_are_refused(name):
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
def test_another_window_is_refused(other):
    iterator = iter(planned())
    while iterator.get_state()["num_sequences_before"] < 16:
        next(iterator)
    resumed = iter(planned(other))
    with pytest.raises(ValueError, match="read again as it was.*from index 16"):
        resumed.set_state(iterator.get_state())


@pytest.mark.parametrize("state", [{"next_index": 3}, None], ids=["another", "none"])
def test_the_state_of_another_pipeline_is_refused(state):
    with pytest.raises(ValueError, match="must be of an iterator of planned_micro"):
        iter(planned()).set_state(state)


def test_what_comes_behind_must_keep_every_micro_batch():
    with pytest.raises(TypeError, match="must be filtered, before planned_micro_batch"):
        planned().filter(lambda micro_batch: True)


CALLS = {
    "a list": (TypeError, "grain.MapDataset or", lambda: planned(SEQUENCES)),
    "no window": (ValueError, "window_size must", lambda: planned(window_size=0)),
    "no tokens": (ValueError, "max_tokens must", lambda: planned(max_tokens=0)),
    "no room": (ValueError, "room for batch_mul", lambda: planned(max_tokens=64)),
    "no pad": (TypeError, "pad_val", lambda: planned_micro_batches(DATA, **SETTINGS)),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_settings_are_named_at_once(case):
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
def test_bad_sequences_are_named(case):
    bad, message = BAD[case]
    dataset = grain.MapDataset.source([*SEQUENCES[:11], bad, *SEQUENCES[11:]])
    iterator = iter(planned(dataset))
    with pytest.raises(ValueError, match=message) as error:
        list(iterator)
    if "of the dataset" not in message:
        note = "Indices count from the window's first, sequence 8 of the dataset."
        assert error.value.__notes__[0] == note
    state = iterator.get_state()
    assert state["num_sequences_before"] == 0, "where the last good window begins"


class Unreliable(list):
    """A source that fails to read one element, once."""

    def __init__(self, error: BaseException):
        super().__init__(SEQUENCES)
        self.errors = {11: error}

    def __getitem__(self, index: Any) -> Any:
        if index in self.errors:
            raise self.errors.pop(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("error", [OSError("timeout"), KeyboardInterrupt()], ids=repr)
def test_no_sequence_is_lost_by_an_error(error: BaseException, threads: int):
    """The window whose reading failed is read again, as if nothing had happened."""
    whole = [rows_of(x) for x in planned(grain.MapDataset.source(SEQUENCES))]
    source = grain.MapDataset.source(Unreliable(error))
    options = ReadOptions(num_threads=threads, prefetch_buffer_size=2)
    iterator = iter(planned(source.to_iter_dataset(options)))
    done, failed = [], []
    while True:
        try:
            done.append(rows_of(next(iterator)))
        except StopIteration:
            break
        except type(error) as raised:
            failed.append(raised)
    assert len(failed) == 1
    assert done == whole
    assert sorted(sum(done, [])) == [*range(ROWS)]


def test_a_bad_sequence_is_named_again_and_takes_no_others_along():
    dataset = grain.MapDataset.source([*SEQUENCES[:11], of_length(0), *SEQUENCES[11:]])
    iterator = iter(planned(dataset))
    while not next(iterator).is_last:  # the first window is right
        pass
    state = iterator.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match="got 0 at index 11 of the dataset"):
            next(iterator)
    assert iterator.get_state() == state
