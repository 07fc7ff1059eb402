"""Programs on 8 devices for `test_collectives.py`: meshes, operations, other code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from model_on_8_devices import (
    ROWS,
    K,
    array,
    compiled,
    gradient,
    mapped,
    mesh,
    parameters,
    placed,
    program,
    rows,
)

# Parameters over a mesh.

OVER_MODEL: Any = {"in": (None, "model"), "out": ("model",)}
OVER_DATA: Any = {"in": ("data",), "out": ("data",)}


@program
def tensor_parallel() -> Any:
    params = parameters(on=mesh(2), **OVER_MODEL)
    return compiled(gradient, params, rows("data", on=mesh(2)), out=params)


@program
def tensor_parallel_on_devices_in_another_order() -> Any:
    devices = np.array(jax.devices()).reshape(2, 4).T[::-1]
    on = Mesh(devices, ("data", "model"))
    params = parameters(on=on, **OVER_MODEL)
    return compiled(gradient, params, rows("data", on=on), out=params)


@program
def sharded_parameters() -> Any:
    params = parameters(**OVER_DATA)
    return compiled(gradient, params, rows("data"), out=params)


@program
def sharded_parameters_by_hand() -> Any:
    def f(params: Any, batch: Any) -> Any:
        gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
        scatter = functools.partial(jax.lax.psum_scatter, axis_name="data", tiled=True)
        return jax.tree.map(scatter, gradient(jax.tree.map(gather, params), batch))

    arguments = parameters(**OVER_DATA), rows("data")
    return compiled(mapped(f, *arguments, out=P("data")), *arguments)


@program
def explicit_mesh() -> Any:
    on = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(on):
        return compiled(gradient, parameters(on=on), rows("data", on=on))


@program
def two_meshes() -> Any:
    params = parameters(on=mesh(2), **OVER_MODEL)
    return compiled(lambda b, p: gradient(p, b), rows("data"), params, out=params)


@program
def no_inputs() -> Any:
    def total() -> Any:
        x = jax.random.normal(jax.random.key(0), (ROWS, 16))
        over_data = array(x.shape, "data").sharding
        return jnp.sum(jax.lax.with_sharding_constraint(x, over_data))

    return compiled(total, out=array(()))


# One operation each, on 16 numbers per device.


def of_16(f: Any, *spec: Any, on: Any = None, out: Any = None) -> Any:
    x = array((8, 16), *(spec or ("data",)), on=on)
    f = mapped(f, x, out=x.sharding.spec if out is None else out)
    return compiled(f, x)


@program
def psum() -> Any:
    return of_16(lambda x: jax.lax.psum(x, "data"), out=P())


@program
def psum_over_both_axes() -> Any:
    both = ("data", "model")
    return of_16(lambda x: jax.lax.psum(x, both), both, on=mesh(2), out=P())


@program
def psum_of_a_part_of_an_axis() -> Any:
    groups = [[0, 1, 4, 5], [2, 3, 6, 7]]
    return of_16(lambda x: jax.lax.psum(x, "data", axis_index_groups=groups))


@program
def ppermute() -> Any:
    pairs = [(i, (i + 1) % 4) for i in range(4)]
    both = ("data", "model")
    return of_16(lambda x: jax.lax.ppermute(x, "data", pairs), both, on=mesh(2))


@program
def all_to_all() -> Any:
    return of_16(lambda x: jax.lax.all_to_all(x, "data", 1, 1, tiled=True))


@program
def psum_in_nested_loops() -> Any:
    def repeat(f: Any, times: int) -> Any:
        return lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, length=times)[0]

    reduce = repeat(lambda x: jax.lax.psum(x, "data") / 8, 5)
    return of_16(repeat(lambda x: reduce(x + 1), 3))


@program
def psum_until_small() -> Any:
    def reduce(x: Any) -> Any:
        return jax.lax.psum(x, "data") / 16

    return of_16(lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) > 1, reduce, x))


@program
def psum_in_a_branch() -> Any:
    def reduce(x: Any) -> Any:
        is_large = jax.lax.pmax(jnp.max(x), "data") > 1
        return jax.lax.cond(is_large, lambda: jax.lax.psum(x, "data"), lambda: x)

    return of_16(reduce)


@program
def pmap() -> Any:  # over replicas in the oldest supported jax
    f = jax.pmap(lambda x: jax.lax.psum(x, "data"), "data")
    return f.lower(jax.ShapeDtypeStruct((8, 16), jnp.float32)).compile()


# Programs that were not written for this library.


@program
def flax_attention() -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(nnx.merge(graph, params)(x) ** 2)

    model = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    x = array((ROWS, 10, 32), "data")
    return compiled(jax.grad(loss), placed(params), x, out=placed(params))


@program
def optax_multi_steps() -> Any:
    optimizer = optax.MultiSteps(optax.adam(1e-3), K)

    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = optimizer.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = placed(jax.eval_shape(optimizer.init, parameters()))
    return compiled(step, parameters(), state, rows("data"))


@program
def fourier_transform() -> Any:
    x = array((64, 64), "data", dtype=jnp.complex64)
    return compiled(jnp.fft.fft2, x, out=x)


@program
def sort() -> Any:
    x = array((4096,), "data")
    return compiled(jnp.sort, x, out=x)
