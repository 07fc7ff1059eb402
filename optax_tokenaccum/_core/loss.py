"""The arguments and the return value of `loss_fn`, and what comes of them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_tokenaccum._core.trees import Batch, M, P


class LossFn(Protocol):
    """`loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens)`.

    With `has_aux` it returns `(loss_sum, (num_tokens, aux))`. With `has_model_state` it
    is `loss_fn(params, model_state, batch, **kwargs) -> (returned, model_state)`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Loss:
    """A loss in one form, whether or not the model has a state.

    Attributes:
      call: `call(params, model_state, batch, **loss_kwargs) -> (returned,
        model_state)`, where `returned` is what a `LossFn` returns.
      has_aux: the form of `returned`.
      has_model_state: whether the model has a state; otherwise it is `None`.
    """

    call: Callable[..., tuple[Any, Any]]
    has_aux: bool
    has_model_state: bool = False


class MicroBatch(NamedTuple):
    """What a loss is given besides parameters and model state.

    Of a whole window, it holds the rows of all micro-batches, `[k, micro, ...]`.
    """

    rows: Batch  # over a mesh, until it is mapped: `SpreadRows`
    rng: jax.Array | None  # one key for all devices, if there is one
    loss_kwargs: Mapping[str, Any]

    def at(self, *position: int | jax.Array) -> "MicroBatch":
        """With the key of the micro-batch at `position` in a run or a window."""
        if self.rng is None:
            return self
        return self._replace(
            rng=functools.reduce(jax.random.fold_in, position, self.rng)
        )


class Output(NamedTuple):
    """What micro-batches, or the close of a window, leave behind."""

    state: Any  # the state, or the part of it that changed
    same: Any  # values that are the same on all devices
    aux: Any = None  # each device's own


def make_loss(loss_fn: LossFn, has_aux: bool, has_model_state: bool = False) -> Loss:
    call = _with_model_state if has_model_state else _without_model_state
    return Loss(functools.partial(call, loss_fn), has_aux, has_model_state)


def _without_model_state(
    loss_fn: LossFn, params: P, model_state: M, batch: Batch, **loss_kwargs: Any
) -> tuple[Any, M]:
    return loss_fn(params, batch, **loss_kwargs), model_state


def _with_model_state(
    loss_fn: LossFn, params: P, model_state: M, batch: Batch, **loss_kwargs: Any
) -> tuple[Any, M]:
    # A loss may assign to the containers that it is given.
    own = jax.tree.map(lambda x: x, model_state)
    returned = loss_fn(params, own, batch, **loss_kwargs)
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], tuple | list | dict):
        raise TypeError(
            "With has_model_state=True, loss_fn must return ((loss_sum, num_tokens), "
            f"model_state): got {_describe(returned)}."
        )
    return returned[0], returned[1]


def unpack(
    returned: Any, has_aux: bool, rule: str | None = None
) -> tuple[jax.Array, tuple[ArrayLike, Any]]:
    """Checked `(loss_sum, (num_tokens, aux))`; `aux` is `None` without `has_aux`.

    Errors begin with `rule`, by default that of a `loss_fn`.
    """
    form = "(loss_sum, (num_tokens, aux))" if has_aux else "(loss_sum, num_tokens)"
    rule = rule or (
        f"loss_fn must return {form}, loss_sum summed over tokens, never divided"
    )
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        advice = ""
        if not has_aux and isinstance(returned, tuple | list) and len(returned) == 3:
            advice = " With has_aux=True, return (loss_sum, (num_tokens, aux))."
        raise TypeError(f"{rule}: got {_describe(returned)}.{advice}")
    loss_sum, num_tokens = returned
    aux = None
    if has_aux:
        if not isinstance(num_tokens, tuple | list) or len(num_tokens) != 2:
            raise TypeError(f"{rule}: got {_describe(returned)}.")
        num_tokens, aux = num_tokens
    elif isinstance(num_tokens, tuple | list | dict):
        raise TypeError(f"{rule}: got {_describe(returned)}. Is has_aux=True missing?")
    if num_tokens is None:
        raise TypeError(f"{rule}: got None for num_tokens.")
    loss_sum = jnp.asarray(loss_sum)
    if loss_sum.shape != () or not jnp.issubdtype(loss_sum.dtype, jnp.floating):
        raise ValueError(
            f"{rule}: got a loss_sum of dtype {loss_sum.dtype} and shape "
            f"{loss_sum.shape}, not a floating scalar."
        )
    return loss_sum, (num_tokens, aux)


def _describe(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        return "(" + ", ".join(map(_describe, returned)) + ")"
    if hasattr(returned, "shape"):
        return f"{returned.dtype}{list(returned.shape)}"
    return type(returned).__name__
