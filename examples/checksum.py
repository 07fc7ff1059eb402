"""A checksum to compare states bit for bit, without copying them to the host."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checksum(state: Any) -> str:
    """The SHA-256 of two integers per array, on any devices and processes.

    The integers change when a bit of the array changes, and when two elements are
    swapped. They are sums modulo 2**32, which do not round, so the order of addition
    does not matter and every device can add up its part.
    """
    digests = jax.device_get(_digests(jax.tree.leaves(state)))
    return hashlib.sha256(np.asarray(digests, "<u4").tobytes()).hexdigest()


@jax.jit
def _digests(arrays: list[jax.Array]) -> list[list[jax.Array]]:
    def digest(x: jax.Array) -> list[jax.Array]:
        words = _words(x)
        place = jnp.zeros(words.shape, jnp.uint32)
        for axis, size in enumerate(words.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
            place = place * np.uint32(size) + along
        mixed = _mix(words ^ _mix(place + np.uint32(1)))
        return [jnp.sum(x, dtype=jnp.uint32) for x in (mixed, _mix(mixed))]

    return [digest(x) for x in arrays]


def _words(x: jax.Array) -> jax.Array:
    """The bits as uint32 words; wider numbers add a last axis for their words."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = min(8 * x.dtype.itemsize, 32)
    return jax.lax.bitcast_convert_type(x, f"uint{width}").astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Scrambles words, distinct ones to distinct ones: MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
