"""Moves an open window to a different number of devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.state import (
    TokenAccumulationState,
    skip_and_noise,
    with_noise,
)
from optax_tokenaccum._core.sums import SUM, Kind, kinds_of
from optax_tokenaccum._steps.state import StepState, require_step_state


def regroup_sums(state: StepState, like: StepState) -> StepState:
    """Lays out a train step's state for the devices of another step.

    A step with `data_axes` holds one sum per device, `[devices, ...]`. When a run
    resumes from a checkpoint in the middle of a window, on other devices, these sums
    must be added up in new groups, not dropped: 8 sums become 4, or 1, or 16 of which
    some are zeros. A step without `data_axes` holds one sum, with the shape of the
    parameter; its states are accepted and returned too.

    The applied gradient is the same up to float32 rounding. On the same number of
    devices nothing is added up, and the gradient is the same bit for bit.

    Args:
      state: the state that was saved. For NNX, the tree that was restored from a
        checkpoint of `nnx.state((model, optimizer))`, in the shapes that it has there.
      like: a state of the step that resumes, `step.init(params)`, or its shapes with
        shardings. For NNX, `nnx.state((model, optimizer))` after `step.init`. Every
        array is placed like the array in `like`.

    Returns:
      `state` in the shapes and shardings of `like`.

    Raises:
      TypeError: `state` or `like` is not a `StepState` of a train step.
      ValueError: the states differ in more than the layout of the sums.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step, regroup_sums
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> mesh = jax.sharding.Mesh(jax.devices(), "data")
      >>> many = make_train_step(
      ...     loss_fn, optax.sgd(1.0), 2, mesh=mesh, data_axes="data")
      >>> state = many.init(jnp.zeros(()))
      >>> state, _ = many(state, jnp.ones(2 * jax.device_count()))
      >>> one = make_train_step(loss_fn, optax.sgd(1.0), 2)
      >>> state = regroup_sums(jax.device_get(state), one.init(jnp.zeros(())))
      >>> state, _ = one(state, jnp.ones(3))
      >>> print(state.params)
      -1.0
    """
    if not isinstance(like, StepState) and _sums_of(like):
        return _regrouped_tree(state, like)
    for each in (state, like):
        require_step_state(each, accumulates=True)
    sums = jax.tree.map(
        _regrouped,
        state.opt_state.acc_grads,
        like.opt_state.acc_grads,
        like.params,
        kinds_of(like.params),
    )
    opt_state = state.opt_state._replace(
        acc_grads=sums,
        skip_state=_regrouped_noise(state.opt_state, like.opt_state),
    )
    state = state._replace(opt_state=opt_state)
    trees.check_same_tree(state, like, "The states must be of the same training")
    return jax.tree.map(_put, state, like)


def _regrouped(acc: Any, like: Any, param: Any, kind: Kind) -> Any:
    shape = jnp.shape(param)
    if acc.shape == like.shape or shape not in (acc.shape, acc.shape[1:]):
        return acc

    def regroup(acc: jax.Array) -> jax.Array:
        acc = acc.reshape(_number_of_sums(acc, shape), *shape)
        groups = _number_of_sums(like, shape)
        missing = -len(acc) % groups
        padding = [(0, missing), *[(0, 0)] * len(shape)]
        acc = jnp.pad(acc, padding, constant_values=kind.nothing)
        acc = acc.reshape(groups, len(acc) // groups, *shape)
        return kind.reduce(acc, 1).reshape(like.shape)

    return jax.jit(regroup, out_shardings=_sharding(like))(_on_devices_of(like, acc))


def _regrouped_tree(state: Any, like: Any) -> Any:
    """The same for an NNX model and its optimizer, by the names of the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    saved = {_names_of(path): x for path, x in leaves}
    kinds = dict(jax.tree_util.tree_leaves_with_path(kinds_of(like)))

    def place(path: Any, x: Any) -> Any:
        names = _names_of(path)
        if names not in saved:
            if "noise_state" in names:
                return x
            raise ValueError(
                "The states must be of the same training: got no "
                f"{jax.tree_util.keystr(path)} in the state that was saved."
            )
        old = saved[names]
        if {"acc_grads", "noise_state"} & {*names} and old.shape != x.shape:
            # The shorter shape is that of the parameter, without an axis of devices.
            shape = old.shape if len(old.shape) < len(x.shape) else x.shape
            is_each = len(old.shape) == len(x.shape)
            param = jnp.zeros(shape[1:] if is_each else shape)
            old = _regrouped(old, x, param, kinds[path])
        return _put(old, x)

    return jax.tree_util.tree_map_with_path(place, like)


def _sums_of(tree: Any) -> list[Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [x for path, x in leaves if "acc_grads" in _names_of(path)]


def _names_of(path: Any) -> tuple[str, ...]:
    """The same for an object and for the dictionary that a checkpoint makes of it."""
    names = ("key", "name", "idx")
    return tuple(
        str(next(getattr(entry, name) for name in names if hasattr(entry, name)))
        for entry in path
    )


def _regrouped_noise(
    state: TokenAccumulationState, like: TokenAccumulationState
) -> Any:
    """A `skip_state` with the tokens of each new group, unknown if they were not."""
    skip_state, kept = skip_and_noise(state)
    wanted = skip_and_noise(like).noise_state
    if jax.tree.structure(kept) == jax.tree.structure(wanted):
        add_up = functools.partial(_regrouped, param=jnp.zeros(()), kind=SUM)
        return with_noise(skip_state, jax.tree.map(add_up, kept, wanted))
    unknown = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), wanted)
    return with_noise(skip_state, unknown)


def _number_of_sums(acc: Any, shape: tuple[int, ...]) -> int:
    return 1 if acc.shape == shape else acc.shape[0]


def _on_devices_of(like: Any, acc: Any) -> Any:
    """Moves the sums to where a program that returns `like` can read them."""
    sharding = _sharding(like)
    if sharding is None or not isinstance(acc, jax.Array):
        return acc
    if acc.sharding.device_set == sharding.device_set:
        return acc
    return jax.device_get(acc)


def _put(x: Any, like: Any) -> Any:
    sharding = _sharding(like)
    if sharding is not None:
        return jax.device_put(x, sharding)
    return jnp.asarray(jax.device_get(x) if getattr(x, "committed", False) else x)


def _sharding(like: Any) -> Any:
    """The sharding of `like`, or `None` if it is not bound to devices."""
    is_bound = getattr(like, "committed", True)
    return getattr(like, "sharding", None) if is_bound else None
