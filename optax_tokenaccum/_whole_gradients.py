"""Tells which gradients exist as a whole next to their sums."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding

from optax_tokenaccum._core import trees
from optax_tokenaccum._core.reports import collect

_numbers = itertools.count()


def whole_gradients(f: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str]:
    """The parameters whose gradients need memory next to their sums, and why.

    A backward pass of this library adds each gradient to its sum as it is made; that of
    layers that are stacked for a scan layer by layer. Where it cannot, the gradient of
    one micro-batch exists as a whole besides, which costs memory of its size. Nothing
    is compiled or run: this traces `f`. It does not tell of a scan over a part of a
    parameter, `w[:8]`, nor of a bfloat16 parameter that a scan takes as a constant.

    Args:
      f: a step; one of its halves, `step.accumulate`; or any function that calls this
        library, such as a jitted step around `window_value_and_grad`.
      *args: as for a call. Arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: as for a call.

    Returns:
      The reason by the path of each such parameter; `{}` where every gradient is added
      as it is made. In a `jit` without the `mesh` of a step, only the shardings of
      `args` tell whether the stacked axis of a parameter is spread over devices.

    Raises:
      ValueError: nothing in `f` gives this library a loss, as in a loop by hand or with
        `token_accumulation`, which receive whole gradients.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step, whole_gradients
      >>> def loss_fn(params, x):
      ...     layers = jnp.clip(params["layers"], -1, 1)  # of all layers at once
      ...     y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
      ...     return jnp.sum(y), len(x)
      >>> step = make_train_step(loss_fn, optax.sgd(0.1), 8)
      >>> state = step.init({"layers": jnp.ones((4, 16, 16))})
      >>> x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
      >>> reasons = whole_gradients(step, state, x)
      >>> print(*reasons)  # reasons["['layers']"] tells of jnp.clip
      ['layers']
    """
    step = getattr(f, "accumulate", f)  # a train step, whose halves are programs
    lower = getattr(step, "lower", None) or jax.jit(f).lower
    # What jax has traced before it would not trace again: give it another context.
    context = set_xla_metadata(whole_gradients=str(next(_numbers)))
    with context, collect() as found:
        lower(*args, **kwargs)
    if not found.has_loss:
        raise ValueError(
            "f must give this library a loss, through a step or window_value_and_grad: "
            "got a function that has none, or gets whole gradients from elsewhere."
        )
    spread = _spread(found.by_layer, trees.named_leaves((args, kwargs)))
    reason = "its stacked axis is spread over devices: spread another axis"
    return dict.fromkeys(spread, reason) | found.reasons


def _spread(
    by_layer: dict[str, tuple[int, frozenset[str]]], given: list[tuple[str, Any]]
) -> list[str]:
    """The parameters whose stacked axis is spread over devices.

    They are the first arguments with these paths; moments may have the same paths.
    """
    arguments = {_keys(path): x for path, x in given}
    for path in arguments:
        for end in range(len(path) + 1):
            own = {name: arguments.get(path[:end] + _keys(name)) for name in by_layer}
            if all(x is not None for x in own.values()):
                return [n for n, x in own.items() if _is_spread(x, *by_layer[n])]
    return []


def _keys(path: str) -> tuple[str, ...]:
    """The keys of a path; those of NNX end with the variable's own."""
    if path == "the root":
        return ()
    keys = re.findall(r"\w+", path)
    return tuple(key for key in keys if key not in ("value", "raw_value"))


def _is_spread(x: Any, axis: int, auto: frozenset[str]) -> bool:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or axis >= len(sharding.spec):
        return False
    return not auto.isdisjoint(jax.tree.leaves(sharding.spec[axis]))
