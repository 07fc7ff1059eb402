"""An NNX model and its optimizer, read as the state of a step, and written back."""

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from optax_tokenaccum._core.checks import check_function
from optax_tokenaccum._core.donation import strong_and_unaliased
from optax_tokenaccum._core.jaxprs import changed_paths
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import (
    Batch,
    Leaf,
    ModelState,
    OptState,
    Params,
    Tree,
    check_same_tree,
    is_concrete,
)
from optax_tokenaccum._devices.mesh import put
from optax_tokenaccum._steps.loss_fn import LossFn
from optax_tokenaccum._steps.state import StepState
from optax_tokenaccum._steps.step import Step, shapes_of


def _is_place(x: Leaf) -> bool:
    return x is None or isinstance(x, nnx.Variable)


def _values(tree: Tree) -> Tree:
    """A tree with the values of its variables, each of which may be a tree itself."""

    def value(x: Leaf) -> Tree:
        # `variable[...]` would call the variable's own `get_value`.
        return x.get_raw_value() if isinstance(x, nnx.Variable) else x

    return jax.tree.map(value, tree, is_leaf=_is_place)


@dataclass(frozen=True)
class Static:
    """What a model is besides its arrays."""

    graphdef: nnx.GraphDef
    structure: PyTreeDef  # of its two states, in which variables are nodes
    wrt: nnx.filterlib.Filter

    def states_of(self, params: Params, rest: ModelState) -> list[nnx.State]:
        """Arrays like those of the model, in variables like its own."""
        return self.structure.unflatten(jax.tree.leaves((params, rest)))


@jax.tree_util.register_dataclass
@dataclass
class ModelVariables:
    """The values of variables that are not trained, and what else a model is."""

    variables: Tree
    static: Static = field(metadata={"static": True})

    def key_counts(self) -> set[int]:
        """The leaves that count the keys of `nnx.Rngs`."""
        structure = self.static.structure
        _, rest = structure.unflatten(range(structure.num_leaves))
        variables = jax.tree.leaves(rest, is_leaf=_is_place)
        found = {x.get_raw_value() for x in variables if isinstance(x, nnx.RngCount)}
        first = structure.num_leaves - len(jax.tree.leaves(rest))
        return {i - first for i in found}


@dataclass(eq=False, repr=False)
class SplitModel:
    """A model, and its optimizer if there is one, as the state of a step."""

    static: Static
    places: list[Leaf]  # of each array its variable; or `None`, or an array
    structure: PyTreeDef  # of a `StepState` of places

    def __post_init__(self) -> None:
        places = [*enumerate(self.places)]
        self.variables = [(i, x) for i, x in places if isinstance(x, nnx.Variable)]
        # The arrays of the model that are in no variable.
        self.loose_arrays = [x for x in self.places if not _is_place(x)]

    def leaves(self) -> list[Tree]:
        """The values, each of which may be a tree itself."""
        values = [*self.places]
        for i, variable in self.variables:
            values[i] = variable.get_raw_value()
        return values

    def state(self) -> StepState:
        return self.structure.unflatten(self.leaves())

    def write(self, model: nnx.Module, state: StepState) -> None:
        values = self.structure.flatten_up_to(state)
        for i, variable in self.variables:
            if variable.get_raw_value() is not values[i]:
                variable.set_raw_value(values[i])
        if self.loose_arrays:
            states = self.static.states_of(state.params, state.model_state)
            nnx.update(model, *states)


def split_model(
    model: nnx.Module, wrt: nnx.filterlib.Filter, opt_state: OptState = ()
) -> SplitModel:
    graphdef, *states = nnx.split(model, wrt, ...)
    params, rest = states
    if not jax.tree.leaves(params):
        raise ValueError(f"wrt must match variables of the model: got none, {wrt!r}.")
    static = Static(graphdef, jax.tree.structure(states), wrt)
    state = StepState(params, opt_state, ModelVariables(rest, static))
    return SplitModel(static, *jax.tree.flatten(state, is_leaf=_is_place))


class Graph:
    """A model and its optimizer as they were split.

    To split them takes Flax milliseconds, more than a small step; to see that each of
    their containers still holds the same objects takes a fraction of one.
    """

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer, split: SplitModel):
        self.split = split
        # Not the model: who holds a graph does not keep alive what it is of.
        self._optimizer = vars(optimizer)
        nodes = {id(x): x for _, x in nnx.iter_graph((model, optimizer))}
        containers = map(_container, nodes.values())
        self._containers = [x for x in containers if x is not None]
        of_model = [x for _, x in nnx.iter_graph(model)]
        self._variables = [x for x in of_model if isinstance(x, nnx.Variable)]
        self._contents = self._read()
        self._types = [*map(type, split.leaves())]

    def is_static(self) -> bool:
        """Whether all that changes in place is arrays, each in a variable."""
        values = self.split.leaves()
        is_plain = all(isinstance(x, jax.Array) and is_concrete(x) for x in values)
        return is_plain and not self.split.loose_arrays

    def is_unchanged(self, optimizer: nnx.Optimizer) -> bool:
        keys, values = self._contents
        keys_now, values_now = self._read()
        return (
            vars(optimizer) is self._optimizer
            and keys_now == keys
            and all(map(operator.is_, values_now, values))
            and [*map(type, self.split.leaves())] == self._types
        )

    def _read(self) -> tuple[list[Any], list[Any]]:
        """The keys of each container, and what all of them hold."""
        found = [*self._containers, *(x.get_metadata() for x in self._variables)]
        found = [dict(enumerate(x)) if isinstance(x, list) else x for x in found]
        return [*map(list, found)], [*chain.from_iterable(x.values() for x in found)]


