"""Views of arrays, with their axes in the order in which a TPU keeps them in memory."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.trees import T

# A TPU pads the last two axes to multiples of these.
_SUBLANES, _LANES = 8, 128


def viewed(tree: T) -> T:
    """The arrays of a tree, transposed to the order of their axes in memory.

    XLA keeps what enters a loop with its last axis in order. Of an array that a TPU
    keeps otherwise, for example `[2048, 32, 64]`, the loop would carry a copy. On a TPU
    such a view is the array itself; elsewhere, it would be a copy.
    """
    return jax.tree.map(lambda x: jnp.transpose(x, memory_order(jnp.shape(x))), tree)


def restored(views: T, like: T) -> T:
    """The inverse of `viewed`, of views of arrays with the shapes of `like`."""

    def restore(x: jax.Array, array: jax.Array) -> jax.Array:
        order = memory_order(jnp.shape(array))
        return jnp.transpose(x, sorted(range(len(order)), key=order.__getitem__))

    return jax.tree.map(restore, views, like)


def is_row_major(shape: tuple[int, ...]) -> bool:
    """Whether a TPU keeps the axes of an array in order."""
    order = memory_order(shape)
    return [*order] == sorted(order)


@functools.cache
def memory_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of an array from the slowest to the fastest, as XLA chooses them.

    They need the least padding, and are moved as little as possible. A wrong guess
    costs memory alone.
    """
    axes = range(len(shape))
    if len(shape) < 2:
        return tuple(axes)

    def cost(order: tuple[int, ...]) -> tuple[int, int]:
        *slow, second, last = (shape[i] for i in order)
        padded = _SUBLANES * -(-second // _SUBLANES) * _LANES * -(-last // _LANES)
        moved = sum(a > b for a, b in itertools.combinations(order, 2))
        return math.prod(slow) * padded, moved

    orders = [
        (*(i for i in axes if i not in ends), *ends)
        for ends in itertools.permutations(axes, 2)
    ]
    return min(orders, key=cost)
