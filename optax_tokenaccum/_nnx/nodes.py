"""A model and its optimizer, read as the state of a step, and written back in place."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from optax_tokenaccum._core import arrays, trees
from optax_tokenaccum._core.state import TokenAccumulationState, has_sums
from optax_tokenaccum._core.trees import Batch, Params
from optax_tokenaccum._devices.mode import Mode
from optax_tokenaccum._devices.shardings import put
from optax_tokenaccum._nnx.model_loss import (
    Leaf,
    Model,
    Models,
    Value,
    Variables,
    is_variable,
    value_of,
)
from optax_tokenaccum._steps.state import ModelStepState


class Places(NamedTuple):
    """The variables that hold a tree of arrays; some leaves may be in no variable."""

    leaves: list[Leaf]
    structure: jax.tree_util.PyTreeDef

    def values(self) -> list[Value]:
        return [*map(value_of, self.leaves)]

    def tree(self) -> Params:
        return self.structure.unflatten(self.values())

    def write(self, values: Params) -> None:
        for leaf, x in zip(self.leaves, jax.tree.leaves(values), strict=True):
            _write(leaf, x)


class ModelNodes(NamedTuple):
    """The places of a model's arrays: those that are trained, and the rest."""

    model: nnx.Module
    params: Places
    rest: Places
    static: Model

    def variables(self) -> Variables:
        return Variables(self.rest.values(), self.static)

    def write_variables(self, variables: Variables) -> None:
        for path, place in self.static.place_of.items():
            leaf, x = self.rest.leaves[place], variables.values[place]
            if is_variable(leaf):
                _write(leaf, x)
            elif leaf is not x:
                with contextlib.suppress(ValueError):  # an array in a tuple
                    nnx.update(self.model, nnx.from_flat_state([(path, x)]))


class Nodes(NamedTuple):
    """The places of a state's arrays in a model and its optimizer."""

    model: ModelNodes
    opt_state: Places

    def state(self) -> ModelStepState:
        params, variables = self.model.params.tree(), self.model.variables()
        return ModelStepState(params, self.opt_state.tree(), variables)

    def donatable(self, state: ModelStepState, given: Batch) -> ModelStepState:
        """The state with copies of the arrays that must outlive the donation.

        These are arrays that are there twice, or are `given` to the call too, and those
        in no variable, which cannot always be replaced in the model.
        """
        leaves, structure = jax.tree.flatten(state)
        taken = {id(x) for x in jax.tree.leaves(given)}
        taken |= {id(x) for x in self.model.rest.leaves if not is_variable(x)}
        if len({*map(id, leaves)} | taken) == len(leaves) + len(taken):
            return state
        return structure.unflatten([arrays.settled(x, taken) for x in leaves])

    def write(self, state: ModelStepState) -> None:
        """Puts the arrays of a state into their places."""
        self.model.params.write(state.params)
        self.opt_state.write(state.opt_state)
        self.model.write_variables(state.model_state)


def places_of(tree: Params) -> Places:
    return Places(*jax.tree.flatten(tree, is_leaf=is_variable))


def read(models: Models, model: nnx.Module, wrt: nnx.filterlib.Filter) -> ModelNodes:
    """Looks at all of the model: its structure may change from call to call."""
    graphdef, *states = nnx.split(model, wrt, ...)
    params, rest = map(places_of, states)
    if not params.leaves:
        raise ValueError(
            "The optimizer must train some variables of the model: got none that match "
            f"wrt={wrt!r}, with which nnx.Optimizer was made."
        )
    structures = params.structure, jax.tree.structure(rest.values())
    return ModelNodes(model, params, rest, models.of(graphdef, states, structures))


def check_alive(state: ModelStepState) -> None:
    """Raises `ValueError` if a call that failed, or another step, took an array."""
    if not trees.is_alive(state):
        raise ValueError(
            "The arrays of the model and its optimizer must not have been donated: got "
            "some that are gone, because an earlier call failed while it ran, or "
            "because they are older than the last call. Restore a checkpoint, "
            "nnx.update((model, optimizer), checkpoint); or, if the parameters are "
            "still there, begin with a new nnx.Optimizer and step.init. Build the step "
            "with donate=False to lose nothing."
        )


def _write(leaf: Any, x: Value) -> None:
    if leaf.get_raw_value() is not x:
        leaf.set_raw_value(x)


