"""Grain pipelines of planned micro-batches, which can resume within a window."""

import copy
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import grain

from optax_tokenaccum._core.checks import as_count
from optax_tokenaccum._core.trees import Batch
from optax_tokenaccum._steps.pad_values import PadValues
from optax_tokenaccum.ragged._pad import pad_micro_batch
from optax_tokenaccum.ragged._plan import MicroBatchPlan, plan_window, shapes_of
from optax_tokenaccum.ragged._sequences import Sequences


class PlannedMicroBatch(NamedTuple):
    """An element of `planned_micro_batches`.

    Attributes:
      batch: the batch for `loss_fn`, as `pad_micro_batch` returns it.
      is_last: whether this is the last micro-batch of its window.

    Example:
      >>> import grain
      >>> import numpy as np
      >>> from optax_tokenaccum.grain import planned_micro_batches
      >>> sequences = grain.MapDataset.source([np.ones(n) for n in (3, 60, 2)])
      >>> for batch, is_last in planned_micro_batches(
      ...     sequences, window_size=3, max_tokens=64, pad_values=0
      ... ):
      ...     print(batch.shape, is_last)
      (1, 64) False
      (16, 4) True
    """

    batch: Batch
    is_last: bool


def planned_micro_batches(
    dataset: grain.MapDataset | grain.IterDataset,
    *,
    window_size: int,
    max_tokens: int,
    length_buckets: Sequence[int] | None = None,
    batch_multiple: int = 1,
    cost: Callable[[int, int], float] | None = None,
    pad_values: PadValues,
) -> grain.IterDataset[PlannedMicroBatch]:
    """Cuts a Grain dataset of sequences into windows and planned micro-batches.

    `plan_window` plans the micro-batches of each window, and `pad_micro_batch` pads
    them. The last window holds the remaining sequences. In a repeated dataset a window
    can span two epochs; to close the last window of each epoch, iterate once per epoch
    instead.

    Save the iterator's state next to the `StepState` after any micro-batch: the
    restored iterator resumes with the next micro-batch of the same window. The state
    holds the settings and a checksum of the window's lengths and plans, because under
    another plan some sequences of the open window would be trained on twice and others
    never.

    Apply `mp_prefetch`, and any step that drops, reorders or mixes sequences, *before*
    this function. After it, only `map` and
    `grain.experimental.ThreadPrefetchIterDataset` are safe: dropping micro-batches
    drops the ends of windows, and mixing micro-batches mixes windows.

    Args:
      dataset: sequences as in `pad_micro_batch`, the same ones in the same order at
        every start.
      window_size: number of sequences in a window, the batch of one update.
      max_tokens: as in `plan_window`.
      length_buckets: as in `plan_window`.
      batch_multiple: as in `plan_window`.
      cost: as in `plan_window`. It is not in the iterator's state, but its plan is.
      pad_values: as in `pad_micro_batch`: values that carry no weight in the loss.

    Returns:
      A dataset of `PlannedMicroBatch`.

    Raises:
      TypeError: `dataset` is not a Grain dataset, or a setting is not an integer.
      ValueError: a setting leaves no room for a sequence. While iterating: a sequence
        is empty, longer than every bucket, or unlike the others; the error names it by
        index. After this and any other error while it reads a window, the iterator
        reads the same window again. In `set_state`: the settings or the sequences
        differ from the saved ones.

    Example:
      >>> import grain, jax.numpy as jnp, numpy as np, optax
      >>> from optax_tokenaccum import make_train_step
      >>> from optax_tokenaccum.grain import planned_micro_batches
      >>> def loss_fn(w, batch):
      ...     losses = (w * batch["x"] - batch["y"]) ** 2
      ...     return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])
      >>> sequences = [
      ...     {"x": np.ones(n), "y": np.full(n, 2.0), "mask": np.ones(n, bool)}
      ...     for n in (3, 60, 2, 31)
      ... ]
      >>> dataset = planned_micro_batches(
      ...     grain.MapDataset.source(sequences),
      ...     window_size=2,
      ...     max_tokens=64,
      ...     pad_values={"x": 0, "y": 0, "mask": False},
      ... )
      >>> step = make_train_step(loss_fn, optax.sgd(0.1))
      >>> state = step.init(jnp.zeros(()))
      >>> for batch, is_last in dataset:
      ...     state, metrics = step.accumulate(state, batch)
      ...     if is_last:
      ...         state, metrics = step.close_window(state)
      ...         print(metrics.num_tokens, metrics.gradient_step)
      63.0 1
      33.0 2
    """
    if isinstance(dataset, grain.MapDataset):
        dataset = dataset.to_iter_dataset()
    if not isinstance(dataset, grain.IterDataset):
        raise TypeError(
            "dataset must be a grain.MapDataset or grain.IterDataset of sequences: got "
            f"{type(dataset).__name__}. Wrap a list: grain.MapDataset.source(...)."
        )
    shapes = shapes_of(max_tokens, length_buckets, batch_multiple)
    settings = _Settings(
        as_count(window_size, "window_size"),
        as_count(max_tokens, "max_tokens"),
        [length for _, length in shapes],
        as_count(batch_multiple, "batch_multiple"),
    )
    make_iterator = functools.partial(
        _PlannedIterator, settings=settings, cost=cost, pad_values=pad_values
    )
    return _PlannedIterDataset(dataset, make_iterator)


