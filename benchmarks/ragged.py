"""A window of ragged sequences: padded, packed, and planned."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import model as transformer
import numpy as np
import optax
from data import PADDING, VOCABULARY, Batch, encode, pad, read_corpus

from benchmarks.measure import interleaved, spread
from benchmarks.settings import Settings
from optax_tokenaccum import (
    choose_length_buckets,
    make_train_step,
    make_window_step,
    pad_micro_batch,
    pad_window,
    plan_window,
    softmax_cross_entropy_sum,
)

ROWS = 8
LAYERS, WIDTH = 2, 128
BASE = "scan, padded to the longest"
PLANNED = "planned, one program"

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
      tokens: `tokens(sequences)`: number of computed positions, including padding.
    """

    state: Any
    run: Callable[[Any, Sequences], Any]
    tokens: Callable[[Sequences], int]


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every distribution of lengths and every way."""
    rows = []
    for name, sequences in _distributions(settings):
        if name not in settings.lengths:
            continue
        settings.say(f"ragged: {name}")
        rows += measure(name, sequences, settings)
    return rows


def measure(
    name: str, sequences: Sequences, settings: Settings
) -> list[dict[str, Any]]:
    """Measures all ways on the same windows of shuffled sequences."""
    size = settings.sequences
    shuffled = np.random.default_rng(0).permutation(len(sequences))
    windows = [
        [sequences[i] for i in shuffled[start : start + size]]
        for start in range(0, len(sequences) - size + 1, size)
    ]
    lengths = [len(sequence.inputs) for sequence in sequences]
    buckets = choose_length_buckets(lengths, settings.shapes)
    # The update is far larger than the parameters, so none of it is rounded away.
    updates = {
        way: jax.tree.map(np.asarray, run(state, windows[0]).params)
        for way, (state, run, _) in _ways(buckets, settings, optax.sgd(2.0**20)).items()
    }
    ways = _ways(buckets, settings, optax.adamw(1e-3))
    compile_seconds = {way: _compile_seconds(ways[way], windows) for way in ways}
    running = {way: _Running(ways[way], windows) for way in ways}
    times = interleaved(running, rounds=settings.rounds, seconds=2 * settings.seconds)
    real = sum(len(sequence.inputs) for window in windows for sequence in window)
    share = {
        way: sum(ways[way].tokens(window) for window in windows) / real for way in ways
    }
    rows = []
    for way in ways:
        rows.append(
            {
                "lengths": name,
                "way": way,
                "scan / it": _pairs(times[BASE], times[way]),
                "it / planned": _pairs(times[way], times[PLANNED]),
                "computed / real tokens": share[way],
                "update differs by": _difference(updates[way], updates[BASE]),
                "compiling / scan's": compile_seconds[way] / compile_seconds[BASE],
            }
        )
    return rows


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

    def scan(state: Any, window: Sequences) -> Any:
        longest = max(map(len, (sequence.inputs for sequence in window)))
        whole = pad(window, [longest])
        stacked = jax.tree.map(lambda x: x.reshape(-1, ROWS, longest), whole)
        return window_step(state, stacked)[0]

    def random_micro_batches(state: Any, window: Sequences) -> Any:
        for start in range(0, size, ROWS):
            batch = pad(window[start : start + ROWS], list(buckets))
            state, _ = train_step.accumulate(state, batch)
        return train_step.close_window(state)[0]

    def packed(state: Any, window: Sequences) -> Any:
        rows = pack(window, max_length)
        k = -(-len(rows.inputs) // 2)
        stacked = jax.tree.map(lambda x: _room(x, size // 2, 2), rows)
        return packed_step(state, stacked, num_micro_batches=k)[0]

    def planned_calls(state: Any, window: Sequences) -> Any:
        for plan in plan_window([len(x.inputs) for x in window], **cut):
            batch = pad_micro_batch(window, plan, pad_values=PADDING)
            state, _ = train_step.accumulate(state, batch)
        return train_step.close_window(state)[0]

    def planned(state: Any, window: Sequences) -> Any:
        laid_out = pad_window(window, pad_values=PADDING, **cut)
        return window_step(state, laid_out)[0]

    def planned_tokens(window: Sequences) -> int:
        plans = plan_window([len(x.inputs) for x in window], **cut)
        return sum(plan.num_rows * plan.length for plan in plans)

    def random_tokens(window: Sequences) -> int:
        starts = range(0, size, ROWS)
        return sum(pad(window[i : i + ROWS], list(buckets)).inputs.size for i in starts)

    return {
        BASE: Way(
            window_step.init(params),
            scan,
            lambda window: len(window) * max(len(x.inputs) for x in window),
        ),
        "random micro-batches": Way(
            train_step.init(params), random_micro_batches, random_tokens
        ),
        "packed in rows": Way(
            packed_step.init(params),
            packed,
            lambda window: pack(window, max_length).inputs.size,
        ),
        "planned, a call each": Way(
            train_step.init(params), planned_calls, planned_tokens
        ),
        PLANNED: Way(window_step.init(params), planned, planned_tokens),
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


def _room(x: np.ndarray, capacity: int, rows: int) -> np.ndarray:
    """Reshapes to `[capacity, rows, length]`, with zeros after the micro-batches."""
    stacked = x.reshape(-1, rows, x.shape[-1])
    room = np.zeros((capacity, *stacked.shape[1:]), x.dtype)
    room[: len(stacked)] = stacked
    return room


def _distributions(settings: Settings) -> Iterator[tuple[str, Sequences]]:
    """Yields real dialogue, and random bytes with other lengths."""
    size, longest = settings.sequences, settings.max_length
    yield "dialogue", dialogue(settings)
    rng = np.random.default_rng(0)
    count = 4 * size
    for name, lengths in {
        "log-normal": rng.lognormal(4.5, 1, count),
        "uniform": rng.uniform(2, longest, count),
        "two lengths": rng.choice([24, 480], count, p=[0.8, 0.2]),
    }.items():
        yield name, [_random(rng, n) for n in np.clip(lengths, 2, longest)]


def dialogue(settings: Settings) -> Sequences:
    """Pairs of a prompt and an answer, in bytes, for `settings.windows` windows."""
    pairs, _ = read_corpus()
    encoded = [x for x in map(encode, pairs) if len(x.inputs) <= settings.max_length]
    return encoded[: settings.windows * settings.sequences]


def _random(rng: np.random.Generator, length: float) -> Batch:
    tokens = rng.integers(0, 256, int(length) + 1).astype(np.int32)
    return Batch(tokens[:-1], tokens[1:], np.ones(int(length), bool))


class _Running:
    """Runs a way on one window after another, in a cycle."""

    def __init__(self, way: Way, windows: list[Sequences]):
        # Copies the state, because the step donates it.
        self._way, self._windows = way, windows
        self._state = jax.tree.map(jnp.copy, way.state)
        self._next = 0

    def __call__(self) -> Any:
        window = self._windows[self._next % len(self._windows)]
        self._next += 1
        self._state = self._way.run(self._state, window)
        return self._state


def _pairs(a: list[float], b: list[float]) -> Any:
    return spread([x / y for x, y in zip(a, b, strict=True)])


def _compile_seconds(way: Way, windows: list[Sequences]) -> float:
    """How much longer a first pass over the windows takes than a second one."""
    passes = []
    running = _Running(way, windows)
    for _ in range(2):
        began = time.perf_counter()
        for _ in windows:
            jax.block_until_ready(running())
        passes.append(time.perf_counter() - began)
    return passes[0] - passes[1]


def _difference(params: Any, reference: Any) -> float:
    """The relative L2 difference of parameters that consist of one large update."""
    difference = jax.tree.map(np.subtract, params, reference)
    return float(optax.tree.norm(difference) / optax.tree.norm(reference))
