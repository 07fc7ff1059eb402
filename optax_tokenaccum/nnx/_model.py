"""An NNX model and its optimizer, read as the state of a step, and written back."""

from dataclasses import dataclass, field
from typing import NamedTuple

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


class SplitModel(NamedTuple):
    """A model, and its optimizer if there is one, as the state of a step."""

    model: nnx.Module
    static: Static
    variables: StepState  # in place of each array; or `None`, or an array

    def state(self) -> StepState:
        return _values(self.variables)

    def write(self, state: StepState) -> None:
        places, structure = jax.tree.flatten(self.variables, is_leaf=_is_place)
        for place, x in zip(places, structure.flatten_up_to(state), strict=True):
            if isinstance(place, nnx.Variable) and place.get_raw_value() is not x:
                place.set_raw_value(x)
        if self.loose_arrays():
            states = self.static.states_of(state.params, state.model_state)
            nnx.update(self.model, *states)

    def loose_arrays(self) -> list[Leaf]:
        """The arrays of the model that are in no variable."""
        leaves = jax.tree.leaves(self.variables.model_state, is_leaf=_is_place)
        return [x for x in leaves if not _is_place(x)]


def split_model(
    model: nnx.Module, wrt: nnx.filterlib.Filter, opt_state: OptState = ()
) -> SplitModel:
    """Splits the model, whose structure may change from call to call."""
    graphdef, *states = nnx.split(model, wrt, ...)
    params, rest = states
    if not jax.tree.leaves(params):
        raise ValueError(f"wrt must match variables of the model: got none, {wrt!r}.")
    static = Static(graphdef, jax.tree.structure(states), wrt)
    variables = ModelVariables(rest, static)
    return SplitModel(model, static, StepState(params, opt_state, variables))


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
