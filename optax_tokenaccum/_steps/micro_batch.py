"""What a `loss_fn` is: its arguments and results, the model's state, keys."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_tokenaccum._core.accumulation import Accumulation, Added
from optax_tokenaccum._core.backward import zero_perturbations
from optax_tokenaccum._core.checks import check_trains
from optax_tokenaccum._core.jaxprs import Trace, collectives
from optax_tokenaccum._core.perturbations import LossJaxpr
from optax_tokenaccum._core.state import TokenAccumulationState
from optax_tokenaccum._core.trees import (
    Aux,
    Leaf,
    ModelState,
    Params,
    Tree,
    as_num_tokens,
    check_same_tree,
    is_key,
    named_leaves,
    types_are_marked,
    varying_axes,
)
from optax_tokenaccum._devices.batch import MicroBatch
from optax_tokenaccum._devices.mesh import Devices, Shardings
from optax_tokenaccum._devices.per_device_loss import per_device_loss


class LossFn(Protocol):
    """`loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`.

    With `has_aux` it returns `(loss_sum, (num_tokens, aux))`. With `has_model_state` it
    is `loss_fn(params, model_state, batch, **kwargs) -> (returned, model_state)`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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
        """`(loss_sum, (num_tokens, (aux, changes of the model state)))`."""
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


@dataclass(eq=False, repr=False)
class Setup:
    """What is accumulated, and how: the same for each micro-batch of a run."""

    loss: Loss
    accumulation: Accumulation
    devices: Devices


def add_micro_batch(
    setup: Setup,
    params: Params,
    model_state: ModelState,
    opt_state: TokenAccumulationState,
    micro_batch: MicroBatch,
    shardings: Shardings = None,
) -> Added:
    """Differentiates the loss of a micro-batch, and adds it to the open window.

    A skipped micro-batch leaves no trace, neither in the sums nor in the model state,
    except that keys move on: its noise is not drawn again.
    """
    dtype = opt_state.acc_tokens.dtype
    loss, devices = setup.loss, setup.devices

    def of_rows(params: Params, *given: Any) -> Any:
        loss_sum, (num_tokens, rest) = loss(params, *given)
        return loss_sum, (as_num_tokens(num_tokens, dtype), rest)

    flat, are_spread, stack = devices.flatten_device_axis(
        opt_state.grad_sums, params, shardings
    )
    if devices.device_axis:
        perturbations = zero_perturbations(*map(jax.tree.leaves, (flat, params)))
        perturbed_loss = per_device_loss(
            of_rows, devices, params, model_state, micro_batch, perturbations
        )
    else:
        traced = LossJaxpr(of_rows, params, model_state, micro_batch)
        check_own_map(traced.closed, params)
        check_trains(params, traced.reads(0))
        perturbed_loss = traced.perturbed(traced.pruned(1).value())
    added = setup.accumulation.add_loss(
        perturbed_loss,
        opt_state._replace(grad_sums=flat),
        params,
        are_spread,
        reduce_over_devices=lambda gradients: devices.reduce_over_devices(
            stack(gradients), shardings
        ),
    )
    aux, changed = added.aux
    opt_state = added.opt_state._replace(grad_sums=stack(added.opt_state.grad_sums))
    leaves, structure = jax.tree.flatten(model_state)
    counts = getattr(model_state, "key_counts", tuple)()
    for i, new in changed.items():
        old = leaves[i]
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        is_kept = not is_key(old) and i not in counts
        leaves[i] = jnp.where(added.skipped, old, new) if is_kept else new
    return Added(opt_state, added.skipped, aux, structure.unflatten(leaves))


def check_own_map(traced: Trace, like: Params, *, is_loss: bool = True) -> None:
    """Raises if results must be reduced in a `shard_map` of the caller's own.

    The gradient of a parameter that devices share is a sum over them, and so is that of
    a loss that reads from other devices.

    Args:
      traced: the trace of a function that returns `loss_sum, num_tokens` and more.
      like: the parameters, or gradients of them.
      is_loss: whether the function is differentiated, so that without types nothing
        tells whether what it reads from other devices gets its gradient.
    """
    axes = {*jax.sharding.get_abstract_mesh().manual_axes}
    if not axes:
        return
    sent = {name for _, names in collectives(traced) for name in names} & axes
    wrong: Iterable[str] = sent if is_loss else ()
    if types_are_marked():
        differs = [varying_axes(x) for x in traced.out_avals[:2]]
        own = [varying_axes(x) for x in jax.tree.leaves(like)]
        shared = {name for name in axes if not all(name in x for x in own)}
        wrong = frozenset().union(*differs) & (shared | sent)
    if wrong:
        name = "loss_fn" if is_loss else "value_and_grad_fn"
        raise ValueError(
            f"In a shard_map, {name} must return both the loss and num_tokens reduced "
            "(jax.lax.psum), where devices share parameters or it reads from others: "
            f"got values that may differ along {sorted(wrong)}. For results of each "
            'device, give it jax.lax.pcast(params, axis_name, to="varying"); a loss '
            "that reads from others needs check_vma=True."
        )


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
    if hasattr(returned, "shape"):
        return f"{returned.dtype}{list(returned.shape)}"
    return type(returned).__name__


def _changes(old: Tree, new: Tree) -> Changes:
    """Leaves of `new` that differ from `old`; raises if tree, shape or kind does."""
    rule = (
        "loss_fn must return the model state with the tree, shapes and kinds of "
        "numbers that it was given"
    )
    check_same_tree(new, old, rule)
    changed: Changes = {}
    pairs = zip(named_leaves(old), jax.tree.leaves(new), strict=True)
    for i, ((path, x), y) in enumerate(pairs):
        if y is x:
            continue
        got, kept = jnp.result_type(y), jnp.result_type(x)
        if _kind(got) > _kind(kept) or is_key(y) != is_key(x):
            raise ValueError(f"{rule}: at {path} expected {kept}, got {got}.")
        changed[i] = jnp.asarray(y)
    return changed


def _kind(dtype: jax.typing.DTypeLike) -> int:
    """Rank in bool < integer < float < complex."""
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
    return sum(jnp.issubdtype(dtype, kind) * i for i, kind in enumerate(kinds))
