"""The loss of a copy of the parameters on each device.

`reduce_every="window"` is a change of variables: the loss is differentiated with
respect to a copy of the parameters on each device, and the gradient of a copy is the
gradient of this device's rows. The `shard_map` is inside of the loss, so that the core
sees a scalar loss and a tree of arrays.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.jaxprs import asks_for_device, collectives, has_rules
from optax_tokenaccum._core.perturbations import (
    Consumers,
    LossJaxpr,
    Perturbations,
    PerturbedLoss,
    contribution,
    perturbed,
    traced_perturbed_loss,
)
from optax_tokenaccum._devices.batch import MicroBatch
from optax_tokenaccum._devices.mesh import Devices, entry_of, over_devices

# A loss of `params, model_state, micro_batch`, which returns `(loss_sum, (num_tokens,
# (aux, changes of the model state)))`.
LossOfRows = Callable[
    [trees.Params, trees.ModelState, MicroBatch],
    tuple[jax.Array, tuple[jax.Array, trees.Tree]],
]


def per_device_loss(
    loss: LossOfRows,
    devices: Devices,
    params: trees.Params,
    model_state: trees.ModelState,
    micro_batch: MicroBatch,
    perturbations: Perturbations,
) -> PerturbedLoss:
    """The loss of all rows, as a function of the perturbations of each device's copy.

    It returns `(loss_sum, (num_tokens, (aux, changes of the model state)))`.
    """
    names = devices.names
    varies = jax.tree.map(trees.is_key, model_state), micro_batch.varies_by_device()
    consumers: Consumers = defaultdict(set)

    def of_device(
        perturbations: Perturbations,
        params: trees.Params,
        model_state: trees.ModelState,
        micro_batch: MicroBatch,
    ) -> Any:
        place = jax.lax.axis_index(names)
        own_key = functools.partial(_own_key, place)
        model_state = jax.tree.map(own_key, model_state)
        traced = LossJaxpr(loss, params, model_state, micro_batch.with_key_at(place))
        consumers.update(traced.consumers)
        checks.check_trains(params, traced.reads(0))
        own = [
            x if x is None else x.reshape(p.shape)
            for x, p in zip(perturbations, jax.tree.leaves(params), strict=True)
        ]
        _check_names(traced, own, names)
        if devices.size > 1:
            _check_counts(traced, varies, devices.size, model_state)
        n = traced.pruned(1).value()
        loss_sum, (_, (aux, changed)) = traced.perturbed_loss(n)(own)
        # Its value is selected by the count, and its gradient is that of the loss: a
        # gradient may be finite where the loss is not.
        value = contribution(jax.lax.stop_gradient(loss_sum), n)
        loss_sum = perturbed(loss_sum.dtype, value, loss_sum, None)
        aux = jax.tree.map(lambda x: jnp.expand_dims(x, 0), aux)
        # nnx.remat returns all that it is given as new values.
        sources, numbers = traced.sources(), traced.numbers()[1][1][1]
        changed = {
            i: _mean_over_devices(x, names)
            for i, x in changed.items()
            if sources[numbers[i]] != len(own) + i
        }
        loss_sum = loss_sum.astype(trees.at_least_float32(loss_sum.dtype))
        loss_sum, total = jax.lax.psum((loss_sum, jnp.maximum(n, 0)), names)
        return loss_sum, (total, (aux, changed))

    own = P(entry_of(names))
    in_specs = own, P(), P(), micro_batch.specs()
    out_specs = P(), (P(), (own, P()))
    mapped = over_devices(of_device, devices.mesh, names, in_specs, out_specs)

    def of_rows(perturbations: Perturbations) -> Any:
        return mapped(perturbations, params, model_state, micro_batch)

    return traced_perturbed_loss(of_rows, perturbations, consumers)


def _own_key(place: jax.Array, x: trees.Leaf) -> trees.Leaf:
    """A device's own value of a part of the model's state: keys are folded."""
    if not trees.is_key(x):
        return x
    keys = jax.vmap(lambda key: trees.fold_key(key, place))(x.reshape(-1))
    return keys.reshape(x.shape)


def _mean_over_devices(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The mean of floating values; the first device's keys; others are the same."""
    if not trees.is_key(x):
        return jax.lax.pmean(x, names) if trees.is_float(x) else x
    data, is_first = jax.random.key_data(x), jax.lax.axis_index(names) == 0
    data = jax.lax.psum(jnp.where(is_first, data, jnp.zeros_like(data)), names)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _check_names(
    traced: LossJaxpr, perturbations: Perturbations, names: tuple[str, ...]
) -> None:
    """Raises `ValueError` if devices exchange values along the data axes."""
    passes = {"": traced.closed}
    if has_rules(traced.closed) and jax.tree.leaves(perturbations):
        gradient = jax.grad(traced.perturbed_loss(), has_aux=True)
        passes[" in its backward pass"] = jax.make_jaxpr(gradient)(perturbations)
    for where, one in passes.items():
        for name, along in collectives(one):
            if not along.isdisjoint(names):
                raise ValueError(
                    "loss_fn must not name the data axes, because the sums of all "
                    f"devices are added up after it: got a {name} over {sorted(along)}"
                    f"{where}. Return this device's sums."
                )


def _check_counts(
    traced: LossJaxpr, varies: trees.Tree, size: int, model_state: trees.ModelState
) -> None:
    """Raises `ValueError` unless counts can be added up, and states be unified."""
    # Of each argument's leaves, whether devices have different values.
    own = [*[False] * traced.num_params, *jax.tree.leaves(varies)]

    def needs(output: int) -> set[bool]:
        pruned = traced.pruned(output)
        pairs = zip(own, pruned.needed, strict=True)
        found = {is_own for is_own, is_needed in pairs if is_needed}
        return found | {True} if asks_for_device(pruned.jaxpr) else found

    if needs(1) == {False}:
        raise ValueError(
            "num_tokens must count the rows that loss_fn is given, those of one "
            "device: got a number that does not depend on them, and would be added "
            f"{size} times. Sum their mask."
        )
    _, (_, (_, changed)) = traced.numbers()
    names = [path.removeprefix(".") for path, _ in trees.named_leaves(model_state)]
    for i, output in changed.items():
        kind = traced.closed.out_avals[output].dtype
        cannot_mean = jnp.issubdtype(kind, jnp.integer) or kind == jnp.bool_
        if cannot_mean and True in needs(output):
            raise ValueError(
                f"{names[i]} must be the same on all devices, because the model has "
                "one: got a whole number that depends on a device's rows. Return it as "
                'aux, or use reduce_every="micro_batch", where loss_fn sees all rows.'
            )
