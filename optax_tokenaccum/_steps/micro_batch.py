"""Adds a micro-batch: differentiates the loss, and takes over the model's state."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.accumulation import Accumulation, Added
from optax_tokenaccum._core.backward import zero_perturbations
from optax_tokenaccum._core.jaxprs import Trace, collectives
from optax_tokenaccum._core.perturbations import LossJaxpr
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._devices.batch import MicroBatch
from optax_tokenaccum._devices.mesh import Devices, Shardings
from optax_tokenaccum._devices.per_device_loss import per_device_loss
from optax_tokenaccum._steps.loss_fn import Loss


@dataclass(eq=False, repr=False)
class Setup:
    """What is accumulated, and how: the same for each micro-batch of a run."""

    loss: Loss
    accumulation: Accumulation
    devices: Devices


def add_micro_batch(
    setup: Setup,
    params: trees.Params,
    model_state: trees.ModelState,
    opt_state: TokenAccumulationState,
    micro_batch: MicroBatch,
    shardings: Shardings = None,
) -> Added:
    """Differentiates the loss of a micro-batch, and adds it to the open window."""
    dtype = opt_state.acc_tokens.dtype
    loss, devices = setup.loss, setup.devices

    def of_rows(params: trees.Params, *given: Any) -> Any:
        loss_sum, (num_tokens, rest) = loss(params, *given)
        return loss_sum, (trees.as_num_tokens(num_tokens, dtype), rest)

    flat, are_spread, stack = devices.flatten_device_axis(
        opt_state.grad_sums, params, shardings
    )
    if devices.device_axis:
        # For their shapes: they are made again where the loss is differentiated.
        perturbations = zero_perturbations(*map(jax.tree.leaves, (flat, params)))
        perturbed_loss = per_device_loss(
            of_rows, devices, params, model_state, micro_batch, perturbations
        )
    else:
        traced = LossJaxpr(of_rows, params, model_state, micro_batch)
        check_own_map(traced.closed, params)
        checks.check_trains(params, traced.reads(0))
        perturbed_loss = traced.perturbed_loss(traced.pruned(1).value())
    added = setup.accumulation.add_loss(
        perturbed_loss,
        opt_state._replace(grad_sums=flat),
        params,
        are_spread,
        lambda gradients: devices.reduce_over_devices(stack(gradients), shardings),
    )
    aux, changed = added.aux
    opt_state = added.opt_state._replace(grad_sums=stack(added.opt_state.grad_sums))
    leaves, structure = jax.tree.flatten(model_state)
    # A skipped micro-batch leaves no trace, neither in the sums nor in the model state,
    # except that keys move on: its noise is not drawn again.
    counts = getattr(model_state, "key_counts", tuple)()
    for i, new in changed.items():
        old = leaves[i]
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        is_kept = not trees.is_key(old) and i not in counts
        leaves[i] = jnp.where(added.skipped, old, new) if is_kept else new
    return Added(opt_state, added.skipped, aux, structure.unflatten(leaves))


def check_own_map(traced: Trace, like: trees.Params, *, is_loss: bool = True) -> None:
    """Raises if results must be reduced in a `shard_map` of the caller's own.

    `traced` is a function that returns `loss_sum, num_tokens` and more, and `like` are
    the parameters, or gradients of them.
    """
    axes = {*jax.sharding.get_abstract_mesh().manual_axes}
    if not axes:
        return
    # The gradient of a parameter that devices share is a sum over them, and so is that
    # of a loss that reads from other devices.
    sent = {name for _, names in collectives(traced) for name in names} & axes
    # Without types, nothing tells whether what a loss reads from others is summed up.
    wrong: Iterable[str] = sent if is_loss else ()
    if trees.types_are_marked():
        differs = [trees.varying_axes(x) for x in traced.out_avals[:2]]
        own = [trees.varying_axes(x) for x in jax.tree.leaves(like)]
        shared = {name for name in axes if not all(name in x for x in own)}
        wrong = frozenset().union(*differs) & (shared | sent)
    if wrong:
        name = "loss_fn" if is_loss else "value_and_grad_fn"
        raise ValueError(
            f"In a shard_map, {name} must return both the loss and num_tokens reduced "
            "(jax.lax.psum), where devices share parameters or it reads from others: "
            f"got values that may differ along {sorted(wrong)}. For results of each "
            'device, give it jax.lax.pcast(params, axis_name, to="varying"); a loss '
            "that reads from others needs check_vma=True."
        )
