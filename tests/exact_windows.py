"""Ragged windows whose every sum and mean is exact in float32, gradients and losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Four windows of three micro-batches, and their means of 4, 7, 3.25 and 5.
COUNTS = np.float32([[1, 2, 5], [7, 3, 2], [1, 30, 1], [2, 1, 3]])
LOSS_SUMS = np.float32([[8, 16, 8], [4, 64, 16], [8, 64, 32], [16, 2, 12]])
WINDOWS, K = COUNTS.shape
SHAPES = {"matrix": (8, 3), "vector": (3,)}


def eighths(seed: int, *axes: int) -> dict[str, np.ndarray]:
    """Multiples of 1/8, not 0, of 8 bits: bfloat16 holds them, not their sums."""
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(
            rng.integers(8, 253, (*axes, *shape))
            * rng.choice([-1, 1], (*axes, *shape))
            / 8
        )
        for name, shape in SHAPES.items()
    }


def gradients() -> dict[str, np.ndarray]:
    """Those of the micro-batches; each window's add up to a multiple of 3/8.

    Its count is 3 or 1 times a power of two, so that float32 holds the mean.
    """
    grads = eighths(0, WINDOWS, K)
    for g in grads.values():
        g[:, -1] -= g.sum(1) % (3 / 8)
    return grads


def token_mean(sums: np.ndarray) -> np.ndarray:
    """Of each window, over its micro-batches."""
    return (sums.sum(1).T / COUNTS.sum(1)).T


GRADS = gradients()
WINDOW_GRADS = {name: token_mean(g) for name, g in GRADS.items()}
WINDOW_VALUES = token_mean(LOSS_SUMS)


def cast(tree: dict[str, Any], dtypes: tuple[str, str]) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(x, jnp.dtype(dtype))
        for (name, x), dtype in zip(tree.items(), dtypes, strict=True)
    }


def windows(dtypes: tuple[str, str]) -> Any:
    """All of them, to scan over; in each the second micro-batch is not there."""
    micro_batches = jax.tree.map(
        lambda x: np.insert(x, 1, np.nan, axis=1),
        {"grads": cast(GRADS, dtypes), "num_tokens": COUNTS, "loss_sum": LOSS_SUMS},
    )
    places = np.tile(np.arange(K + 1), (WINDOWS, 1))
    micro_batches |= {"is_there": places != 1, "closes": places == K}
    return {
        "grads": cast(WINDOW_GRADS, dtypes),
        "value": WINDOW_VALUES,
        "micro_batches": micro_batches,
    }
