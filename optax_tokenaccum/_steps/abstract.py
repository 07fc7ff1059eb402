"""The state of a step as shapes with shardings, on devices that need not be there."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import arrays
from optax_tokenaccum._core.trees import T
from optax_tokenaccum._devices.shardings import is_explicit, put


def is_abstract(tree: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def shapes_of(tree: T) -> T:
    """Shapes in the place of arrays, with a sharding where one was chosen."""

    def shape_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_chosen = getattr(x, "committed", True)
        sharding = x.sharding if is_chosen else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape_of, tree)


def init_of_shapes(
    init: Callable[[Any], T], leading_axes: tuple[int, ...], params: Any
) -> T:
    """The shapes of what `init` makes of arrays that are placed like `params`.

    On a mesh, `init` is traced on an Explicit mesh with the same axes, where types tell
    how every value is spread. On an Auto mesh, optimizers make values of another shape
    than a parameter or its sum, such as factored moments, without looking at how the
    parameter is spread: these are on every device.

    Args:
      init: makes a state, sums included.
      leading_axes: the axes of a sum before those of its parameter.
      params: shapes with shardings.
    """
    home = arrays.home(params)
    if not isinstance(home, NamedSharding):
        return placed_at(home, jax.eval_shape(init, params))
    names = home.mesh.axis_names
    explicit = AbstractMesh(
        home.mesh.axis_sizes, names, axis_types=(AxisType.Explicit,) * len(names)
    )
    typed = jax.tree.map(
        lambda x: put(x, NamedSharding(explicit, x.sharding.spec)), params
    )
    with jax.sharding.use_abstract_mesh(explicit):
        made = jax.eval_shape(init, typed)

    shapes = {x.shape for x in jax.tree.leaves(params)}
    shapes |= {(*leading_axes, *shape) for shape in shapes}

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_known = x.sharding is not None
        is_known &= is_explicit(home.mesh) or x.shape in shapes
        return put(x, NamedSharding(home.mesh, x.sharding.spec if is_known else P()))

    return jax.tree.map(on_mesh, made)


def placed_at(home: Sharding | None, tree: T) -> T:
    return jax.tree.map(lambda x: put(x, x.sharding or home), tree)
