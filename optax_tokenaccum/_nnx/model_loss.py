"""The loss of an NNX model as a function of its parameters and its other variables."""

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from optax_tokenaccum._core.dependence import forwarded
from optax_tokenaccum._core.loss import LossFn, unpack
from optax_tokenaccum._core.trees import Batch, Params

# The place of a variable in a model, and what it holds.
Path = tuple[Hashable, ...]
Value = optax.Params
Leaf = nnx.Variable | jax.Array


class Model:
    """What a model is besides its arrays. Compared by identity: see `Models`."""

    def __init__(self, graphdef: nnx.GraphDef, params: nnx.State, rest: nnx.State):
        """From the parts that `nnx.split` returns, with variables in their places."""
        self.graphdef = graphdef
        self._params, self._rest = map(jax.tree.structure, (params, rest))
        place_of = {id(x): i for i, x in enumerate(leaves_of(rest))}
        self.place_of = {
            path: place_of[id(leaf)] for path, leaf in nnx.to_flat_state(rest)
        }
        places = sorted(self.place_of, key=lambda path: self.place_of[path])
        self.names = ["/".join(map(str, path)) for path in places]

    def merged(self, params: Params, values: list[Value]) -> nnx.Module:
        """A copy of the model, whose variables belong to the current trace."""
        rest = jax.tree.unflatten(self._rest, jax.tree.leaves(values))
        return nnx.merge(self.graphdef, self.state_of(params), rest)

    def state_of(self, params: Params) -> nnx.State:
        """Arrays like the parameters, in variables like theirs."""
        return jax.tree.unflatten(self._params, jax.tree.leaves(params))


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Variables:
    """A model's arrays that are not trained, as the model state of the plain steps.

    Attributes:
      values: a tree of arrays for each variable.
      model: the rest of the model, which is static.
    """

    values: list[Value]
    model: Model

    def tree_flatten_with_keys(
        self,
    ) -> tuple[list[tuple[jax.tree_util.GetAttrKey, Value]], Model]:
        names = map(jax.tree_util.GetAttrKey, self.model.names)
        return [*zip(names, self.values, strict=True)], self.model

    @classmethod
    def tree_unflatten(cls, model: Model, values: Iterable[Value]) -> "Variables":
        return cls([*values], model)


class Models:
    """One `Model` for all equal ones, so that `jit` compares them by identity."""

    def __init__(self) -> None:
        self._known: list[tuple[nnx.GraphDef, Any, Model]] = []

    def of(
        self, graphdef: nnx.GraphDef, states: list[nnx.State], structures: Any
    ) -> Model:
        """The model that `nnx.split` split; `structures` tell how it did."""
        # Compared, not hashed: a model may hold a list.
        for known, its_structures, model in self._known:
            if structures == its_structures and graphdef == known:
                return model
        model = Model(graphdef, *states)
        self._known.append((graphdef, structures, model))
        return model


class AuxAndVariables(NamedTuple):
    """The `aux` of a loss, and the variables that it added or gave another shape."""

    aux: Any
    variables: nnx.State | None


@dataclass(frozen=True)
class ModelLoss:
    """`loss_fn(model, batch)` as a loss of the core, with a model state.

    If `may_restructure`, it always returns an `aux`, with `AuxAndVariables`. Otherwise
    new variables and other shapes raise `ValueError`.
    """

    loss_fn: LossFn
    has_aux: bool
    may_restructure: bool

    def __call__(
        self, params: Params, variables: Variables, batch: Batch, **loss_kwargs: Any
    ) -> tuple[Any, Variables]:
        model, values = variables.model, [*variables.values]

        def run(params: Params, values: list[Value]) -> tuple[Any, ...]:
            copy = model.merged(params, values)
            before = dict(nnx.to_flat_state(nnx.state(copy)))
            before = {path: value_of(leaf) for path, leaf in before.items()}
            returned = self.loss_fn(copy, batch, **loss_kwargs)
            return returned, before, dict(nnx.to_flat_state(nnx.state(copy)))

        returned, before, after = run(params, variables.values)
        removed = before.keys() - after.keys()
        rewritten = {
            path
            for path in before.keys() & after.keys()
            if not _are_same(value_of(after[path]), before[path])
        }
        if any(
            path not in model.place_of or isinstance(after[path], nnx.Param)
            for path in rewritten
        ):  # nnx.remat and nnx.jit write the parameters back, mostly as they were
            rewritten -= _as_before(run, rewritten, params, variables.values)
        others, assigned = {}, []
        for path, leaf in after.items():
            if path in before and path not in rewritten:
                continue
            place = model.place_of.get(path)
            if path in before and place is None:
                assigned.append(path)
            elif place is not None and _shapes(value_of(leaf)) == _shapes(before[path]):
                values[place] = value_of(leaf)
            else:
                others[path] = leaf
        _refuse(
            assigned,
            "loss_fn must not assign parameters, which only a closing window changes",
            "Call a copy of the model, nnx.clone(model), and update the model's other "
            "variables from it; nnx.SpectralNorm and nnx.WeightNorm need this too.",
        )
        _refuse(
            removed if self.may_restructure else {*removed, *others},
            "loss_fn must keep the model's variables and their shapes; on one device, "
            "in a train step without should_skip_update_fn, it may add some",
            "Return such values as aux, or take them out in loss_fn with nnx.pop.",
        )
        if self.may_restructure:
            loss_sum, (num_tokens, aux) = unpack(returned, self.has_aux)
            state = nnx.from_flat_state(list(others.items())) if others else None
            returned = loss_sum, (num_tokens, AuxAndVariables(aux, state))
        return returned, Variables(values, model)


def _as_before(
    run: Callable[..., tuple[Any, ...]], paths: Collection[Path], *args: Any
) -> set[Path]:
    """Those of the variables at `paths` that end `run` with the values they had."""

    def values(*args: Any) -> list[tuple[list[jax.Array], list[jax.Array]]]:
        _, before, after = run(*args)
        return [
            (jax.tree.leaves(before[path]), jax.tree.leaves(value_of(after[path])))
            for path in paths
        ]

    traced, shapes = jax.make_jaxpr(values, return_shape=True)(*args)
    inputs = jax.tree.unflatten(jax.tree.structure(shapes), forwarded(traced))
    pairs = zip(paths, inputs, strict=True)
    return {path for path, (old, new) in pairs if old == new and None not in old}


def _refuse(paths: Collection[Path], rule: str, advice: str) -> None:
    if paths:
        names = sorted("/".join(map(str, path)) for path in paths)
        raise ValueError(f"{rule}: got a change at {', '.join(names)}. {advice}")


def leaves_of(tree: nnx.State) -> list[Leaf]:
    """The variables in `tree`, and the arrays that are in none."""
    return jax.tree.leaves(tree, is_leaf=is_variable)


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def value_of(leaf: Leaf) -> Value:
    """The raw value of a variable: `variable[...]` would call its `get_value`."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _are_same(x: Value, y: Value) -> bool:
    leaves, others = jax.tree.leaves(x), jax.tree.leaves(y)
    return len(leaves) == len(others) and all(map(lambda a, b: a is b, leaves, others))


def _shapes(value: Value) -> tuple[Hashable, list[tuple[int, ...]]]:
    return jax.tree.structure(value), [jnp.shape(x) for x in jax.tree.leaves(value)]
