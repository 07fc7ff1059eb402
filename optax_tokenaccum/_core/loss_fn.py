"""The arguments and the return value of `loss_fn`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from optax_tokenaccum._core.layout import Computed, Layout
from optax_tokenaccum._core.trees import Batch, Params
from optax_tokenaccum._core.variables import Variables

# loss_fn(params, batch, **kwargs) -> (loss_sum, num_tokens). With has_aux it returns
# (loss_sum, (num_tokens, aux)).
LossFn = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Loss:
    """A loss of parameters, and of the variables of a model that has some.

    Attributes:
      call: `call(params, variables, batch, **loss_kwargs) -> (returned, changed)`, what
        a `LossFn` returns, and the new values of variables by their index.
      has_aux: the form of `returned`.
    """

    call: Callable[..., tuple[Any, dict[int, Any]]]
    has_aux: bool


def function_loss(loss_fn: LossFn, has_aux: bool) -> Loss:
    """The loss of a function, which has no variables."""
    return Loss(functools.partial(_call, loss_fn), has_aux)


def _call(
    loss_fn: LossFn, params: Params, _: Variables, batch: Batch, **loss_kwargs: Any
) -> tuple[Any, dict[int, Any]]:
    return loss_fn(params, batch, **loss_kwargs), {}


def loss_of(
    loss: Loss,
    params: Params,
    variables: Variables,
    batch: Batch,
    loss_kwargs: dict[str, Any],
    layout: Layout,
) -> Callable[[Params], tuple[jax.Array, tuple[Any, tuple[Any, dict[int, Any]]]]]:
    """The loss of a micro-batch as a function of the parameters; checks its count.

    The function returns `(loss_sum, (num_tokens, (aux, changed)))`.
    """
    variables = variables.with_keys(layout.own_key)

    def of_params(params: Params, batch: Batch, loss_kwargs: dict[str, Any]) -> Any:
        returned, changed = loss.call(params, variables, batch, **loss_kwargs)
        loss_sum, (num_tokens, aux) = unpack(returned, loss.has_aux)
        return loss_sum, (num_tokens, (aux, changed))

    def of_rows(params: Params, batch: Batch, rng: Any) -> Computed:
        own_key = {} if rng is None else {"rng": rng}
        loss_sum, rest = of_params(params, batch, loss_kwargs | own_key)
        num_tokens, (_, changed) = rest
        whole_numbers = {
            variables.model.names[i] + jax.tree_util.keystr(path): x
            for i, value in changed.items()
            for path, x in jax.tree_util.tree_leaves_with_path(value)
            if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
        }
        return Computed({"num_tokens": num_tokens}, whole_numbers, loss_sum, rest)

    layout.check_counts(of_rows, params, batch, loss_kwargs.get("rng"))
    return lambda params: of_params(params, batch, loss_kwargs)


def key_at(
    rng: jax.Array | None, layout: Layout, *position: Any
) -> dict[str, jax.Array]:
    """The keyword `rng` for the micro-batch at `position`; empty if `rng` is `None`."""
    if rng is None:
        return {}
    for number in position:
        rng = jax.random.fold_in(rng, number)
    return {"rng": layout.own_key(rng)}


def unpack(
    returned: Any, has_aux: bool, rule: str | None = None
) -> tuple[jax.Array, tuple[Any, Any]]:
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
