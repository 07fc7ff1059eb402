"""What a step carries from call to call, and its metrics."""

import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.state import TokenAccumulationState

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
ParamsT = TypeVar("ParamsT")  # the tree of parameters


class WindowOptState(NamedTuple):
    """The `opt_state` of a window step, which has no open window between calls."""

    gradient_step: jax.Array  # shape=(), dtype=int32
    inner_opt_state: trees.OptState


class StepState(NamedTuple, Generic[ParamsT]):
    """The state that a step carries from call to call; save all of it.

    Attributes:
      params: the parameters.
      opt_state: of a train step the `TokenAccumulationState`: the open window, the
        number of updates, `gradient_step`, and the inner optimizer's state,
        `inner_opt_state`. Of a window step only these two.
      model_state: with `has_model_state=True`, as the last micro-batch left it; else
        `None`.

    A step returns the state where it found it. To have its arrays elsewhere, on other
    devices or in other shardings, use `reshard_state`.

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

    params: ParamsT
    opt_state: Any  # `TokenAccumulationState` or `WindowOptState`
    model_state: trees.ModelState = None


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
    aux: trees.Aux = None


def tag(state: StepState) -> trees.Leaf:
    """The array by whose identity the host finds what it knows about a state."""
    if isinstance(state.opt_state, TokenAccumulationState):
        return state.opt_state.mini_step
    return next(iter(jax.tree.leaves(state.params)), None)


class Memo(Generic[KeyT, ValueT]):
    """A value for each object, by identity, with a weak reference to the object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[KeyT], ValueT]] = {}

    def get(self, key: KeyT) -> ValueT | None:
        known = self._known.get(id(key))
        return known[1] if known is not None and known[0]() is key else None

    def remember(self, key: KeyT, value: ValueT) -> None:
        place = id(key)
        ref = weakref.ref(key, lambda _: self._known.pop(place, None))
        self._known[place] = (ref, value)

    def __reduce__(self) -> tuple[type["Memo[KeyT, ValueT]"], tuple[()]]:
        return Memo, ()  # another process has other objects
