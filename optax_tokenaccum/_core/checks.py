"""Checks of arguments, with errors that state what is required."""

import itertools
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Gradients, Params, T, Tree

OF_WINDOW = "num_tokens", "value", "grad"  # keywords with values of the window
# What is tried, in this order, to leave out as little as an optimizer refuses.
LEFT_OUT = [x for n in range(4) for x in itertools.combinations(OF_WINDOW, n)]
ACCUMULATES = (
    "The inner optimizer already accumulates: a micro-batch would be counted by two "
    "windows. Pass the plain optimizer."
)


def check_function(f: object, name: str) -> None:
    if not callable(f):
        raise TypeError(f"{name} must be a function: got a {type(f).__name__}.")


def as_micro_batches(micro_batches: Iterable[T]) -> list[T]:
    if isinstance(micro_batches, Mapping):
        raise TypeError("micro_batches must be a list: got a single one. Put it in [].")
    return list(micro_batches)


def as_count(count: Any, name: str, *, otherwise: str = "") -> int:
    """`count`, of any integer type, as an int; `otherwise` ends the rule in errors."""
    rule = f"{name} must be an integer of at least 1{otherwise}"
    try:
        given = None if isinstance(count, bool) else operator.index(count)
    except TypeError:
        given = None
    if given is None:
        raise TypeError(f"{rule}: got a {type(count).__name__}.")
    if given < 1:
        raise ValueError(f"{rule}: got {given}.")
    return given


def as_inner_optimizer(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner`, whose `update` is given the window's keywords only if it takes them."""
    if not hasattr(inner, "update"):
        raise TypeError(
            "The inner optimizer must be one of optax, such as optax.adamw(1e-3): got "
            f"a {type(inner).__name__}."
        )
    if isinstance(getattr(inner.update, "__self__", None), optax.MultiSteps):
        raise ValueError(ACCUMULATES)
    given = optax.with_extra_args_support(inner)
    accepts: dict[frozenset[str], list[tuple[str, ...]]] = {}

    def update(
        updates: Gradients, state: Tree, params: Params | None = None, **extra: Any
    ) -> Any:
        # `optax.chain` and the like give every keyword to all their members, and a
        # member may refuse one. Which ones to leave out is found by trying, once for
        # each set of keywords. If nothing helps, the first error is raised.
        first: TypeError | None = None
        for left_out in accepts.get(frozenset(extra), LEFT_OUT):
            kept = {k: x for k, x in extra.items() if k not in left_out}
            try:
                result = given.update(updates, state, params, **kept)
            except TypeError as error:
                first = first or error
            else:
                accepts[frozenset(extra)] = [left_out]
                return result
        assert first is not None
        raise first

    return optax.GradientTransformationExtraArgs(given.init, update)


def check_params(params: Params) -> None:
    """Raises, naming the leaf, if a parameter cannot be trained by its gradient."""
    check_nnx_variables(params)
    for path, leaf in trees.named_leaves(params):
        if "_overwrite_with_gradient" in path:
            raise ValueError(
                f"Scales of 8-bit floats cannot be summed: got {path}. Overwrite them "
                "yourself, with the maximum over the window."
            )
        if not trees.is_number(leaf):
            got = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(
                f"Parameters must be arrays of numbers: at {path} got {got}. Leave it "
                "out (equinox.partition), and give it to loss_fn as a keyword."
            )


def check_trains(params: Params, is_read: list[bool]) -> None:
    """Raises `ValueError` if the loss reads no parameter that can be trained.

    `is_read` is of the parameters, and of other arguments after them.
    """
    can_train = [*map(trees.is_float, jax.tree.leaves(params))]
    pairs = zip(can_train, is_read, strict=False)
    if any(can_train) and not any(x and y for x, y in pairs):
        raise ValueError(
            "No parameter reaches loss_sum, so nothing would be trained. Are the "
            "results swapped (return loss_sum, num_tokens)? Does loss_fn close over a "
            "model, in place of using the one that it is given? Are these the "
            "parameters of another model?"
        )


def check_num_tokens(
    num_tokens: ArrayLike | None, gradients: Gradients, others: Iterable[str]
) -> None:
    """Raises if a count is missing or, as types tell, that of one device.

    `others` are the other keywords of the call, for the error.
    """
    if num_tokens is None:
        given = f" next to the keywords {sorted(others)}" if others else ""
        raise TypeError(
            "update() needs num_tokens, the number of loss tokens (or the sum of "
            f"weights) behind these gradients: got None{given}. Write "
            "optimizer.update(grads, state, params, num_tokens=n). If you did, a "
            "wrapper dropped it: optax.lookahead and others that take no keywords need "
            "with_num_tokens(tx, n); flax's linen TrainState is replaced by that of "
            "optax_tokenaccum.linen; put optax.chain inside, MultiSteps(optax.chain("
            "clip, inner), k)."
        )
    if trees.is_concrete(num_tokens):
        return
    for path, leaf in trees.named_leaves(gradients):
        axes = sorted(trees.varying_axes(num_tokens) - trees.varying_axes(leaf))
        if axes and not trees.is_float0(leaf):
            raise ValueError(
                "num_tokens must be that of all devices: at "
                f"{path} got a gradient that is the same along {axes}, and a count "
                "that differs. Differentiate the mean loss with respect to "
                "jax.lax.pcast(params, axis, to='varying'), and write total = "
                "jax.lax.psum(n, axis), grads = jax.tree.map(lambda g: jax.lax.psum("
                "g * n, axis) / total, grads), num_tokens=total."
            )


def check_nnx_variables(params: Params) -> None:
    """Raises `TypeError`, naming the variable, if only NNX can treat it rightly."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:  # then no variable can be among the parameters
        return

    def is_module(x: Any) -> bool:
        return isinstance(x, nnx.Module)

    # To jax, a variable that a model holds twice is two leaves, and statistics are
    # leaves like parameters. Outside of a model, a `State` may hold variables of the
    # user's own types: they were selected by type.
    untrained = nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState
    if any(map(is_module, jax.tree.leaves(params, is_leaf=is_module))):
        untrained = (nnx.Variable,)
    seen: set[int] = set()
    for path, x in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        is_trained = isinstance(x, nnx.Param) or not isinstance(x, untrained)
        if isinstance(x, nnx.Variable) and (id(x) in seen or not is_trained):
            again = " again" * (id(x) in seen)
            raise TypeError(
                "Parameters must be variables that are trained, each once: at "
                f"{jax.tree_util.keystr(path)} got a {type(x).__name__}{again}. Give "
                "an NNX model to the functions of optax_tokenaccum.nnx."
            )
        seen.add(id(x))
