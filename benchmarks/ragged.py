"""What a window of ragged sequences computes: padded, planned, and packed in rows."""

import numpy as np
from data import encode, read_corpus

from benchmarks.report import Rows
from optax_tokenaccum.ragged import choose_length_buckets, plan_window

SEQUENCES, LONGEST = 128, 512  # of a window, in tokens
SHAPES, MOST = 6, 2 * LONGEST  # of planned micro-batches


def run(quick: bool) -> Rows:
    """Returns a row for every distribution of lengths and every way."""
    dialogue = [len(encode(pair).inputs) for pair in read_corpus()]
    uniform = np.random.default_rng(0).uniform(2, LONGEST, 4 * SEQUENCES).astype(int)
    distributions = {
        "dialogue": [n for n in dialogue if n <= LONGEST][: 7 * SEQUENCES],
        "uniform": uniform,
    }
    rows = []
    for name, lengths in distributions.items():
        buckets = choose_length_buckets(lengths, SHAPES)
        shuffled = np.random.default_rng(0).permutation(lengths)
        windows = shuffled.reshape(-1, SEQUENCES)
        ways = {
            "scan, padded to the longest": sum(SEQUENCES * x.max() for x in windows),
            "packed in rows": sum(LONGEST * rows_of(x) for x in windows),
            "planned": sum(
                plan.num_rows * plan.length
                for x in windows
                for plan in plan_window(x, max_tokens=MOST, length_buckets=buckets)
            ),
        }
        rows += [
            {"lengths": name, "way": way, "computed / real tokens": n / windows.sum()}
            for way, n in ways.items()
        ]
    return rows


def rows_of(lengths: np.ndarray) -> int:
    """Packs by first fit, longest first; returns an even number of rows."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        row = next((i for i, room in enumerate(free) if room >= length), len(free))
        if row == len(free):
            free.append(LONGEST)
        free[row] -= length
    return len(free) + len(free) % 2
