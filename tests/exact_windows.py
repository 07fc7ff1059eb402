"""Ragged windows whose gradient and loss sums and means are exact in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Four windows of three micro-batches; the mean losses are 4, 7, 3.25 and 5.
COUNTS = np.float32([[1, 2, 5], [7, 3, 2], [1, 30, 1], [2, 1, 3]])
LOSS_SUMS = np.float32([[8, 16, 8], [4, 64, 16], [8, 64, 32], [16, 2, 12]])
WINDOWS, K = COUNTS.shape
SHAPES = {"matrix": (8, 3), "vector": (3,)}


def eighths(seed: int, *axes: int) -> dict[str, np.ndarray]:
    """Nonzero 8-bit multiples of 1/8, exact in bfloat16; their sums are not."""
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
    """Gradients of the micro-batches; each window's sum is a multiple of 3/8.

    A window's count is 3 or 1 times a power of two, so its mean is exact in float32.
    """
    grads = eighths(0, WINDOWS, K)
    for g in grads.values():
        g[:, -1] -= g.sum(1) % (3 / 8)
    return grads


def token_mean(sums: np.ndarray) -> np.ndarray:
    """Return the mean of each window over the tokens of its micro-batches."""
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
    """Return all windows, to scan over; the second micro-batch of each is absent."""
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
