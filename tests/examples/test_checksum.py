"""Tests of `examples/checksum.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum import checksum
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS = 16, 256
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64"]


def array(dtype):
    numbers = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    return jnp.asarray(numbers > 0 if dtype == "bool" else 9 * numbers).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_does_not_matter(dtype):
    x = array(dtype)
    expected = checksum({"w": x})
    devices = np.array(jax.devices())
    meshes = [Mesh(devices.reshape(shape), ("a", "b")) for shape in ((8, 1), (2, 4))]
    for spec in (P("a"), P(None, "b"), P("a", "b"), P()):
        for mesh in meshes:
            spread = jax.device_put(x, NamedSharding(mesh, spec))
            assert checksum({"w": spread}) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_matters(dtype):
    x = np.asarray(array(dtype))
    expected, bits = checksum(x), x.view(np.uint8).ravel()
    random = np.random.default_rng(1)
    for place in random.integers(bits.size, size=20):
        changed = bits.copy()
        changed[place] ^= 1 if dtype == "bool" else 1 << random.integers(8)
        assert checksum(changed.view(x.dtype).reshape(x.shape)) != expected


def linear_sums(x):
    """Sums that can stay equal when two elements swap places."""
    bits = np.asarray(x).view(np.uint32).ravel()
    places = np.arange(1, bits.size + 1, dtype=np.uint32)
    return bits.sum(dtype=np.uint32), (bits * places).sum(dtype=np.uint32)


def test_places_matter_where_sums_of_bits_times_places_do_not_see_them():
    x = jnp.ones((ROWS, COLUMNS)).at[0, 0].set(2)
    # Powers of two differ only in their upper bits, and so do distant places.
    swapped = jnp.ones((ROWS, COLUMNS)).at[2, 0].set(2)
    assert linear_sums(x) == linear_sums(swapped)
    assert checksum(x) != checksum(swapped)
    assert checksum(array("float32")) != checksum(array("float32")[::-1])
    assert checksum([x, swapped]) != checksum([swapped, x])
    assert checksum(jnp.zeros(4)) != checksum(-jnp.zeros(4))
    assert checksum(jnp.zeros(4)) != checksum(jnp.zeros(5))