def _container(x: Any) -> Any:
    """Where `x` holds other objects. Not in a static value, which is hashed."""
    if isinstance(x, dict | list):
        return x
    is_node = isinstance(x, nnx.State | nnx.Pytree) or not isinstance(x, Hashable)
    return vars(x) if is_node and hasattr(x, "__dict__") else None


def of_parts(f: LossFn, name: str = "loss_fn", runs_twice: bool = False) -> LossFn:
    """`f(model, batch)` as a function of parameters and a model state."""
    check_function(f, name)
    rule = (
        f"{name} must keep the model's variables and their shapes, and return other "
        "values as aux, or take them out with nnx.pop"
    )

    def of_parts(
        params: Params, rest: ModelVariables, batch: Batch, /, **kwargs: Tree
    ) -> tuple[Tree, ModelVariables]:
        static = rest.static

        def run(
            params: Params, variables: Tree
        ) -> tuple[Params, tuple[Tree, ModelVariables]]:
            # A copy of the model, whose variables belong to the current trace.
            states = static.states_of(params, variables)
            model = nnx.merge(static.graphdef, *states)
            own = jax.tree.map(lambda x: x, kwargs)  # f may assign to containers
            returned = f(model, batch, **own)
            _, *states = nnx.split(model, static.wrt, ...)
            after, variables_after = _values(states)
            check_same_tree(after, params, rule)
            check_same_tree(variables_after, variables, rule)
            return after, (returned, ModelVariables(variables_after, static))

        after, returned = run(params, rest.variables)
        changed = changed_paths(lambda x: run(x, rest.variables)[0], params, after)
        if changed:
            raise ValueError(
                f"{name} must not assign parameters: got a change at "
                f"{', '.join(changed)}. Call a copy, nnx.clone(model), and update the "
                "model's other variables from it (nnx.SpectralNorm, nnx.WeightNorm)."
            )
        if runs_twice:
            _, state = static.states_of(params, rest)
            variables = {"/".join(map(str, p)): x for p, x in nnx.to_flat_state(state)}
            keys = {p for p, x in variables.items() if isinstance(x, nnx.RngState)}
            changed = changed_paths(
                lambda x: run(params, x)[1][1].variables,
                rest.variables,
                returned[1].variables,
            )
            if names := [x for x in changed if x not in keys]:
                raise ValueError(
                    f"{name} runs twice, and must change no variables but keys: got a "
                    f"change at {', '.join(names)}. Return such values in the summary; "
                    "call nnx.BatchNorm with use_running_average=True."
                )
        return returned

    return of_parts


def place_state(step: Step, state: StepState, taken: set[int]) -> StepState:
    """Moves the state's arrays to the shardings that `step.init` would give.

    With a mesh, this moves the arrays that are not on it yet. Without one, it moves
    those that were never placed. Arrays with an id in `taken` are copied.
    """
    state = state._replace(params=step.setup.devices.place(state.params))
    opt_state = state.opt_state
    like = step.init(*shapes_of((state.params, state.model_state)))

    def sum_of(x: Leaf, like: jax.ShapeDtypeStruct) -> Leaf:
        if isinstance(x, jax.ShapeDtypeStruct):
            return like
        is_kept = jnp.shape(x) == like.shape or opt_state.mini_step > 0
        return x if is_kept else jnp.zeros(like.shape, x.dtype, device=like.sharding)

    def place(x: Leaf, like: jax.ShapeDtypeStruct) -> Leaf:
        is_chosen = getattr(x, "committed", True)
        old, new = getattr(x, "sharding", None) if is_chosen else None, like.sharding
        is_spread = isinstance(old, NamedSharding) and not old.is_fully_replicated
        is_free = old is None or (isinstance(new, NamedSharding) and not is_spread)
        x = strong_and_unaliased(
            x, taken
        )  # before it moves: `device_put` may share its buffer
        return put(x, new) if is_free and new is not None else x

    if isinstance(opt_state, TokenAccumulationState):
        sums = jax.tree.map(sum_of, opt_state.grad_sums, like.opt_state.grad_sums)
        state = state._replace(opt_state=opt_state._replace(grad_sums=sums))
    rule = (
        "The optimizer must be of this model, nnx.Optimizer(model, tx, wrt=...), and "
        "its open window laid out for the devices of this step (call close_window of "
        "the step that began it, or restore the checkpoint after step.init)"
    )
    check_same_tree(state, like, rule)
    return jax.tree.map(place, state, like)
