"""What a `loss_fn` is: its arguments and results, the model's state, keys."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, keystr, tree_leaves_with_path
from jax.typing import ArrayLike

from optax_tokenaccum._accumulation import Accumulation, Added
from optax_tokenaccum._devices import Devices, Shardings
from optax_tokenaccum._jaxprs import Trace, changed_paths, collectives
from optax_tokenaccum._per_device_loss import per_device_loss
from optax_tokenaccum._perturbations import Perturbations, Traced
from optax_tokenaccum._shard_batch import Inputs, MicroBatch
from optax_tokenaccum._state import TokenAccumulationState
from optax_tokenaccum._trees import (
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


class LossFn(Protocol):
    """`loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`.

    With `has_aux` it returns `(loss_sum, (num_tokens, aux))`. With `has_model_state` it
    is `loss_fn(params, model_state, batch, **kwargs) -> (returned, model_state)`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


# Leaves of the model's state that a loss changed, by their index.
Changes = dict[int, jax.Array]


@jax.tree_util.register_pytree_with_keys_class
class Keywords(dict[str, Tree]):
    """Keywords of a loss, as an argument of a jitted function.

    Of a keyword whose leaves are not all numbers, arrays alone are traced. Other leaves
    are static: part of the tree's structure.
    """

    def __init__(self, given: Mapping[str, Tree], static: Iterable[int] | None = None):
        super().__init__(given)
        self._leaves, self._structure = jax.tree.flatten(dict(given))
        # Known from the beginning: jax also makes such trees of shardings.
        self.static = {*(_static_leaves(given) if static is None else static)}

    def tree_flatten(self) -> tuple[list[Leaf], Any]:
        kept = ((i, self._leaves[i]) for i in sorted(self.static))
        static = tuple((i, type(x), x) for i, x in kept)
        traced = [x for i, x in enumerate(self._leaves) if i not in self.static]
        return traced, (self._structure, static)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Leaf]], Any]:
        traced, static = self.tree_flatten()
        named = enumerate(tree_leaves_with_path(dict(self)))
        paths = [path for i, (path, _) in named if i not in self.static]
        keys = [DictKey(keystr(path, simple=True, separator="/")) for path in paths]
        return [*zip(keys, traced, strict=True)], static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Iterable[Leaf]) -> "Keywords":
        structure, kept = static
        leaves = [*children]
        for i, _, x in kept:
            leaves.insert(i, x)
        return cls(structure.unflatten(leaves), [i for i, *_ in kept])


def _static_leaves(given: Mapping[str, Tree]) -> Iterator[int]:
    start = 0
    for name in sorted(given):  # as jax orders them
        leaves = jax.tree.leaves(given[name])
        is_mixed = not all(map(_is_number, leaves))
        for i, x in enumerate(leaves if is_mixed else (), start):
            is_scalar = isinstance(x, int | float | complex | np.generic)
            if _is_number(x) and not is_scalar:
                continue
            if type(x).__hash__ is None:
                raise TypeError(
                    "A keyword of loss_fn that is neither an array nor a number is "
                    f"static, and must be hashable: got a {type(x).__name__} in "
                    f"{name!r}. Freeze it, or pass its parts."
                )
            yield i
        start += len(leaves)


def keywords(given: dict[str, Tree]) -> dict[str, Tree]:
    """`given` for a jitted function, without Python code to flatten it if possible."""
    made = Keywords(given)
    return made if made.static else given


def _is_number(x: Leaf) -> bool:
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSTUMm":
        if x.ndim:
            raise TypeError(
                "Arrays in the keywords of loss_fn must hold numbers: got a NumPy "
                f"array of dtype {x.dtype}. Pass strings as a tuple, which is static: "
                "tuple(array.tolist())."
            )
        return False
    is_array = hasattr(x, "dtype") and not isinstance(x, type)  # as jnp.bfloat16 is
    return is_array or type(x) in (int, float, complex)


