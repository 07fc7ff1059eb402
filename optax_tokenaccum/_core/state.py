"""What lives between calls: the open window, the states of steps, their metrics."""

import dataclasses
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from optax_tokenaccum._core.trees import (
    Aux,
    Gradients,
    Leaf,
    ModelState,
    OptState,
    Params,
    T,
    Tree,
    is_concrete,
)

P = TypeVar("P")  # the tree of parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SkipState:
    """What `should_skip_update_fn` last returned, and how often it rejected.

    Attributes:
      of_function: its tree; `skip_state[...]` is `skip_state.of_function[...]`.
      rejected: micro-batches that the open window rejected so far.
    """

    of_function: Tree
    rejected: jax.Array  # shape=(), dtype=int32

    def __getitem__(self, key: Any) -> Tree:
        return self.of_function[key]


class TokenAccumulationState(NamedTuple):
    """State of `token_accumulation`, and of every train step as `opt_state`.

    Shapes, dtypes, weak types and placement never change after `init`, so the state
    passes through `jax.lax.scan` and a donating `jax.jit` without a second trace. One
    exception: if the optimizer has state whose shape matches no parameter, your own
    `jax.jit` over several devices needs `out_shardings` to keep the placement.

    Between windows, `grad_sums`, `acc_tokens` and `acc_value` are zeros. The token mean
    of the open window is `window_gradient(state)`.

    Attributes:
      mini_step: micro-batches accumulated so far in the open window.
      gradient_step: windows closed by an update so far.
      inner_opt_state: the state of the inner optimizer.
      grad_sums: sum of the window's gradients, with the tree and shapes of the
        parameters. Where each device keeps a separate sum, a leading axis of devices
        is added.
      acc_tokens: sum of the window's `num_tokens`.
      acc_value: sum of the window's losses; 0 if no `value` was given.
      has_updated: whether the last call closed its window with an update.
      skip_state: a `SkipState`, whose items are those of the tree that
        `should_skip_update_fn` last returned; `()` if there is no such function.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import token_accumulation
      >>> optimizer = token_accumulation(optax.sgd(1.0), every_k_schedule=2)
      >>> state = optimizer.init(jnp.zeros(()))
      >>> grad_of_sum = jnp.asarray(8.0)
      >>> _, state = optimizer.update(grad_of_sum, state, num_tokens=3)
      >>> print(state.mini_step, state.gradient_step, state.grad_sums, state.acc_tokens)
      1 0 8.0 3.0
    """

    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    inner_opt_state: OptState
    grad_sums: Gradients  # dtype=float32, or the parameter's if wider
    acc_tokens: jax.Array  # shape=(), dtype=float32, or a parameter's if wider
    acc_value: jax.Array  # shape=(), dtype=acc_tokens.dtype
    has_updated: jax.Array  # shape=(), dtype=bool
    skip_state: Tree = ()  # a `SkipState`, or `()`

    @property
    def acc_grads(self) -> Gradients:
        raise AttributeError(
            "acc_grads, in optax a running mean, is grad_sums. The token mean so far "
            "is optax_tokenaccum.window_gradient(state)."
        )


class WindowOptState(NamedTuple):
    """The `opt_state` of a window step, which has no open window between calls."""

    gradient_step: jax.Array  # shape=(), dtype=int32
    inner_opt_state: OptState


class StepState(NamedTuple, Generic[P]):
    """The state that a step carries from call to call; save all of it.

    Attributes:
      params: the parameters.
      opt_state: of a train step the `TokenAccumulationState`: the open window, the
        number of updates, `gradient_step`, and the inner optimizer's state,
        `inner_opt_state`. Of a window step only these two.
      model_state: with `has_model_state=True`, as the last micro-batch left it; else
        `None`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> step = make_train_step(loss_fn, optax.sgd(1.0), every_k_schedule=2)
      >>> state = step.init(jnp.zeros(()))
      >>> print(state.params, state.opt_state.mini_step)
      0.0 0
    """

    params: P
    opt_state: Any  # `TokenAccumulationState` or `WindowOptState`
    model_state: ModelState = None


class StepMetrics(NamedTuple):
    """The metrics of one call; their arrays stay alive when the state is donated.

    Attributes:
      loss: token mean of the loss over the window so far; 0 without tokens.
      num_tokens: tokens in the window so far, including this micro-batch.
      grad_norm: global norm of the gradient given to the optimizer; 0 without update.
      updated: whether this call closed its window with an update.
      skipped: whether this micro-batch was rejected.
      mini_step: micro-batches in the open window after the call.
      gradient_step: number of updates so far, including this call.
      aux: the `aux` that `loss_fn` returned for this micro-batch; `None` without. If
        each device sees its own rows, `[devices, ...]`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> step = make_train_step(loss_fn, optax.sgd(1.0), every_k_schedule=2)
      >>> state = step.init(jnp.ones(()))
      >>> for x in (jnp.full(1, 2.0), jnp.full(9, 10.0)):
      ...     state, m = step(state, x)
      ...     print(m.loss, m.num_tokens, m.grad_norm, m.updated, m.mini_step)
      2.0 1.0 0.0 False 1
      9.2 10.0 9.2 True 0
    """

    loss: jax.Array  # shape=(), dtype=float32, or wider where a parameter is
    num_tokens: jax.Array  # shape=(), of the same dtype
    grad_norm: jax.Array  # shape=(), of the same dtype
    updated: jax.Array  # shape=(), dtype=bool
    skipped: jax.Array  # shape=(), dtype=bool
    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    aux: Aux = None


