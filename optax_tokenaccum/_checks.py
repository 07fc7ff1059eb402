"""Checks of arguments, with errors that state what is required."""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_tokenaccum._trees import (
    Gradients,
    OptState,
    Params,
    T,
    Tree,
    check_same_tree,
    is_concrete,
    is_float0,
    named_leaves,
    varying_axes,
)

OF_WINDOW = ("num_tokens", "value")  # keywords that the inner optimizer is given
ACCUMULATES = (
    "The inner optimizer already accumulates: a micro-batch would be counted by two "
    "windows. Pass the plain optimizer."
)


def check_function(f: object, name: str) -> None:
    if not callable(f):
        raise TypeError(f"{name} must be a function: got a {type(f).__name__}.")


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
    """`inner`, whose `update` is given `num_tokens` and `value` only if it takes them.

    `optax.chain` and the like give every keyword to all their members, and a member may
    refuse one. Which ones is found out by trying, once for each set of keywords.
    """
    if not all(callable(getattr(inner, name, None)) for name in ("init", "update")):
        raise TypeError(
            "The inner optimizer must be an optax optimizer with init and update, such "
            f"as optax.adamw(learning_rate): got {type(inner).__name__}."
        )
    if isinstance(getattr(inner.update, "__self__", None), optax.MultiSteps):
        raise ValueError(ACCUMULATES)
    given = optax.with_extra_args_support(inner)
    refused: dict[frozenset[str], Iterable[str]] = {}

    def update(
        updates: Gradients, state: Tree, params: Params | None = None, **extra: Any
    ) -> Any:
        run = functools.partial(given.update, updates, state, params)
        names = frozenset(extra)
        if names not in refused:
            try:  # first, because most optimizers refuse nothing: one trace
                return run(**extra)
            except TypeError as error:
                refused[names] = _refused(run, extra, error)
        return run(**{k: x for k, x in extra.items() if k not in refused[names]})

    return optax.GradientTransformationExtraArgs(given.init, update)


def _refused(
    run: Callable[..., Any], extra: dict[str, Any], error: TypeError | None
) -> Iterable[str]:
    """The keywords among `num_tokens` and `value` that `run` does not accept.

    `error` is what `run(**extra)` raised. If it has a different cause, it is raised
    again.
    """
    refused: dict[str, str] = {}
    while error is not None:
        message = str(error).partition(" Did you mean")[0]  # newer Python
        named = [name for name in OF_WINDOW if f"'{name}'" in message]
        if "unexpected keyword argument" in message.lower():
            new = [name for name in named if name in extra]
            refused |= dict.fromkeys(new, message)
            needed = [name for name in new if _is_parameter(name, run)]
        else:
            new, needed = [], [name for name in named if name in refused]
        if needed:
            name = needed[0]
            raise TypeError(
                f"All transformations of a chain must accept {name}, because one of "
                f"them uses it: got one that does not, {refused[name]}. Put in its "
                "place one that drops it: optax.GradientTransformationExtraArgs"
                f"(tx.init, lambda updates, state, params=None, *, {name}=None, "
                "**extra: tx.update(updates, state, params, **extra))."
            ) from error
        if not new:
            raise error
        extra = {name: x for name, x in extra.items() if name not in new}
        try:
            jax.eval_shape(functools.partial(run, **extra))
            error = None
        except TypeError as another:
            error = another
    return refused


def _is_parameter(name: str, f: Any) -> bool:
    """Whether `f`, or an update function in its closures, has a parameter `name`."""
    found, seen = [f], set()
    while found:
        f = found.pop()
        if id(f) in seen:
            continue
        seen.add(id(f))
        if isinstance(f, functools.partial):
            found.append(f.func)
        elif isinstance(f, Mapping):
            found += f.values()
        elif isinstance(f, tuple | list):
            found += f
        elif inspect.isfunction(f) or inspect.ismethod(f):
            if name in [*inspect.signature(f).parameters][3:]:  # updates, state, params
                return True
            found += inspect.getclosurevars(f).nonlocals.values()
    return False


def check_inner_state(
    inner: optax.GradientTransformation, inner_opt_state: OptState, params: Params
) -> None:
    """Raises `ValueError` if the inner state belongs to a different optimizer."""
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
        if not hasattr(leaf, "dtype"):
            if isinstance(leaf, complex | Real):
                continue
            raise TypeError(
                f"Parameters must be arrays or numbers: at {path} got "
                f"{type(leaf).__name__}. Keep other leaves out of them, with "
                "equinox.partition for example."
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"Parameters must be arrays of numbers: at {path} got {leaf.dtype}. "
                "Hand a random key to a train step as rng=, or to loss_fn as a keyword."
            )


def check_num_tokens(
    num_tokens: ArrayLike | None, gradients: Gradients, others: Iterable[str]
) -> ArrayLike:
    """The count, if it is there and, as types tell, that of the gradients' devices.

    `others` are the other keywords of the call, for the error.
    """
    if num_tokens is None:
        given = f" next to the keywords {sorted(others)}" if others else ""
        raise TypeError(
            "update() needs num_tokens, the number of loss tokens (or the sum of "
            f"weights) behind these gradients: got None{given}. Write "
            "optimizer.update(grads, state, params, num_tokens=n). If you did, "
            "something in between dropped it: a wrapper whose update has three "
            "arguments, such as optax.lookahead(tx, 5, 0.5) (build it where n is "
            "known, as optax.lookahead(with_num_tokens(tx, n), 5, 0.5)); a wrapper "
            "that is a plain optax.GradientTransformation (use "
            "GradientTransformationExtraArgs); optax.chain or the like around a "
            "MultiSteps (give it MultiSteps(...).gradient_transformation()); or "
            "flax's linen TrainState (use optax_tokenaccum.linen.TrainState)."
        )
    if is_concrete(num_tokens):
        return num_tokens
    for path, leaf in named_leaves(gradients):
        axes = sorted(varying_axes(num_tokens) - varying_axes(leaf))
        if axes and not is_float0(leaf):
            raise ValueError(
                "num_tokens must count the tokens of all devices over which the "
                f"gradients were reduced: at {path} got a gradient that is the same "
                f"along {axes}, and a count that differs. Differentiate the mean loss "
                "with respect to jax.lax.pcast(params, axis, to='varying'), because "
                "JAX itself sums gradients of parameters that devices share. Then "
                "write total = jax.lax.psum(n, axis), grads = jax.tree.map(lambda g: "
                "jax.lax.psum(g * n, axis) / total, grads), and num_tokens=total."
            )
    return num_tokens


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
