"""Padding of planned windows, and of a sampler that rebalances each window.

The setup is the one published with the sampler `batch_rebalance` of transformers
(https://github.com/huggingface/transformers/pull/47340): runs of 1,600 sequences with
log-normal lengths, on 2 devices, in micro-batches of 8 sequences on average. The suite
counts tokens and shapes; it computes nothing on a device. The samplers of transformers
are written from their descriptions, in the pull request and the documentation.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.settings import Settings
from optax_tokenaccum import MicroBatchPlan, choose_length_buckets, plan_window

DEVICES = 2
ROWS, FEW_ROWS = 8, 2
SEQUENCES = 1600
LONGEST = 1024
WINDOWS = (32, 128)


class MicroBatch(NamedTuple):
    """A micro-batch of one device.

    Attributes:
      indices: the sequences in it, as indices into the lengths of the run.
      rows: the number of rows; planned micro-batches may have empty ones.
      length: the length that every row is padded to, in tokens.
      device: the device that computes it.
    """

    indices: np.ndarray
    rows: int
    length: int
    device: int


Window = list[MicroBatch]
Cost = Callable[[Any, int], Any]


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every size of a window and every way to cut it."""
    return [row for size in WINDOWS for row in measure(size, settings)]


def measure(size: int, settings: Settings) -> list[dict[str, Any]]:
    """Cuts the same runs in every way, in windows of `size` sequences."""
    settings.say(f"rebalance: windows of {size}")
    # Windows are whole: 128 does not divide 1,600.
    runs = [draw(i)[: SEQUENCES // size * size] for i in range(settings.rebalance_runs)]
    sample = np.append(draw(settings.rebalance_runs), LONGEST)
    by_tokens = choose_length_buckets(sample, settings.shapes)
    by_squares = choose_length_buckets(sample, settings.shapes, cost=squares)
    rebalanced = [rebalance(lengths, size, ROWS) for lengths in runs]
    small = [rebalance(lengths, size, FEW_ROWS) for lengths in runs]
    memory = max(tokens(part) for windows in rebalanced for part in _parts(windows))

    def planned(
        max_tokens: int, buckets: Sequence[int], cost: Cost | None = None
    ) -> list[list[Window]]:
        return [plan(lengths, size, max_tokens, buckets, cost) for lengths in runs]

    rounded = f"{len(by_tokens)} lengths"
    few = f"batch_rebalance, {FEW_ROWS} a micro-batch"
    ways = {
        "random": [in_order(lengths, size) for lengths in runs],
        "group_by_length": [group_by_length(lengths, size) for lengths in runs],
        "batch_rebalance": rebalanced,
        f"batch_rebalance, {rounded}": [round_up(x, by_tokens) for x in rebalanced],
        few: small,
        f"{few}, {rounded}": [round_up(x, by_tokens) for x in small],
        "planned, as much memory": planned(memory, by_tokens),
        "planned, as much memory, by squares": planned(memory, by_squares, squares),
        "planned, least memory": planned(LONGEST, by_tokens),
        "planned, least memory, by squares": planned(LONGEST, by_squares, squares),
    }
    return [
        {"window": f"{size} sequences", "way": way, **count(runs, cut)}
        for way, cut in ways.items()
    ]


def count(runs: list[np.ndarray], cut: list[list[Window]]) -> dict[str, Any]:
    """Counts what the devices compute in all runs, relative to the real tokens."""
    real = sum(lengths.sum() for lengths in runs)
    real_squares = sum((lengths**2).sum() for lengths in runs)
    windows = [window for windows in cut for window in windows]
    parts = list(_parts(windows))
    shapes = [{(x.rows, x.length) for x in _parts(windows)} for windows in cut]
    return {
        "computed / real tokens": float(sum(map(tokens, parts)) / real),
        "with waiting": float(DEVICES * sum(map(slowest, windows)) / real),
        "squares / real squares": float(
            sum(squares(x.rows, x.length) for x in parts) / real_squares
        ),
        "micro-batches a device": len(parts) / len(windows) / DEVICES,
        "largest micro-batch": max(map(tokens, parts)),
        "shapes in a run": float(np.mean([len(x) for x in shapes])),
    }


def slowest(window: Window) -> int:
    """The tokens of the device that computes the most of them in this window."""
    return max(
        sum(tokens(x) for x in window if x.device == device)
        for device in range(DEVICES)
    )


def tokens(part: MicroBatch) -> int:
    return part.rows * part.length


def squares(rows: Any, length: int) -> Any:
    return rows * length**2


def draw(seed: int) -> np.ndarray:
    """Draws the lengths of a run, as the published benchmark does."""
    lengths = np.random.default_rng(seed).lognormal(5, 1, SEQUENCES)
    return np.clip(lengths, 16, LONGEST).astype(np.int64)


def in_order(lengths: np.ndarray, size: int) -> list[Window]:
    """Micro-batches of `ROWS` sequences as they come; devices take turns."""
    return _fixed_rows(lengths, np.arange(len(lengths)), size)


def group_by_length(lengths: np.ndarray, size: int) -> list[Window]:
    """Micro-batches of sequences of similar length, as transformers' `group_by_length`.

    The sampler sorts large groups of random sequences: 50 times the sequences of one
    device in a window, or a quarter of the data if that is less. The original also
    moves the longest sequence to the front, which changes at most two micro-batches.
    """
    batch = size // DEVICES
    group = max(1, min(len(lengths) // (4 * batch), 50)) * batch
    starts = range(0, len(lengths), group)
    sorted_groups = [
        start + np.argsort(-lengths[start : start + group], kind="stable")
        for start in starts
    ]
    return _fixed_rows(lengths, np.concatenate(sorted_groups), size)


def rebalance(lengths: np.ndarray, size: int, rows: int) -> list[Window]:
    """Micro-batches of about equal cost, as `batch_rebalance`.

    The sampler sorts a window by length and cuts it into `size / rows` micro-batches,
    whose costs are about equal. The cost is the number of sequences times the longest
    one. Then it sorts the micro-batches by cost and hands them out in turn, so that the
    devices work on similar costs at the same time. The original moves the cuts until
    the costs converge; `balanced_cuts` finds the best cuts instead.
    """
    windows = []
    for start in range(0, len(lengths), size):
        own = lengths[start : start + size]
        order = np.argsort(-own, kind="stable")
        groups = np.split(order, balanced_cuts(own[order], size // rows))
        groups.sort(key=lambda group: -len(group) * own[group].max())
        longest = [int(own[group].max()) for group in groups]
        windows.append(
            [
                MicroBatch(start + group, len(group), length, i % DEVICES)
                for i, (group, length) in enumerate(zip(groups, longest, strict=True))
            ]
        )
    return windows


def balanced_cuts(lengths: np.ndarray, groups: int) -> np.ndarray:
    """Finds the cuts that make the most expensive group as cheap as possible.

    Of all such cuts, takes those with the fewest padded tokens.

    Args:
      lengths: the lengths of a window, in decreasing order.
      groups: the number of groups; no group is empty.

    Returns:
      The `groups - 1` indices at which a new group starts.
    """
    places = np.arange(len(lengths) + 1)
    # cost[i, j]: the padded tokens of a group of lengths[i:j].
    cost = (places - places[:-1, None]) * lengths[:, None].astype(np.float64)
    cost[cost <= 0] = np.inf
    largest = np.where(places == 0, 0, np.inf)
    for _ in range(groups):
        largest = np.maximum(largest[:-1, None], cost).min(0)
    cost[cost > largest[-1]] = np.inf
    total, starts = np.where(places == 0, 0, np.inf), []
    for _ in range(groups):
        totals = total[:-1, None] + cost
        starts.append(totals.argmin(0))
        total = totals.min(0)
    cuts, end = [], len(lengths)
    for start in reversed(starts[1:]):
        end = int(start[end])
        cuts.append(end)
    return np.array(cuts[::-1], np.int64)


def round_up(windows: list[Window], buckets: Sequence[int]) -> list[Window]:
    """The same micro-batches, each padded to the first bucket that is long enough."""
    return [
        [
            part._replace(length=min(n for n in buckets if n >= part.length))
            for part in window
        ]
        for window in windows
    ]


def plan(
    lengths: np.ndarray,
    size: int,
    max_tokens: int,
    buckets: Sequence[int],
    cost: Cost | None,
) -> list[Window]:
    """Planned micro-batches; the devices share the rows of each one.

    Args:
      lengths: the lengths of a run.
      size: the number of sequences in a window.
      max_tokens: the upper limit of the tokens in a micro-batch on one device.
      buckets: the lengths to pad to.
      cost: the cost that `plan_window` minimizes.
    """
    windows = []
    for start in range(0, len(lengths), size):
        plans = plan_window(
            lengths[start : start + size],
            max_tokens=DEVICES * max_tokens,
            length_buckets=buckets,
            batch_multiple=DEVICES,
            cost=cost,
        )
        windows.append([part for x in plans for part in _shared(x, start)])
    return windows


def _shared(plan: MicroBatchPlan, start: int) -> list[MicroBatch]:
    """The equal parts of a planned micro-batch, one for each device."""
    rows = plan.num_rows // DEVICES
    return [
        MicroBatch(start + plan.indices[i * rows :][:rows], rows, plan.length, i)
        for i in range(DEVICES)
    ]


def _fixed_rows(lengths: np.ndarray, order: np.ndarray, size: int) -> list[Window]:
    parts = [
        MicroBatch(indices, ROWS, int(lengths[indices].max()), i % DEVICES)
        for i, indices in enumerate(order.reshape(-1, ROWS))
    ]
    each = size // ROWS
    return [parts[i : i + each] for i in range(0, len(parts), each)]


def _parts(windows: list[Window]) -> Iterator[MicroBatch]:
    return (part for window in windows for part in window)
