"""Views in the order in which a TPU keeps arrays are what XLA chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.chips import CHIPS
from optax_tokenaccum._core.memory_order import memory_order, restored, viewed

# What a v5e chooses.
ORDERS = {
    (): (),
    (4,): (0,),
    (2048, 1536): (0, 1),
    (1000, 1000): (0, 1),
    (2048, 1000): (1, 0),
    (50257, 768): (0, 1),
    (768, 50257): (1, 0),
    (2048, 32, 64): (1, 2, 0),
    (32, 64, 2048): (0, 1, 2),
    (6, 2048, 32, 64): (0, 2, 3, 1),
    (24, 4096, 96): (0, 2, 1),
    (7, 7, 3, 64): (0, 2, 1, 3),
    (3, 3, 64, 64): (0, 1, 2, 3),
}


@pytest.mark.parametrize(("shape", "order"), ORDERS.items(), ids=str)
def test_orders(shape: tuple[int, ...], order: tuple[int, ...]):
    assert memory_order(shape) == order


@pytest.mark.slow
@pytest.mark.skipif(bool(CHIPS["v5e"].missing()), reason="needs libtpu, to compile")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpu_chooses_these_orders(dtype: jnp.dtype):
    where = SingleDeviceSharding(CHIPS["v5e"].devices()[0])
    shapes = [jax.ShapeDtypeStruct(x, dtype, sharding=where) for x in ORDERS]
    lowered = jax.jit(lambda arrays: [x + 1 for x in arrays]).lower(shapes)
    ((formats,), _) = lowered.compile().input_formats
    orders = [x.layout.major_to_minor for x in formats]
    assert orders == [*ORDERS.values()]


def test_views_are_restored():
    arrays = [
        np.arange(np.prod(s, dtype=int)).reshape(s) for s in ((200, 2, 3), (9, 2))
    ]
    views = viewed(arrays)
    assert [x.shape for x in views] == [(2, 3, 200), (2, 9)]
    for array, same in zip(arrays, restored(views, arrays), strict=True):
        np.testing.assert_array_equal(array, same)