def laid_out(state: ModelStepState, mode: Mode) -> ModelStepState:
    """The state where a step needs it: arrays placed, and sums laid out.

    Arrays that were never placed, and with a mesh those that are not on it, move to the
    devices of the parameters. If the path of such an array ends with the path of a
    parameter of the same shape, it is placed like that parameter: these are sums and
    moments that were created before the parameters were placed. Otherwise every device
    gets it.

    Raises:
      ValueError: the window is open, and its sums are laid out for other devices.
    """
    params = mode.place(state.params)
    like = mode.init(lambda model: model, params)
    home = arrays.home(params)
    placed_like = {
        path: (jnp.shape(x), arrays.home(x, whole=False)) for path, x in _by_path(like)
    }
    taken = {id(x) for x in jax.tree.leaves(params)}

    def place(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        if home is not None and _may_move(x, home):
            ends = (placed_like.get(path[i:]) for i in range(len(path)))
            found = [own for own in ends if own and own[0] == jnp.shape(x)]
            x = put(x, (found[0][1] if found else None) or home)
        return arrays.settled(x, taken)

    opt_state = state.opt_state
    if has_sums(opt_state):
        opt_state = _with_sums(opt_state, params, mode)
    opt_state, variables = (
        jax.tree_util.tree_map_with_path(place, tree)
        for tree in (opt_state, state.model_state)
    )
    params = jax.tree.map(functools.partial(arrays.settled, taken=set()), params)
    return ModelStepState(params, opt_state, variables)


def _by_path(tree: Params) -> list[tuple[jax.tree_util.KeyPath, jax.Array]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _may_move(x: jax.Array, home: jax.sharding.Sharding) -> bool:
    """Whether nobody has chosen a place for `x` among the devices of the model."""
    is_shape = isinstance(x, jax.ShapeDtypeStruct)
    if not is_shape and not trees.is_array(x):
        return False
    if x.sharding is None if is_shape else not x.committed:
        return True
    is_spread = not x.sharding.is_fully_replicated
    return isinstance(home, NamedSharding) and not (
        isinstance(x.sharding, NamedSharding) and is_spread
    )


def check_laid_out(state: ModelStepState, mode: Mode) -> None:
    """Raises `ValueError` for sums that only `laid_out` can bring into place."""
    if not has_sums(state.opt_state):
        return
    sums = jax.tree.leaves(state.opt_state.acc_grads)
    params = jax.tree.leaves(state.params)
    if [*map(jnp.shape, sums)] != [
        (*mode.layout().leading_axes, *jnp.shape(p)) for p in params
    ]:
        raise ValueError(
            "Inside of a jit, and with shapes in the place of arrays, the optimizer's "
            "sums must be laid out already: got sums of shapes "
            f"{[jnp.shape(x) for x in sums][:3]} for {mode.num_devices} devices. Call "
            "step.init(model, optimizer) before, outside of the jit."
        )


def _with_sums(
    opt_state: TokenAccumulationState,
    params: Params,
    mode: Mode,
) -> TokenAccumulationState:
    """The state with sums laid out for the devices of a step."""
    shapes = [
        (*mode.layout().leading_axes, *jnp.shape(p)) for p in jax.tree.leaves(params)
    ]
    sums = jax.tree.leaves(opt_state.acc_grads)
    is_laid_out = [jnp.shape(x) for x in sums] == shapes
    if is_laid_out and not mode.data_axes:
        return opt_state
    mini_step = opt_state.mini_step
    is_open = trees.is_array(mini_step) and int(mini_step) > 0
    if not is_laid_out and is_open:
        raise ValueError(
            "The window must be closed before its sums are laid out for other devices: "
            f"got {int(mini_step)} micro-batches in it, and sums of shapes "
            f"{[jnp.shape(x) for x in sums][:3]}, where {shapes[:3]} are needed. Call "
            "close_window of the step that began the window, or restore the checkpoint "
            "after step.init."
        )
    dtypes = jax.tree.map(jnp.result_type, opt_state.acc_grads)
    laid_out = mode.layout().zeros(params, dtypes)
    if is_open:
        laid_out = jax.tree.map(
            lambda x, zeros: jax.device_put(x, zeros.sharding),
            opt_state.acc_grads,
            laid_out,
        )
    return opt_state._replace(acc_grads=laid_out)
