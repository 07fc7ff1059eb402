"""What a `loss_fn` is: its arguments and results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.trees import Aux, Leaf, ModelState, Params, Tree
from optax_tokenaccum._devices.batch import MicroBatch

# `loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`; with `has_aux`,
# `(loss_sum, (num_tokens, aux))`. With `has_model_state` it is `loss_fn(params,
# model_state, batch, **kwargs) -> (returned, model_state)`.
LossFn = Callable[..., Any]
# Leaves of the model's state that a loss changed, by their index.
Changes = dict[int, jax.Array]


@dataclass(frozen=True)
class Loss:
    """A checked `loss_fn`, whether or not the model has a state."""

    loss_fn: LossFn
    has_aux: bool
    has_model_state: bool = False

    def __call__(
        self, params: Params, model_state: ModelState, micro_batch: MicroBatch
    ) -> tuple[jax.Array, tuple[ArrayLike, tuple[Aux, Changes]]]:
        key = {} if micro_batch.rng is None else {"rng": micro_batch.rng}
        keywords = micro_batch.loss_kwargs.build() | key
        # A loss may assign to the containers that it is given.
        own = (jax.tree.map(lambda x: x, model_state),) * self.has_model_state
        returned = self.loss_fn(params, *own, micro_batch.batch, **keywords)
        changes: Changes = {}
        if self.has_model_state:
            match returned:
                case [[_, _] as values, new]:
                    returned, changes = values, _changes(model_state, new)
                case _:
                    raise TypeError(
                        "With has_model_state=True, loss_fn must return ((loss_sum, "
                        f"num_tokens), model_state): got {describe(returned)}."
                    )
        loss_sum, num_tokens, aux = unpack(returned, self.has_aux)
        return loss_sum, (num_tokens, (aux, changes))


def unpack(
    returned: Tree, has_aux: bool, rule: str | None = None
) -> tuple[jax.Array, ArrayLike, Aux]:
    """Checked `loss_sum, num_tokens, aux`; errors begin with `rule`."""
    form = "(loss_sum, (num_tokens, aux))" if has_aux else "(loss_sum, num_tokens)"
    rule = rule or f"With has_aux={has_aux}, loss_fn must return {form}"
    loss_sum: Leaf = None
    num_tokens: Leaf = None
    aux, hint = None, ""
    match has_aux, returned:
        case True, [loss_sum, [num_tokens, aux]]:
            pass
        case False, [_, [_, _]] | [_, _, _]:
            hint = " For (loss_sum, (num_tokens, aux)), pass has_aux=True."
        case False, [loss_sum, num_tokens]:
            pass
    if not jax.tree_util.all_leaves([num_tokens]):  # `None` and containers are none
        raise TypeError(f"{rule}: got {describe(returned)}.{hint}")
    loss_sum = jnp.asarray(loss_sum)
    if loss_sum.shape != () or not jnp.issubdtype(loss_sum.dtype, jnp.floating):
        raise ValueError(f"{rule}: got {describe(loss_sum)} as the loss_sum.")
    return loss_sum, num_tokens, aux


def describe(returned: Tree) -> str:
    if isinstance(returned, tuple | list):
        return "(" + ", ".join(map(describe, returned)) + ")"
    is_leaf = jax.tree_util.all_leaves([returned])  # a Haliax NamedArray is none
    if is_leaf and hasattr(returned, "shape"):
        return f"{returned.dtype}{list(returned.shape)}"
    return type(returned).__name__


def _changes(old: Tree, new: Tree) -> Changes:
    """Leaves of `new` that differ from `old`; raises if tree, shape or kind does."""
    rule = (
        "loss_fn must return the model state with the tree, shapes and kinds of "
        "numbers that it was given"
    )
    trees.check_same_tree(new, old, rule)
    changed: Changes = {}
    pairs = zip(trees.named_leaves(old), jax.tree.leaves(new), strict=True)
    for i, ((path, x), y) in enumerate(pairs):
        if y is x:
            continue
        got, kept = jnp.result_type(y), jnp.result_type(x)
        if _kind(got) > _kind(kept) or trees.is_key(y) != trees.is_key(x):
            raise ValueError(f"{rule}: at {path} expected {kept}, got {got}.")
        changed[i] = jnp.asarray(y)
    return changed


def _kind(dtype: jax.typing.DTypeLike) -> int:
    """Rank in bool < integer < float < complex."""
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
    return sum(jnp.issubdtype(dtype, kind) * i for i, kind in enumerate(kinds))
