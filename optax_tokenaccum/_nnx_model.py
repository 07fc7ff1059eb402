"""An NNX model and its optimizer, read as the state of a step, and written back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, Literal
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef, keystr, tree_leaves_with_path

from optax_tokenaccum._devices import put
from optax_tokenaccum._loss import LossFn
from optax_tokenaccum._scans import functions_in, opened
from optax_tokenaccum._state import ModelStepState, settled
from optax_tokenaccum._step import Step, shapes_of
from optax_tokenaccum._trees import (
    Aux,
    Batch,
    Leaf,
    ModelState,
    OptState,
    Params,
    Tree,
    check_same_tree,
)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


class Places(NamedTuple):
    """The variables of a tree; what each holds may be a tree of arrays itself."""

    leaves: list[Leaf]  # variables, and arrays that are in none
    structure: PyTreeDef

    def tree(self) -> Tree:
        """The tree with the values of its variables."""
        # `variable[...]` would call the variable's own `get_value`.
        values = [x.get_raw_value() if _is_variable(x) else x for x in self.leaves]
        return self.structure.unflatten(values)

    def write(self, tree: Tree) -> None:
        values = self.structure.flatten_up_to(tree)
        for leaf, x in zip(self.leaves, values, strict=True):
            if _is_variable(leaf) and leaf.get_raw_value() is not x:
                leaf.set_raw_value(x)


def places_of(tree: Tree) -> Places:
    return Places(*jax.tree.flatten(tree, is_leaf=_is_variable))


@dataclass(frozen=True)
class Static:
    """What a model is besides its arrays."""

    graphdef: nnx.GraphDef
    params: PyTreeDef
    rest: PyTreeDef
    wrt: nnx.filterlib.Filter

    def state_of(self, params: Params) -> nnx.State:
        """Arrays like the parameters, in variables like theirs."""
        return self.params.unflatten(jax.tree.leaves(params))

    def merged(self, params: Params, rest: ModelState) -> nnx.Module:
        """A copy of the model, whose variables belong to the current trace."""
        rest = self.rest.unflatten(jax.tree.leaves(rest))
        return nnx.merge(self.graphdef, self.state_of(params), rest)


class Opened(NamedTuple):
    """The places of a model's arrays, those that are trained and the rest.

    And those of its optimizer, if there is one.
    """

    model: nnx.Module
    static: Static
    params: Places
    rest: Places
    opt_state: Places

    def state(self) -> ModelStepState:
        params, rest = self.params.tree(), self.rest.tree()
        return ModelStepState(params, self.opt_state.tree(), rest)

    def write(self, state: ModelStepState) -> None:
        self.params.write(state.params)
        self.opt_state.write(state.opt_state)
        self.write_rest(state.model_state)

    def write_rest(self, rest: ModelState) -> None:
        self.rest.write(rest)
        if self.loose_arrays():
            given = self.rest.structure.unflatten(self.rest.leaves)
            loose = {p for p, x in nnx.to_flat_state(given) if not _is_variable(x)}
            new = [(p, x) for p, x in nnx.to_flat_state(rest) if p in loose]
            nnx.update(self.model, nnx.from_flat_state(new))

    def loose_arrays(self) -> list[Leaf]:
        """The arrays that are in no variable."""
        return [x for x in self.rest.leaves if not _is_variable(x)]


def open_model(
    model: nnx.Module, wrt: nnx.filterlib.Filter, opt_state: OptState = ()
) -> Opened:
    """Splits the model, whose structure may change from call to call."""
    graphdef, params, rest = nnx.split(model, wrt, ...)
    if not jax.tree.leaves(params):
        raise ValueError(
            "wrt of the optimizer or of this function must match some variables of the "
            f"model: got none for wrt={wrt!r}."
        )
    structures = jax.tree.structure(params), jax.tree.structure(rest)
    static = Static(graphdef, *structures, wrt)
    return Opened(model, static, *map(places_of, (params, rest, opt_state)))


def loss_of_model(loss_fn: LossFn, name: str = "loss_fn") -> LossFn:
    """`loss_fn(model, batch)` as a loss of parameters and a model state."""

    def run(
        params: Params, rest: ModelState, batch: Batch, static: Static, kwargs: Any
    ) -> Any:
        model = static.merged(params, rest)
        before = _shapes(model)
        returned = loss_fn(model, batch, **kwargs)
        after = _shapes(model)
        changed = {x for x in before.keys() | after if before.get(x) != after.get(x)}
        if changed:
            names = sorted("/".join(map(str, path)) for path in changed)
            raise ValueError(
                f"{name} must keep the model's variables and their shapes: got a "
                f"change at {', '.join(names)}. Return such values as aux, or take "
                f"them out in {name} with nnx.pop."
            )
        _, params, rest = nnx.split(model, static.wrt, ...)
        return returned, places_of(params).tree(), places_of(rest).tree()

    def loss(
        params: Params,
        rest: ModelState,
        batch: Batch,
        /,
        *,
        nnx_static: Static,
        **kwargs: Any,
    ) -> tuple[Tree, Aux]:
        returned, after, rest_after = run(params, rest, batch, nnx_static, kwargs)
        names = _changed(
            lambda given: run(given, rest, batch, nnx_static, kwargs)[1], params, after
        )
        if names:
            raise ValueError(
                f"{name} must not assign parameters, which only a closing window "
                f"changes: got a change at {', '.join(names)}. Call a copy of the "
                "model, nnx.clone(model), and update the model's other variables "
                "from it; nnx.SpectralNorm and nnx.WeightNorm need this too."
            )
        return returned, rest_after

    return loss


def summary_of_model(summary_fn: LossFn) -> LossFn:
    """The same of a function that runs twice, and may change nothing but keys."""
    of_parts = loss_of_model(summary_fn, "summary_fn")

    def summary(
        params: Params, rest: ModelState, /, *args: Any, **kwargs: Any
    ) -> tuple[Tree, ModelState]:
        def after(given: ModelState) -> ModelState:
            return of_parts(params, given, *args, **kwargs)[1]

        summary, rest_after = of_parts(params, rest, *args, **kwargs)
        state = kwargs["nnx_static"].rest.unflatten(jax.tree.leaves(rest))
        variables = {"/".join(map(str, p)): x for p, x in nnx.to_flat_state(state)}
        keys = {p for p, x in variables.items() if isinstance(x, nnx.RngState)}
        names = [x for x in _changed(after, rest, rest_after) if x not in keys]
        if names:
            raise ValueError(
                "summary_fn must change no variables of the model but keys, because it "
                f"runs twice: got a change at {', '.join(names)}. Return such values "
                "as aux; call nnx.BatchNorm with use_running_average=True."
            )
        return summary, rest_after

    return summary


def _changed(f: Callable[[Tree], Tree], given: Tree, returned: Tree) -> list[str]:
    """The paths of what `f` changes; `returned` is what it returned for `given`.

    nnx.remat and nnx.jit write everything back, mostly as it was.
    """
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(returned), strict=False)
    if all(x is y for x, y in pairs):
        return []
    traced = jax.make_jaxpr(f)(given)
    kept = [_source(traced.jaxpr, x) for x in traced.jaxpr.outvars]
    paths = [path for path, _ in tree_leaves_with_path(given)]
    changed = [path for i, path in enumerate(paths) if kept[i : i + 1] != [i]]
    return [keystr(path, simple=True, separator="/") for path in changed]


def _shapes(model: nnx.Module) -> dict[tuple[Any, ...], Any]:
    """The shapes of the arrays in each variable, by its path."""
    state = nnx.to_flat_state(nnx.state(model))
    return {path: jax.tree.map(jnp.shape, jax.tree.leaves(x)) for path, x in state}


def _source(jaxpr: Jaxpr, x: Any) -> int | None:
    """The index of the input that a variable is, through calls and loops."""
    made = {y: (eqn, i) for eqn in jaxpr.eqns for i, y in enumerate(eqn.outvars)}
    while not isinstance(x, Literal) and x in made:
        eqn, i = made[x]
        called = [*map(opened, functions_in(eqn))]
        if len(called) != 1 or len(called[0].invars) != len(eqn.invars):
            return None
        place = _source(called[0], called[0].outvars[i])
        if place is None:
            return None
        x = eqn.invars[place]
    inputs = [*jaxpr.invars]
    return None if isinstance(x, Literal) or x not in inputs else inputs.index(x)


def laid_out(step: Step, state: ModelStepState) -> ModelStepState:
    """The state where a step needs it: arrays placed, and sums laid out.

    Arrays that were never placed, and with a mesh those that are not spread over it,
    move where `step.init` would put them.

    Raises:
      ValueError: the window is open, and its sums are laid out for other devices.
    """
    state = state._replace(params=step.devices.place(state.params))
    like = step.init(*shapes_of((state.params, state.model_state)))
    kept = map(lambda x, y: None if x is None else y, state.opt_state, like.opt_state)
    like = like._replace(opt_state=like.opt_state._make(kept))
    mini_step, taken = state.opt_state.mini_step, set[int]()

    def sum_of(x: Leaf, like: jax.ShapeDtypeStruct) -> Leaf:
        if jnp.shape(x) == like.shape:
            return x
        is_shape = isinstance(mini_step, jax.ShapeDtypeStruct)
        if not is_shape and mini_step > 0:
            raise ValueError(
                "The window must be closed before its sums are laid out for other "
                f"devices: got {mini_step} micro-batches in it, and a sum of shape "
                f"{jnp.shape(x)}, where {like.shape} is needed. Call close_window of "
                "the step that began the window, or restore the checkpoint after "
                "step.init."
            )
        if is_shape:
            return like
        return jnp.zeros(like.shape, x.dtype, device=like.sharding)

    def place(x: Leaf, like: jax.ShapeDtypeStruct) -> Leaf:
        moves = like.sharding is not None and _may_move(x, like.sharding)
        return settled(put(x, like.sharding) if moves else x, taken)

    sums = jax.tree.map(sum_of, state.opt_state.acc_grads, like.opt_state.acc_grads)
    state = state._replace(opt_state=state.opt_state._replace(acc_grads=sums))
    rule = "The optimizer must be of this model, nnx.Optimizer(model, tx, wrt=...)"
    check_same_tree(state, like, rule)
    return jax.tree.map(place, state, like)


def _may_move(x: Leaf, where: jax.sharding.Sharding) -> bool:
    """Whether nobody has chosen a place for `x` among the devices of the model."""
    if not isinstance(x, jax.Array):
        return x.sharding is None if isinstance(x, jax.ShapeDtypeStruct) else True
    is_spread = isinstance(x.sharding, NamedSharding)
    is_spread = is_spread and not x.sharding.is_fully_replicated
    return not x.committed or (isinstance(where, NamedSharding) and not is_spread)