class _Settings(NamedTuple):
    """The settings that determine windows and micro-batches, in JSON types."""

    window_size: int
    max_tokens: int
    length_buckets: list[int]
    batch_multiple: int


class _PlannedIterDataset(grain.IterDataset[PlannedMicroBatch]):
    def __init__(
        self,
        dataset: grain.IterDataset,
        make_iterator: "Callable[[grain.DatasetIterator], _PlannedIterator]",
    ):
        super().__init__(dataset)
        self._make_iterator = make_iterator

    def __iter__(self) -> "_PlannedIterator":
        (dataset,) = self.parents
        return self._make_iterator(iter(dataset))

    def filter(self, transform: Any) -> NoReturn:
        raise TypeError(
            "Sequences must be filtered, before planned_micro_batches: got a filter of "
            f"micro-batches, {transform!r}. It could drop the ends of windows, which "
            "would merge."
        )

    def set_slice(self, sl: slice, *options: bool) -> None:
        """Grain calls this method to distribute elements among several workers."""
        raise ValueError(
            "Workers must prefetch sequences, before planned_micro_batches: got "
            f"mp_prefetch of micro-batches by {sl.step} workers, whose windows would "
            "interleave. Write planned_micro_batches(dataset.mp_prefetch(...), ...)."
        )


class _Window(NamedTuple):
    """A position in the dataset, and the sequences and plans that were read there."""

    state_before: Any
    num_before: int
    sequences: Sequence[Batch] = ()
    plans: Sequence[MicroBatchPlan] = ()
    crc: int = 0  # of the lengths and the plans


