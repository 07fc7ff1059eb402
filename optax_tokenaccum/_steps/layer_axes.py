"""Layers that are stacked along an axis that is not the first.

With MaxText's `param_scan_axis=1`, for example, they are transposed before the scan,
and so is their gradient after it, as a whole. During a window their axis is the first
instead, in sums too.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_tokenaccum._core.perturbations import LossJaxpr
from optax_tokenaccum._core.trees import ModelState, Params
from optax_tokenaccum._devices.batch import MicroBatch
from optax_tokenaccum._devices.mesh import Shardings, entries_of, over_devices
from optax_tokenaccum._steps.micro_batch import Setup

# By the leaf of the parameters: the axis of the layers, and the first, both negative,
# because a sum that each device has of its own has one more axis in front.
LayerAxes = dict[int, tuple[int, int]]


def layer_axes_of(
    setup: Setup,
    params: Params,
    model_state: ModelState,
    micro_batch: MicroBatch,
) -> LayerAxes:
    """The axes along which scans take layers, where these are not the first."""
    found: LayerAxes = {}
    devices, everywhere = setup.devices, PartitionSpec()

    def look(params: Params, model_state: ModelState, micro_batch: MicroBatch) -> None:
        ranks = [*map(jnp.ndim, jax.tree.leaves(params))]
        axes = LossJaxpr(setup.loss, params, model_state, micro_batch).axes_of_layers()
        found.update((i, (x - ranks[i], -ranks[i])) for i, x in axes.items() if x)

    if devices.device_axis:  # where the loss may ask for the device's place
        specs = everywhere, everywhere, micro_batch.specs()
        look = over_devices(look, devices.mesh, devices.names, specs, everywhere)
    jax.eval_shape(look, params, model_state, micro_batch)
    return found


def move_layers_first(tree: Params, layer_axes: LayerAxes) -> Params:
    """A tree like the parameters, or the sums, with these axes first."""
    leaves, structure = jax.tree.flatten(tree)
    for i, (axis, first) in layer_axes.items():
        leaves[i] = jnp.moveaxis(leaves[i], axis, first)
    return structure.unflatten(leaves)


def move_layers_back(tree: Params, layer_axes: LayerAxes) -> Params:
    inverse = {i: (first, axis) for i, (axis, first) in layer_axes.items()}
    return move_layers_first(tree, inverse)


def shardings_of_moved(shardings: Shardings, layer_axes: LayerAxes) -> Shardings:
    if shardings is None:
        return None
    leaves = [*shardings]
    for i, (axis, first) in layer_axes.items():
        if (sharding := leaves[i]) is not None:
            spec = entries_of(sharding, -first)
            spec.insert(0, spec.pop(axis))
            leaves[i] = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return leaves
