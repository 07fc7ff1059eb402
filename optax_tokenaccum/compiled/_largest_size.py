"""Finds the largest size whose memory stays below a limit, with few trials."""

import math
from collections.abc import Callable, Mapping


def largest_size(
    peak_of: Callable[[int], float], limit: int, fixed: int, trials: int
) -> dict[int, float]:
    """Tries sizes from 1 on until the largest that fits is known.

    Between two sizes, and beyond them, memory is taken to grow by the same amount for
    each unit of size. A trial corrects the next.

    Args:
      peak_of: the memory for a size; infinite where it is not known, but too much.
      limit: the most that fits.
      fixed: memory that does not depend on the size, or less.
      trials: the maximum number of calls of `peak_of`, at least 2.

    Returns:
      The memory of every size that was tried. None fits if 1 does not.
    """
    peaks: dict[int, float] = {}
    size: int | None = 2
    while size is not None and len(peaks) < trials:
        peaks[size] = peak_of(size)
        size = _next_size(peaks, limit, fixed)
    return peaks


def _next_size(peaks: Mapping[int, float], limit: int, fixed: int) -> int | None:
    fits = sorted(size for size, peak in peaks.items() if peak <= limit)
    too_large = min((size for size in peaks if size not in fits), default=None)
    if not fits:
        return 1 if too_large != 1 else None
    low = fits[-1]
    if too_large == low + 1:
        return None
    others = [too_large, *fits[-2:-1], 0]
    known = {0: fixed, **peaks}
    other = next(x for x in others if x is not None and math.isfinite(known[x]))
    slope = (known[low] - known[other]) / (low - other)
    if slope <= 0:
        guess = 4 * low
    else:
        guess = low + math.floor((limit - known[low]) / slope)
    if too_large is not None and guess >= too_large:
        guess = (low + too_large) // 2
    return max(guess, low + 1)
