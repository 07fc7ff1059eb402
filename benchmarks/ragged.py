"""A window of ragged sequences: padded, packed, and planned."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import model as transformer
import numpy as np
import optax
from data import PADDING, VOCABULARY, Batch, encode, pad, read_corpus

from benchmarks.measure import Running, interleaved, ratio, relative_error
from benchmarks.settings import Settings
from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    softmax_cross_entropy_sum,
)
from optax_tokenaccum.ragged import (
    choose_length_buckets,
    pad_micro_batch,
    plan_window,
)

ROWS = 8
LAYERS, WIDTH = 2, 128
BASE = "scan, padded to the longest"

Sequences = list[Batch]


class Packed(NamedTuple):
    """Several sequences per row; each one attends only to itself.

    Attributes:
      inputs, labels, mask: `[rows, max_length]`, as in a `Batch`.
      segment: int32 `[rows, max_length]`: number of the sequence, 0 for padding.
    """

    inputs: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    segment: np.ndarray


class Way(NamedTuple):
    """One way to run a window of sequences.

    Attributes:
      state: the initial state.
      run: `run(state, sequences) -> state`, from lists of arrays to the update.
      layout: `layout(sequences)`: the arrays that are computed, including padding.
    """

    state: Any
    run: Callable[[Any, Sequences], Any]
    layout: Callable[[Sequences], Iterator[Any]]

    def tokens(self, windows: list[Sequences]) -> int:
        """The number of computed positions, including padding."""
        return sum(x.inputs.size for window in windows for x in self.layout(window))


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every distribution of lengths and every way."""
    return [row for name in settings.lengths for row in _measure(name, settings)]


def _measure(name: str, settings: Settings) -> list[dict[str, Any]]:
    """Measures all ways on the same windows of shuffled sequences."""
    settings.say(f"ragged: {name}")
    sequences, size = sequences_of(name, settings), settings.sequences
    shuffled = np.random.default_rng(0).permutation(len(sequences))
    windows = [
        [sequences[i] for i in shuffled[start : start + size]]
        for start in range(0, len(sequences) - size + 1, size)
    ]
    lengths = [len(sequence.inputs) for sequence in sequences]
    buckets = choose_length_buckets(lengths, settings.shapes)
    # The update is far larger than the parameters, so none of it is rounded away.
    once = _ways(buckets, settings, optax.sgd(2.0**20))
    updates = {
        way: run(state, windows[0]).params for way, (state, run, _) in once.items()
    }
    ways = _ways(buckets, settings, optax.adamw(1e-3))
    running = {way: Running(x.run, x.state, *windows) for way, x in ways.items()}
    times = interleaved(
        running,
        rounds=settings.rounds,
        warm_up=len(windows),  # which compiles every shape
        seconds=2 * settings.seconds,
    )
    real = sum(len(sequence.inputs) for window in windows for sequence in window)
    return [
        {
            "lengths": name,
            "way": way,
            "scan / it": ratio(times[BASE], times[way]),
            "computed / real tokens": ways[way].tokens(windows) / real,
            "update differs by": relative_error(updates[way], updates[BASE]),
        }
        for way in ways
    ]


def _ways(
    buckets: tuple[int, ...], settings: Settings, inner: optax.GradientTransformation
) -> dict[str, Way]:
    size, max_length = settings.sequences, settings.max_length
    cut: dict[str, Any] = {"max_tokens": 2 * max_length, "length_buckets": buckets}
    params = transformer.init(
        jax.random.key(0), vocabulary=VOCABULARY, d_model=WIDTH, layers=LAYERS
    )
    window_step = make_window_step(loss_fn, inner)
    packed_step = make_window_step(packed_loss_fn, inner)
    train_step = make_train_step(loss_fn, inner)

    def padded(window: Sequences) -> Iterator[Batch]:
        longest = max(len(sequence.inputs) for sequence in window)
        whole = pad(window, [longest])
        yield jax.tree.map(lambda x: x.reshape(-1, ROWS, longest), whole)

    def packed(window: Sequences) -> Iterator[Packed]:
        yield pack(window, max_length)

    def planned(window: Sequences) -> Iterator[Batch]:
        for plan in plan_window([len(x.inputs) for x in window], **cut):
            yield pad_micro_batch(window, plan, pad_values=PADDING)

    def run_planned(state: Any, window: Sequences) -> Any:
        for batch in planned(window):
            state, _ = train_step.accumulate(state, batch)
        return train_step.close_window(state)[0]

    def run_padded(state: Any, window: Sequences) -> Any:
        return window_step(state, *padded(window))[0]

    def run_packed(state: Any, window: Sequences) -> Any:
        (rows,) = packed(window)
        k = -(-len(rows.inputs) // 2)
        room = [(0, size - len(rows.inputs)), (0, 0)]
        stacked = jax.tree.map(
            lambda x: np.pad(x, room).reshape(-1, 2, max_length), rows
        )
        return packed_step(state, stacked, num_micro_batches=k)[0]

    return {
        BASE: Way(window_step.init(params), run_padded, padded),
        "packed in rows": Way(packed_step.init(params), run_packed, packed),
        "planned": Way(train_step.init(params), run_planned, planned),
    }


def loss_fn(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    logits = transformer.forward(params, batch.inputs)
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


def packed_loss_fn(params: Any, batch: Packed) -> tuple[jax.Array, jax.Array]:
    """The same model; rotary positions are relative, so they need no reset."""
    own = batch.segment[:, None, :, None] == batch.segment[:, None, None, :]

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return transformer.block(x, weights, mask=own), None

    x = params["embedding"][batch.inputs]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = transformer.logits(params, x)
    return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)


def pack(sequences: Sequences, length: int) -> Packed:
    """Packs by first fit, longest first, into an even number of rows."""
    rows: list[list[Batch]] = []
    free: list[int] = []
    for sequence in sorted(sequences, key=lambda x: -len(x.inputs)):
        need = len(sequence.inputs)
        row = next((i for i, room in enumerate(free) if room >= need), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(sequence)
        free[row] -= need
    shape = (len(rows) + len(rows) % 2, length)
    packed = Packed(*(np.full(shape, x) for x in (*PADDING, np.int32(0))))
    for i, row in enumerate(rows):
        start = 0
        for number, sequence in enumerate(row, start=1):
            stop = start + len(sequence.inputs)
            for into, values in zip(packed, (*sequence, number), strict=True):
                into[i, start:stop] = values
            start = stop
    return packed


def sequences_of(name: str, settings: Settings) -> Sequences:
    """Real dialogue, a prompt and its answer in bytes; or uniform lengths."""
    size, longest = settings.sequences, settings.max_length
    if name == "dialogue":
        encoded = [x for x in map(encode, read_corpus()) if len(x.inputs) <= longest]
        return encoded[: settings.windows * size]
    rng = np.random.default_rng(0)
    return [_random(rng, int(n)) for n in rng.uniform(2, longest, 4 * size)]


def _random(rng: np.random.Generator, length: int) -> Batch:
    tokens = rng.integers(0, 256, length + 1).astype(np.int32)
    return Batch(tokens[:-1], tokens[1:], np.ones(length, bool))
