"""Running a step's work over the rows of every device, or of the only one."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._devices.axes import LocalSums
from optax_tokenaccum._devices.layouts import ShardedSums, StackedSums
from optax_tokenaccum._devices.mesh import DataParallel
from optax_tokenaccum._devices.shardings import is_explicit, sharding_of
from optax_tokenaccum._steps.placement import Placement


def init_on(
    devices: DataParallel | None, params: Any, init: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """The parameters on the devices, and what `init` makes of them."""
    if devices is None:
        return params, init(params)
    params = devices.place_params(params)
    is_traced = not all(map(trees.is_concrete, jax.tree.leaves(params)))
    model = params
    if not devices.keeps_sums_apart and not is_traced:
        # What an optimizer makes like a parameter is to be where its sum is.
        model = jax.tree.map(
            lambda p: jax.device_put(
                p, devices.sharding(*devices.spread(p, sharding_of(p)))
            ),
            params,
        )
    # An optimizer's init may make arrays from those that the mesh's types bind.
    binds = is_explicit(devices.mesh) and not is_traced
    with jax.set_mesh(devices.mesh) if binds else contextlib.nullcontext():
        return params, init(model)


def over_rows(
    devices: DataParallel | None,
    accumulation: Accumulation,
    placement: Placement | None,
    f: Callable[..., tuple[TokenAccumulationState | Any, Any, Any]],
    opt_state: TokenAccumulationState | None,
    batch: Any,
    *shared: Any,
    axis: int = 0,
) -> Any:
    """`f(accumulation, opt_state, batch, *shared)` of every device's rows.

    Args:
      devices: over which the rows are spread, if any.
      accumulation: handed to `f` as it is seen from a device.
      placement: of the state.
      f: returns a state, what is alike on all devices, and what each has, `beside` the
        others along `axis`.
      opt_state: with or without sums.
      batch: with a mesh, as `spread_rows` made it.
      *shared: whole on each device.
      axis: along which the devices stand in what each has.
    """
    if devices is None:
        return f(accumulation, opt_state, batch, *shared)
    if not devices.keeps_sums_apart:
        accumulation = over_all(devices, accumulation, placement)
        return f(accumulation, opt_state, batch.batch, *shared)
    copies = frozenset(i for i, is_whole in enumerate(batch.is_whole) if is_whole)
    on_each = replace(accumulation, layout=LocalSums(devices.names, copies=copies))
    everywhere: Any = P()
    state = TokenAccumulationState(*[everywhere] * len(TokenAccumulationState._fields))
    state = state._replace(acc_grads=P(devices.entry))
    return devices.map(
        functools.partial(f, on_each),
        in_specs=(
            state if opt_state is not None else P(),
            batch.specs(devices),
            *[P()] * len(shared),
        ),
        out_specs=(state, P(), P(*[None] * axis, devices.entry)),
    )(opt_state, batch.batch, *shared)


def over_all(
    devices: DataParallel | None,
    accumulation: Accumulation,
    placement: Placement | None = None,
) -> Accumulation:
    """The accumulation as it is seen from outside of `over_rows`."""
    if devices is None:
        return accumulation
    params = None if placement is None else placement.shardings.params
    kind = StackedSums if devices.keeps_sums_apart else ShardedSums
    return replace(accumulation, layout=kind(devices=devices, shardings=params))


def check_layout(acc_grads: Any, params: Any, devices: DataParallel | None) -> None:
    """Raises `ValueError` where the sums are of another number of devices."""
    lead = (devices.size,) if devices is not None and devices.keeps_sums_apart else ()
    sums = trees.named_leaves(acc_grads)
    for (path, acc), p in zip(sums, jax.tree.leaves(params), strict=False):
        got, own = jnp.shape(acc), jnp.shape(p)
        if got != (*lead, *own) and own in (got, got[1:]):
            raise ValueError(
                "The sums of the open window must be laid out for this step's devices: "
                f"at {path} of acc_grads expected shape {(*lead, *own)}, got {got}. "
                "Take over the state of a run on others with regroup_sums(state, "
                "step.init(params))."
            )
