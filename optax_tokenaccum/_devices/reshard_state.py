"""Moves an open window to a different number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.state import TokenAccumulationState


def reshard_state(state: trees.Tree, like: trees.T) -> trees.T:
    """Lays out a step's state for the devices of a different step.

    A step with `data_axes` holds one sum per device, `[devices, ...]`. When a run
    resumes from a checkpoint in the middle of a window, on other devices, these sums
    must be added up in new groups, not dropped: 8 sums become 4, or 1, or 16 of which
    some are zeros. A step without `data_axes` holds one sum, with the shape of the
    parameter; its states are accepted and returned too.

    The applied gradient is the same up to float32 rounding. On the same number of
    devices nothing is added up, and the gradient is the same bit for bit.

    A window step has no open window between calls: its arrays only change their place.

    Args:
      state: the state that was saved, or the dictionary that a checkpoint makes of it,
        in the shapes that it was saved with. Leaves are found by their names.
      like: a state of the step that resumes, `step.init(params)`, or its shapes with
        shardings; for NNX, `nnx.state((model, optimizer))` after `step.init`. Every
        array is placed like the array in `like`.

    Returns:
      `state` in the shapes, dtypes and shardings of `like`.

    Raises:
      ValueError: the states differ in more than the layout of the sums.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step, reshard_state
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> mesh = jax.sharding.Mesh(jax.devices(), "data")
      >>> many = make_train_step(
      ...     loss_fn, optax.sgd(1.0), 2, mesh=mesh, data_axes="data")
      >>> state = many.init(jnp.zeros(()))
      >>> state, _ = many(state, jnp.ones(2 * jax.device_count()))
      >>> one = make_train_step(loss_fn, optax.sgd(1.0), 2)
      >>> state = reshard_state(jax.device_get(state), one.init(jnp.zeros(())))
      >>> state, _ = one(state, jnp.ones(3))
      >>> print(state.params)
      -1.0
    """
    saved, wanted = _by_name(state), _by_name(like)
    for name in wanted.keys() - saved.keys():
        if "skip_state" in name:  # in 0.5, it was what the function returned
            saved[name] = saved.pop(tuple(x for x in name if x != "of_function"), 0)
    if not any("grad_sums" in name for name in wanted):
        # In 0.5, a window step kept the numbers of an open window, too.
        of_window = {*TokenAccumulationState._fields}
        gone = [x for x in saved if x not in wanted and x[-1] in of_window]
        for name in gone:
            del saved[name]
    for name in saved.keys() & wanted.keys():
        old, new = saved[name], wanted[name]
        if "grad_sums" in name:
            saved[name] = _regrouped(old, new)
        elif trees.is_key(new) and not trees.is_key(old):  # as NumPy restores it
            impl = jax.random.key_impl(new)
            saved[name] = jax.random.wrap_key_data(old, impl=impl)
    trees.check_same_tree(saved, wanted, "The states must be of the same training")
    leaves = [_put(saved[name], x) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _by_name(tree: trees.Tree) -> dict[tuple[str, ...], trees.Leaf]:
    """The leaves by their paths, as in the dictionary that a checkpoint makes."""
    leaves = tree_leaves_with_path(tree)
    return {tuple(keystr((x,), simple=True) for x in p): leaf for p, leaf in leaves}


def _regrouped(acc: trees.Leaf, like: trees.Leaf) -> trees.Leaf:
    """The sums in groups for other devices, which have an axis or none."""
    rank = max(jnp.ndim(acc), like.ndim) - 1  # of the parameter, if the shapes differ
    shape, expected = (x.shape[x.ndim - rank :] for x in (acc, like))
    if acc.shape == like.shape or shape != expected:
        return acc
    given, groups = (x.shape[0] if x.ndim > rank else 1 for x in (acc, like))
    each = -(-given // groups)

    def regroup(acc: jax.Array) -> jax.Array:
        missing = [(0, each * groups - given), *[(0, 0)] * rank]
        acc = jnp.pad(acc.reshape(given, *shape), missing)
        return acc.reshape(groups, each, *shape).sum(1).reshape(like.shape)

    sharding = _sharding(like)
    is_array = isinstance(acc, jax.Array) and trees.is_concrete(acc)
    if sharding and is_array and acc.sharding.device_set != sharding.device_set:
        acc = jax.device_get(acc)  # no program reads from both
    return jax.jit(regroup, out_shardings=sharding)(acc)


def _put(x: trees.Leaf, like: trees.Leaf) -> jax.Array:
    dtype = jnp.result_type(like)
    if not isinstance(x, jax.Array):
        x = np.asarray(x, dtype)
    elif x.dtype != dtype or jax.typeof(x).weak_type:
        x = jax.lax.convert_element_type(x, dtype)
    sharding = _sharding(like)
    if sharding is not None:
        return jax.device_put(x, sharding)
    is_bound = trees.is_concrete(x) and getattr(x, "committed", False)
    return jnp.asarray(jax.device_get(x) if is_bound else x)


def _sharding(like: trees.Leaf) -> jax.sharding.Sharding | None:
    """The sharding of `like`, or `None` if it is not bound to devices."""
    is_bound = getattr(like, "committed", True)
    return getattr(like, "sharding", None) if is_bound else None