class _PlannedIterator(grain.DatasetIterator[PlannedMicroBatch]):
    """Reads a window, plans it, and pads its micro-batches one by one."""

    def __init__(
        self,
        dataset: grain.DatasetIterator,
        settings: _Settings,
        cost: Callable[[int, int], float] | None,
        pad_values: PadValues,
    ):
        super().__init__(dataset)
        self._dataset = dataset
        self._settings = settings
        self._cost = cost
        self._pad_values = pad_values
        self._window = _Window(self._position(), 0)
        self._num_done = 0

    def __next__(self) -> PlannedMicroBatch:
        if self._num_done == len(self._window.plans):
            window = self._read_window()
            if not window.plans:
                raise StopIteration
            self._window, self._num_done = window, 0
        _, _, sequences, plans, _ = self._window
        plan = plans[self._num_done]
        batch = pad_micro_batch(sequences, plan, pad_values=self._pad_values)
        self._num_done += 1
        return PlannedMicroBatch(batch, self._num_done == len(plans))

    def get_state(self) -> dict[str, Any]:
        return {
            "dataset": self._window.state_before,
            "num_sequences_before": self._window.num_before,
            "micro_batches_done": self._num_done,
            "window_crc": self._window.crc,
            "settings": self._settings._asdict(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.keys() != self.get_state().keys():
            raise ValueError(
                "The state must be of an iterator of planned_micro_batches: got "
                f"{state!r}. Another pipeline's state cannot be taken over."
            )
        _check_settings(state["settings"], self._settings)
        self._go_to(state["dataset"])
        self._window = _Window(state["dataset"], state["num_sequences_before"])
        self._num_done = 0
        if not state["micro_batches_done"]:
            return
        window = self._read_window()
        if window.crc != state["window_crc"]:
            raise ValueError(
                "The window that the state was saved in must be read again as it was: "
                "got sequences of other lengths, or another plan of them, from index "
                f"{window.num_before} of the dataset on. Restore with the data, order, "
                "seeds and transformations that it was saved with."
            )
        self._window, self._num_done = window, state["micro_batches_done"]

    # Copy the dataset's states: its iterator may change those it returned or was given.

    def _position(self) -> Any:
        return copy.deepcopy(self._dataset.get_state())

    def _go_to(self, position: Any) -> None:
        self._dataset.set_state(copy.deepcopy(position))

    def _read_window(self) -> _Window:
        """Reads the next window, which has no sequences at the end of the dataset."""
        size, max_tokens, length_buckets, batch_multiple = self._settings
        last = len(self._window.sequences)
        # A short window is the last one. Read nothing after it: some of Grain's
        # iterators hang when they are read again at the end.
        left = 0 if 0 < last < size else size
        window = _Window(self._position(), self._window.num_before + last)
        try:
            sequences = list(itertools.islice(self._dataset, left))
            if not sequences:
                return window
            lengths = self._lengths(sequences, window.num_before)
            plans = plan_window(
                lengths,
                max_tokens=max_tokens,
                length_buckets=length_buckets,
                batch_multiple=batch_multiple,
                cost=self._cost,
            )
        except BaseException:  # for example OSError, or Ctrl-C while it reads
            self._go_to(window.state_before)
            raise
        shown = lengths, [(plan.indices.tolist(), *plan[1:]) for plan in plans]
        crc = zlib.crc32(repr(shown).encode())
        return window._replace(sequences=sequences, plans=plans, crc=crc)

    def _lengths(self, sequences: list[Batch], num_before: int) -> list[int]:
        """The lengths of a window's sequences, checked before they are planned."""
        try:
            lengths = Sequences(sequences, self._pad_values).lengths()
        except (TypeError, ValueError) as error:
            error.add_note(
                f"Indices count from the window's first, sequence {num_before} of the "
                "dataset."
            )
            raise
        longest = self._settings.length_buckets[-1]
        for index, length in enumerate(lengths, start=num_before):
            if not 1 <= length <= longest:
                raise ValueError(
                    "A sequence must have from 1 token to those of the longest bucket, "
                    f"{longest}: got {length} at index {index} of the dataset. Cut it "
                    "or filter it out before planned_micro_batches, or add a bucket."
                )
        return lengths


def _check_settings(stored: dict[str, Any], settings: _Settings) -> None:
    """Raises `ValueError`, naming the setting, if the stored settings differ."""
    differ = [
        f"{name} was stored as {stored.get(name)}, got {got}"
        for name, got in settings._asdict().items()
        if stored.get(name) != got
    ]
    if differ:
        raise ValueError(
            "A state must be restored with the settings it was saved with, or windows "
            f"would merge: {'; '.join(differ)}. Give planned_micro_batches what was "
            "stored, or begin a new iterator."
        )
