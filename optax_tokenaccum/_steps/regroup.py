"""Moves an open window to a different number of devices."""

import itertools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.overwritten import NOTHING, is_overwritten
from optax_tokenaccum._steps.state import StepState, require_step_state

State = TypeVar("State")

# The path of a leaf, by the names of its keys, attributes and indices.
Name = tuple[str, ...]


def regroup_sums(state: Any, like: State) -> State:
    """Lays out a step's state for the devices of another step.

    A step with `data_axes` holds one sum per device, `[devices, ...]`. When a run
    resumes from a checkpoint in the middle of a window, on other devices, these sums
    must be added up in new groups, not dropped: 8 sums become 4, or 1, or 16 of which
    some are zeros. A step without `data_axes` holds one sum, with the shape of the
    parameter; its states are accepted and returned too.

    The applied gradient is the same up to float32 rounding. On the same number of
    devices nothing is added up, and the gradient is the same bit for bit.

    A window step has no open window between calls: its arrays only change their place.
    Up to 0.2.0 its `opt_state` was the inner optimizer's state, which counted no
    updates. Restored without a target, such a state gets the form of `like`, and
    `gradient_step` begins at 0, and with it the dropout masks that `rng` gives.

    Args:
      state: the state that was saved, or the dictionary that a checkpoint makes of it,
        in the shapes that it was saved with. Leaves are found by their names.
      like: a state of the step that resumes, `step.init(params)`, or its shapes with
        shardings; for NNX, `nnx.state((model, optimizer))` after `step.init`. Every
        array is placed like the array in `like`.

    Returns:
      `state` in the shapes, dtypes and shardings of `like`.

    Raises:
      TypeError: `like` is not the state of a step, or has no `TokenAccumulationState`.
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
    saved, wanted = _leaves_by_name(state), _leaves_by_name(like)
    accumulates = any("acc_grads" in name for name in wanted)
    if isinstance(like, StepState) or not accumulates:
        require_step_state(like, accumulates=accumulates)
    if not accumulates and ("opt_state", "acc_tokens") not in saved:
        trees.check_alive(jax.tree.leaves(state)[:1])
        saved = _with_counters(saved, wanted)
    elif isinstance(state, StepState):
        require_step_state(state, accumulates=accumulates)
    marks = [is_overwritten(*x) for x in jax.tree_util.tree_leaves_with_path(like)]
    leaves = [
        _regrouped(name, saved.pop(name, None), x, is_maximum)
        for (name, x), is_maximum in zip(wanted.items(), marks, strict=True)
    ]
    for name, x in saved.items():
        raise _unlike(name, None, x)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaves_by_name(tree: Any) -> dict[Name, Any]:
    """The names are the same in the dictionary that a checkpoint makes of a state."""

    def name_of(entry: Any) -> str:
        kinds = ("key", "name", "idx")
        return str(next(getattr(entry, x) for x in kinds if hasattr(entry, x)))

    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [name_of(entry) for entry in path]
        # In 0.2.0, skip_state could hold a skip_state and the noise of a window.
        pairs = [*itertools.pairwise(["", *names])]
        if ("skip_state", "noise_state") not in pairs:
            name = tuple(y for x, y in pairs if not x == y == "skip_state")
            leaves[name] = leaf
    return leaves


def _with_counters(saved: dict[Name, Any], wanted: dict[Name, Any]) -> dict[Name, Any]:
    """A window step's state of 0.2.0, with the names and the numbers of today's."""
    inner = "opt_state", "inner_opt_state"
    of_inner = {
        inner + name[1:] if name[:1] == inner[:1] else name: x
        for name, x in saved.items()
    }
    numbers = {
        name: jnp.zeros(x.shape, x.dtype)
        for name, x in wanted.items()
        if name[:1] == inner[:1] and name[:2] != inner
    }
    return numbers | of_inner


def _regrouped(name: Name, old: Any, like: Any, is_maximum: bool) -> Any:
    if old is not None and "acc_grads" in name:
        old = _sums_for(old, like, is_maximum)
    if old is None or jnp.shape(old) != like.shape:
        raise _unlike(name, like, old)
    return _put(old, like)


def _unlike(name: Name, expected: Any, got: Any) -> ValueError:
    shapes = [
        "no leaf" if x is None else f"shape {jnp.shape(x)}" for x in (expected, got)
    ]
    return ValueError(
        f"The states must be of the same training: at {'/'.join(name)} expected "
        f"{shapes[0]}, got {shapes[1]}."
    )


def _sums_for(acc: Any, like: Any, is_maximum: bool) -> Any:
    """The sums in groups for other devices, which have an axis or none."""
    if acc.shape == like.shape:
        return acc
    is_each = len(acc.shape) >= len(like.shape), len(like.shape) >= len(acc.shape)
    shape, wanted = (
        x.shape[1:] if has_axis else x.shape
        for x, has_axis in zip((acc, like), is_each, strict=True)
    )
    if shape != wanted:
        return acc

    def regroup(acc: jax.Array) -> jax.Array:
        acc = acc.reshape(_number_of_sums(acc, shape), *shape)
        groups = _number_of_sums(like, shape)
        missing = -len(acc) % groups
        padding = [(0, missing), *[(0, 0)] * len(shape)]
        acc = jnp.pad(acc, padding, constant_values=NOTHING if is_maximum else 0)
        acc = acc.reshape(groups, len(acc) // groups, *shape)
        return (jnp.max if is_maximum else jnp.sum)(acc, 1).reshape(like.shape)

    return jax.jit(regroup, out_shardings=_sharding(like))(_on_devices_of(like, acc))


def _number_of_sums(acc: Any, shape: tuple[int, ...]) -> int:
    return 1 if acc.shape == shape else acc.shape[0]


def _on_devices_of(like: Any, acc: Any) -> Any:
    """Moves the sums to where a program that returns `like` can read them."""
    sharding = _sharding(like)
    if sharding is None or not isinstance(acc, jax.Array) or not trees.is_concrete(acc):
        return acc
    if acc.sharding.device_set == sharding.device_set:
        return acc
    return jax.device_get(acc)


def _put(x: Any, like: Any) -> Any:
    if not isinstance(x, jax.Array):
        x = np.asarray(x, like.dtype)
    elif x.dtype != like.dtype or jax.typeof(x).weak_type:
        x = jax.lax.convert_element_type(x, like.dtype)
    sharding = _sharding(like)
    if sharding is not None:
        return jax.device_put(x, sharding)
    is_bound = trees.is_concrete(x) and getattr(x, "committed", False)
    return jnp.asarray(jax.device_get(x) if is_bound else x)


def _sharding(like: Any) -> Any:
    """The sharding of `like`, or `None` if it is not bound to devices."""
    is_bound = getattr(like, "committed", True)
    return getattr(like, "sharding", None) if is_bound else None
