"""The state of a step as shapes with shardings, on devices that need not be there."""

from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import arrays
from optax_tokenaccum._core.trees import OptState, Params


def is_abstract(tree: Params) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def shapes_of(tree: Params) -> Params:
    """Shapes in the place of arrays; without a sharding where none was chosen."""

    def shape_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_chosen = getattr(x, "committed", True)
        return _placed(x, getattr(x, "sharding", None) if is_chosen else None)

    return jax.tree.map(shape_of, tree)


def init_of_shapes(init: Callable[[Params], OptState], params: Params) -> OptState:
    """The shapes of what `init` makes of arrays that are placed like `params`.

    On a mesh, `init` is traced on an Explicit mesh with the same axes, where types tell
    how every value is spread. What is made of no parameter is on every device.
    """
    home = arrays.home(params)
    if not isinstance(home, NamedSharding):
        made = jax.eval_shape(init, params)
        return jax.tree.map(lambda x: _placed(x, home), made)
    mesh = home.mesh
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    typed = jax.tree.map(
        lambda x: _placed(x, NamedSharding(explicit, x.sharding.spec)), params
    )
    with jax.sharding.use_abstract_mesh(explicit):
        made = jax.eval_shape(init, typed)

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P() if x.sharding is None else x.sharding.spec
        return _placed(x, NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, made)


def _placed(
    x: jax.Array | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