def merged(metrics: StepMetrics, skipped: jax.Array, aux: Aux) -> StepMetrics:
    """The metrics of a window, with those of what was added last."""
    return metrics._replace(skipped=skipped, aux=aux)


def micro_batches_seen(opt_state: TokenAccumulationState) -> jax.Array:
    """How many the open window has seen, rejected ones too."""
    if isinstance(opt_state.skip_state, SkipState):
        return opt_state.mini_step + opt_state.skip_state.rejected
    return opt_state.mini_step


def tag(state: StepState) -> Leaf:
    """The array by whose identity the host finds what it knows about a state."""
    if isinstance(state.opt_state, TokenAccumulationState):
        return state.opt_state.mini_step
    return next(iter(jax.tree.leaves(state.params)), None)


def require_step_state(
    state: Tree, opt_state_type: type, *, has_model_state: bool
) -> None:
    """Raises if a step cannot take the state."""
    if not isinstance(state, StepState):
        raise TypeError(
            "The state must be the StepState that step.init or the last call "
            f"returned: got a {type(state).__name__}. Write state, metrics = step("
            "state, batch); take a checkpoint that was restored without a target over "
            "with reshard_state(state, step.init(params))."
        )
    if (state.model_state is not None) != has_model_state:
        raise TypeError(
            f"The state must be of a step with has_model_state={has_model_state}: got "
            "the state of another. Take its parts over into step.init(...)."
        )
    if not isinstance(state.opt_state, opt_state_type):
        raise TypeError(
            f"The opt_state must be a {opt_state_type.__name__}, because a train step "
            f"has sums and a window step none: got a {type(state.opt_state).__name__}. "
            "Between windows, take gradient_step and inner_opt_state over into "
            "step.init(params).opt_state."
        )
    array = tag(state)  # a call donates all arrays, so checking one is enough
    if isinstance(array, jax.Array) and is_concrete(array) and array.is_deleted():
        raise ValueError(
            "The state was given to an earlier call, which donated its buffers. Go on "
            "with the state that this call returned; if it failed while it ran, "
            "restore a checkpoint. donate=False keeps old states."
        )


class ArrayMemo(Generic[T]):
    """A value for each array, by identity, with a weak reference to the array."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[jax.Array], T]] = {}

    def get(self, array: Leaf) -> T | None:
        known = self._known.get(id(array))
        return known[1] if known is not None and known[0]() is array else None

    def remember(self, array: Leaf, value: T) -> None:
        if isinstance(array, jax.Array) and is_concrete(array):
            key = id(array)
            ref = weakref.ref(array, lambda _: self._known.pop(key, None))
            self._known[key] = (ref, value)


def canonicalize_state(params: Params, state: T) -> T:
    """`state` as strongly typed arrays on the devices of `params`, none of them twice.

    A Python number, a weak type, or a scalar on the default device while the parameters
    are elsewhere would make the second call compile again. A buffer can be donated only
    once, and the `init` of some optimizers returns an array twice.
    """
    where = scalar_sharding(params)
    taken = {id(x) for x in jax.tree.leaves(params)}

    def settle(x: Leaf) -> Leaf:
        x = strong_and_unaliased(x, taken)
        is_unplaced = isinstance(x, jax.Array) and is_concrete(x) and not x.committed
        return jax.device_put(x, where) if where and is_unplaced else x

    return jax.tree.map(settle, state)


def strong_and_unaliased(x: Leaf, taken: set[int]) -> Leaf:
    """`x`, strongly typed, copied if its id is in `taken`; adds the id to `taken`."""
    if isinstance(x, jax.ShapeDtypeStruct):  # nothing to donate
        return x
    is_taken = id(x) in taken
    taken.add(id(x))
    return jnp.array(_strong(x), copy=True) if is_taken else _strong(x)


def copy_aliased(donated: T, given: Tree) -> tuple[T, Tree]:
    """The arguments of a call, with copies where an array is there again.

    A buffer that is donated can be neither donated nor read again in the same call.
    """
    leaves = jax.tree.leaves((donated, given))
    if len({*map(id, leaves)}) == len(leaves):
        return donated, given
    seen: set[int] = set()

    def own(x: Leaf) -> Leaf:
        is_copied = id(x) in seen and isinstance(x, jax.Array) and is_concrete(x)
        seen.add(id(x))
        return jnp.array(x, copy=True) if is_copied else x

    return jax.tree.map(own, (donated, given))


def copy_for_donation(tree: T) -> T:
    """Copies every leaf: donating the copies keeps the caller's arrays alive."""
    leaves, structure = jax.tree.flatten(tree)
    # Drop each original as soon as it is copied, so that a large state is never in
    # memory twice.
    del tree
    for i, x in enumerate(leaves):
        leaves[i] = x = jnp.array(_strong(x), copy=True)
    return jax.tree.unflatten(structure, leaves)


def _strong(x: Leaf) -> Leaf:
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic):
        x = jnp.asarray(x)
    if getattr(x, "weak_type", False):
        return jax.lax.convert_element_type(x, x.dtype)
    return x


def scalar_sharding(params: Params) -> jax.sharding.Sharding | None:
    """Where scalars belong: on all devices of the first leaf that has a place."""
    for leaf in jax.tree.leaves(params):
        if not is_concrete(leaf) or not getattr(leaf, "committed", True):
            continue
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, SingleDeviceSharding):
            return sharding
    return None