@dataclass(frozen=True)
class Loss:
    """A checked `loss_fn`, whether or not the model has a state."""

    loss_fn: LossFn
    has_aux: bool
    has_model_state: bool = False

    def __call__(
        self, params: Params, inputs: Inputs
    ) -> tuple[jax.Array, tuple[ArrayLike, tuple[Aux, Changes]]]:
        """`(loss_sum, (num_tokens, (aux, changes of the model state)))`."""
        model_state, batch, rng, loss_kwargs = inputs
        key = {} if rng is None else {"rng": rng}
        given = Keywords(loss_kwargs)

        def run(given: Keywords) -> tuple[Keywords, Tree]:
            # A loss may assign to the containers that it is given, but not to objects.
            own = (jax.tree.map(lambda x: x, model_state),) * self.has_model_state
            objects, containers = jax.tree.flatten(
                dict(given), is_leaf=lambda x: not isinstance(x, dict | list | tuple)
            )
            returned = self.loss_fn(params, *own, batch, **given, **key)
            return Keywords(containers.unflatten(objects), given.static), returned

        before = jax.tree.map(lambda x: x, given)
        after, returned = run(given)
        if changed := changed_paths(lambda x: run(x)[0], before, after):
            raise ValueError(
                "What loss_fn or summary_fn is given as a keyword must not change, "
                "because the change would be lost, and each micro-batch see the same "
                f"value: got a change at {changed[0]}. Keep nnx.Rngs in the model, or "
                "make them of rng=key in the loss; return what metrics need as aux, "
                "and update them after the call."
            )
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
    opt_state: TokenAccumulationState,
    micro_batch: MicroBatch,
    params: Params,
    model_state: ModelState,
    shardings: Shardings = None,
) -> Added:
    """Differentiates the loss of a micro-batch, and adds it to the open window.

    A skipped micro-batch leaves no trace, neither in the sums nor in the model state.
    """
    dtype = opt_state.acc_tokens.dtype
    loss, devices = setup.loss, setup.devices

    def of_rows(params: Params, inputs: Inputs) -> Any:
        loss_sum, (num_tokens, rest) = loss(params, inputs)
        return loss_sum, (as_num_tokens(num_tokens, dtype), rest)

    if devices.device_axis:
        perturbed_loss = per_device_loss(
            of_rows, devices, params, micro_batch, model_state
        )
    else:
        traced = Traced(of_rows, params, micro_batch.inputs(model_state))
        check_own_map(traced.closed, params)
        n = traced.alone(1).value()

        def perturbed_loss(perturbations: Perturbations) -> Any:
            loss_sum, (_, rest) = traced.perturbed(perturbations, n)
            return loss_sum, (n, rest)

    flat, are_spread, stack = devices.flatten_device_axis(
        opt_state.grad_sums, params, shardings
    )
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
    for i, new in changed.items():
        new = new if new.dtype == leaves[i].dtype else new.astype(leaves[i].dtype)
        leaves[i] = jnp.where(added.skipped, leaves[i], new)
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
            f"In a shard_map, {name} must return both the loss and num_tokens reduced, "
            "jax.lax.psum(..., axis_name), where devices share parameters or it reads "
            f"from other devices: got values that may differ along {sorted(wrong)}. "
            "For the results of each device alone, differentiate with respect to "
            'jax.lax.pcast(params, axis_name, to="varying"), and read from no other; '
            "a loss that does needs check_vma=True."
        )


def unpack(
    returned: Tree, has_aux: bool, rule: str | None = None
) -> tuple[jax.Array, ArrayLike, Aux]:
    """Checked `loss_sum, num_tokens, aux`; errors begin with `rule`."""
    form = "(loss_sum, (num_tokens, aux))" if has_aux else "(loss_sum, num_tokens)"
    rule = rule or (
        f"With has_aux={has_aux}, loss_fn must return {form}, loss_sum summed over "
        "tokens, never divided"
    )
    loss_sum: Leaf = None
    num_tokens: Leaf = None
    aux, hint = None, ""
    match has_aux, returned:
        case True, [loss_sum, [num_tokens, aux]]:
            pass
        case False, [_, [_, _]] | [_, _, _]:
            hint = (
                " For (loss_sum, (num_tokens, aux)), pass has_aux=True; check_loss_fn "
                "and audit take a loss_fn without aux."
            )
        case False, [loss_sum, num_tokens]:
            pass
    if not jax.tree_util.all_leaves([num_tokens]):  # `None` and containers are none
        raise TypeError(f"{rule}: got {describe(returned)}.{hint}")
    loss_sum = jnp.asarray(loss_sum)
    if loss_sum.shape != () or not jnp.issubdtype(loss_sum.dtype, jnp.floating):
        raise ValueError(
            f"{rule}: got a loss_sum of dtype {loss_sum.dtype} and shape "
            f"{loss_sum.shape}, not a floating scalar."
        )
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
