"""Checks of arguments, with errors that state what is required."""

import inspect
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum._core.trees import (
    Gradients,
    OptState,
    Params,
    check_same_tree,
    is_concrete,
    named_leaves,
)


def check_function(f: Any, name: str) -> None:
    """Raises `TypeError` unless `f` can be called."""
    if not callable(f):
        raise TypeError(f"{name} must be a function: got {f!r}.")


def as_inner_optimizer(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps any optax optimizer so that its `update` accepts `value`."""
    if callable(getattr(inner, "init", None)) and callable(
        getattr(inner, "update", None)
    ):
        inner = optax.with_extra_args_support(inner)
        return inner if _takes_value(inner.update) else _without_value(inner)
    hint = (
        " Call it, for example optax.adamw(learning_rate)." if callable(inner) else ""
    )
    raise TypeError(
        "The inner optimizer must be an optax optimizer with init and update: got "
        f"{inner!r}.{hint}"
    )


def _takes_value(update: Any) -> bool:
    parameters = inspect.signature(update).parameters
    return "value" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _without_value(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Drops `value` for an optimizer that rejects it, such as `optax.contrib.sam`."""

    def update(
        updates: Gradients,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        **extra: Any,
    ) -> Any:
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def as_count(count: Any, name: str, *, least: int = 1, otherwise: str = "") -> int:
    """Converts `count`, of any integer type, to an int.

    Error messages state the rule for `name` and end that rule with `otherwise`.

    Raises:
      TypeError: `count` is not an integer.
      ValueError: `count` is below `least`.
    """
    rule = f"{name} must be an integer of at least {least}{otherwise}"
    try:
        if isinstance(count, bool):
            raise TypeError
        given = operator.index(count)
    except TypeError:
        raise TypeError(
            f"{rule}: got {count!r} of type {type(count).__name__}."
        ) from None
    if given < least:
        raise ValueError(f"{rule}: got {given}.")
    return given


def as_num_tokens(
    num_tokens: Any, name: str = "num_tokens", dtype: Any = jnp.float32
) -> jax.Array:
    """Converts the weight of a micro-batch to a scalar of `dtype`.

    Error messages call the weight `name`.

    Raises:
      TypeError: `num_tokens` is missing or not a real number.
      ValueError: `num_tokens` is not a scalar, or is concrete and negative or not
        finite.
    """
    if num_tokens is None:
        raise TypeError(
            "update() needs num_tokens, the number of loss tokens (or the sum of "
            "weights) behind these gradients: got None. Write optimizer.update(grads, "
            "state, params, num_tokens=n). If you did, something in between dropped "
            "it: a wrapper that is a plain optax.GradientTransformation (use "
            "GradientTransformationExtraArgs), optax.chain or the like around a "
            "MultiSteps (give it MultiSteps(...).gradient_transformation()), or flax's "
            "linen TrainState (use optax_tokenaccum.linen.TrainState)."
        )
    return _as_real_scalar(num_tokens, name, dtype, non_negative=True)


def as_value(value: Any, dtype: Any) -> jax.Array:
    """Converts the loss of a micro-batch to a scalar of `dtype`."""
    return _as_real_scalar(value, "value", dtype)


def _as_real_scalar(
    x: Any, name: str, dtype: Any, *, non_negative: bool = False
) -> jax.Array:
    try:
        given = jnp.result_type(x)
    except TypeError:
        given = None
    if given is None or not (
        jnp.issubdtype(given, jnp.integer) or jnp.issubdtype(given, jnp.floating)
    ):
        raise TypeError(
            f"{name} must be a real number: got {given or type(x).__name__}."
        )
    if jnp.shape(x) != ():
        raise ValueError(
            f"{name} must be a scalar, one number for the whole micro-batch: got shape "
            f"{jnp.shape(x)}. Sum it over the micro-batch first."
        )
    if non_negative and is_concrete(x):
        # Use NumPy: inside a trace, jnp would trace the comparison of a known array.
        with np.errstate(over="ignore"):
            number = np.asarray(x).astype(dtype)
        if not (np.isfinite(number) and number >= 0):
            raise ValueError(
                f"{name} must be finite, in {jnp.dtype(dtype)}, and at least 0: got "
                f"{x}."
            )
    return jnp.asarray(x, dtype)


def check_state(state: Any, kind: type, name: str = "The state") -> None:
    """Raises `TypeError` unless `state` is a `kind`."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{name} must be the {kind.__name__} that init or the last call returned: "
            f"got {type(state).__name__}. Restore a checkpoint into jax.eval_shape("
            "init, params); take a run of optax.MultiSteps over with "
            "from_multi_steps_state."
        )


def check_inner_state(inner: Any, inner_opt_state: OptState, params: Params) -> None:
    """Raises `ValueError` if the inner state belongs to another optimizer.

    optax accepts any state for an optimizer that has none, such as SGD. Only tree
    structures are compared, because a state may hold shards inside `shard_map`.
    """
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


def check_alive(tree: Any) -> None:
    """Raises `ValueError` if a leaf of `tree`, a part of a state, was donated."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if any(is_concrete(x) and x.is_deleted() for x in leaves):
        raise ValueError(
            "The state must not have been given to an earlier call: its buffers were "
            "donated to that call and are gone. Continue with the state that it "
            "returned, or build the step with donate=False to keep old ones."
        )


def check_are_numbers(params: Params) -> None:
    """Raises `TypeError`, naming the leaf, if a parameter is a random key."""
    for path, leaf in named_leaves(params):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
            raise TypeError(
                f"Parameters must be arrays of numbers: at {path} got {leaf.dtype}. "
                "Hand a random key to a train step as rng=, or to loss_fn as a keyword."
            )


def as_skip_decision(should_skip: Any) -> jax.Array:
    """Checks the decision of a skip function, its first return value.

    Raises:
      ValueError: the decision is not a bool scalar.
    """
    should_skip = jnp.asarray(should_skip)
    if (should_skip.dtype, should_skip.shape) != (jnp.bool_, ()):
        raise ValueError(
            "should_skip_update_fn must return (a bool scalar, a tree): got "
            f"{should_skip.dtype} of shape {should_skip.shape} as the first."
        )
    return should_skip
