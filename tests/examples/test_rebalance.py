"""The counted samplers use every sequence once, and cut as they are described."""

import itertools

import numpy as np
import pytest

from benchmarks import rebalance

BUCKETS = [96, 256, rebalance.LONGEST]
WAYS = {
    "random": rebalance.in_order,
    "group_by_length": rebalance.group_by_length,
    "batch_rebalance": lambda x, size: rebalance.rebalance(x, size, rebalance.ROWS),
    "few rows": lambda x, size: rebalance.rebalance(x, size, rebalance.FEW_ROWS),
    "planned": lambda x, size: rebalance.plan(x, size, 2048, BUCKETS, None),
}


@pytest.mark.parametrize("size", rebalance.WINDOWS)
@pytest.mark.parametrize("way", WAYS)
def test_every_sequence_is_used_once_and_fits(way: str, size: int):
    lengths = rebalance.draw(0)[: 6 * size]
    windows = WAYS[way](lengths, size)
    assert len(windows) == 6
    for i, window in enumerate(windows):
        used = np.concatenate([part.indices for part in window])
        # Only the grouped windows hold sequences of other windows.
        own = range(size * i, size * (i + 1))
        assert len(used) == size
        assert way == "group_by_length" or sorted(used) == list(own)
        for part in window:
            assert len(part.indices) <= part.rows
            assert all(lengths[part.indices] <= part.length)
    everything = [part.indices for window in windows for part in window]
    assert sorted(np.concatenate(everything)) == list(range(len(lengths)))


@pytest.mark.parametrize("way", WAYS)
def test_every_device_has_the_same_number_of_micro_batches(way: str):
    for window in WAYS[way](rebalance.draw(1), 32):
        devices = [part.device for part in window]
        assert devices.count(0) == devices.count(1) == len(window) // 2


@pytest.mark.parametrize("seed", range(20))
def test_the_cuts_are_the_best_ones(seed: int):
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(1, 40, rng.integers(4, 11)))[::-1]
    groups = int(rng.integers(1, 5))

    def costs(cuts: tuple[int, ...]) -> tuple[int, int]:
        parts = np.split(lengths, cuts)
        each = [len(part) * int(part[0]) for part in parts]
        return max(each), sum(each)

    every = itertools.combinations(range(1, len(lengths)), groups - 1)
    found = tuple(rebalance.balanced_cuts(lengths, groups).tolist())
    assert costs(found) == min(map(costs, every))


def test_a_window_by_hand():
    lengths = np.array([10] * 8 + [80])
    # One group of 8 short sequences costs as much as one long sequence.
    assert rebalance.balanced_cuts(lengths[::-1], 2).tolist() == [1]
    (window,) = rebalance.rebalance(np.append(lengths, [10] * 7), 16, 8)
    assert [(x.rows, x.length, x.device) for x in window] == [(15, 10, 0), (1, 80, 1)]
    counted = rebalance.count([np.append(lengths, [10] * 7)], [[window]])
    assert counted["computed / real tokens"] == 1
    assert counted["with waiting"] == 2 * 150 / 230
    assert counted["largest micro-batch"] == 150
    assert counted["shapes in a run"] == 2
