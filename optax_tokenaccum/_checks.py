"""Checks of arguments, with errors that state what is required."""

import inspect
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_tokenaccum._trees import (
    Gradients,
    OptState,
    Params,
    T,
    Tree,
    check_same_tree,
    named_leaves,
)


def check_function(f: object, name: str) -> None:
    if not callable(f):
        raise TypeError(f"{name} must be a function: got {f!r}.")


def as_micro_batches(micro_batches: Iterable[T]) -> list[T]:
    if isinstance(micro_batches, Mapping):
        raise TypeError(
            "micro_batches must be a sequence of micro-batches: got a "
            f"{type(micro_batches).__name__}. Put a single micro-batch into a list."
        )
    return list(micro_batches)


def as_count(count: Any, name: str, *, least: int = 1, otherwise: str = "") -> int:
    """`count`, of any integer type, as an int; `otherwise` ends the rule in errors."""
    rule = f"{name} must be an integer of at least {least}{otherwise}"
    try:
        given = None if isinstance(count, bool) else operator.index(count)
    except TypeError:
        given = None
    if given is None:
        raise TypeError(f"{rule}: got {count!r} of type {type(count).__name__}.")
    if given < least:
        raise ValueError(f"{rule}: got {given}.")
    return given


def as_inner_optimizer(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps any optax optimizer so that `update` drops arguments it does not know."""
    if not all(callable(getattr(inner, name, None)) for name in ("init", "update")):
        raise TypeError(
            "The inner optimizer must be an optax optimizer with init and update, such "
            f"as optax.adamw(learning_rate): got {type(inner).__name__}."
        )
    inner = optax.with_extra_args_support(inner)
    parameters = inspect.signature(inner.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return inner

    def update(
        updates: Gradients, state: Tree, params: Params | None = None, **extra: Any
    ) -> Any:
        unknown = {"value", "num_tokens"} - parameters.keys()
        known = {name: x for name, x in extra.items() if name not in unknown}
        return inner.update(updates, state, params, **known)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def check_inner_state(
    inner: optax.GradientTransformation, inner_opt_state: OptState, params: Params
) -> None:
    """Raises `ValueError` if the inner state belongs to another optimizer."""
    try:
        expected = jax.eval_shape(inner.init, params)
    except Exception:  # `init` reads values, so there is no structure to compare
        return
    if jax.tree.structure(inner_opt_state) == jax.tree.structure(expected):
        return
    check_same_tree(
        inner_opt_state,
        expected,
        "The inner optimizer's state must come from its own init (keep the optimizer "
        "that wrote the checkpoint, or begin with a new state)",
    )


def check_params(params: Params) -> None:
    """Raises, naming the leaf, if a parameter cannot be trained by its gradient."""
    check_nnx_variables(params)
    for path, leaf in named_leaves(params):
        if "_overwrite_with_gradient" in path:
            raise ValueError(
                "Scales of 8-bit floats cannot be summed: got the collection "
                "'_overwrite_with_gradient'. Keep it out of the optimizer's "
                "parameters, and overwrite it yourself with the maximum over the "
                "window."
            )
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
            raise TypeError(
                f"Parameters must be arrays of numbers: at {path} got {leaf.dtype}. "
                "Hand a random key to a train step as rng=, or to loss_fn as a keyword."
            )


def check_state(state: Tree, kind: type, name: str = "The state") -> None:
    if not isinstance(state, kind):
        raise TypeError(
            f"{name} must be the {kind.__name__} that init or the last call returned: "
            f"got {type(state).__name__}. Restore a checkpoint into jax.eval_shape("
            "init, params); take a run of optax.MultiSteps over with "
            "from_multi_steps_state."
        )


def check_nnx_variables(params: Params) -> None:
    """Raises `TypeError`, naming the variable, if only NNX can treat it rightly.

    To jax, a variable that a model holds twice is two leaves, and statistics are leaves
    like parameters. Outside of a model, a `State` may hold variables of the user's own
    types: they were selected by type.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:  # then no variable can be among the parameters
        return

    def is_module(x: Any) -> bool:
        return isinstance(x, nnx.Module)

    untrained = nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState
    if any(map(is_module, jax.tree.leaves(params, is_leaf=is_module))):
        untrained = (nnx.Variable,)
    first_paths: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        if not isinstance(leaf, nnx.Variable):
            continue
        name, kind = jax.tree_util.keystr(path), type(leaf).__name__
        first = first_paths.setdefault(id(leaf), name)
        if first != name:
            got = f"the variable of {first} again, which would become a second one"
        elif isinstance(leaf, untrained) and not isinstance(leaf, nnx.Param):
            got = f"a variable of type {kind}, which the optimizer would update"
        else:
            continue
        raise TypeError(
            "Parameters must be variables that are trained, each once: at "
            f"{name} got {got}. Give an NNX model to "
            "the functions of optax_tokenaccum.nnx."
        )
