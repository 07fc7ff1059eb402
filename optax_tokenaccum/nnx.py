"""Flax NNX: a train step for a model and an `nnx.Optimizer` that accumulates."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from optax_tokenaccum import _checks
from optax_tokenaccum._add_and_close import Accumulation
from optax_tokenaccum._micro_batch import unpack
from optax_tokenaccum._step_state import StepMetrics, close_and_apply
from optax_tokenaccum._transformation import Transformation


class TrainStep:
    """What `make_train_step` returns: `step(model, optimizer, batch) -> StepMetrics`.

    Attributes:
      close_window: `close_window(model, optimizer) -> StepMetrics` closes a partial
        window with the denominator it has; an empty one changes nothing, but
        `optimizer.step` counts the call.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum import token_accumulation
      >>> from optax_tokenaccum.nnx import make_train_step
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = token_accumulation(optax.sgd(0.1), every_k_schedule=8)
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> step = make_train_step(lambda model, x: (jnp.sum(model(x)), len(x)))
      >>> print(step(model, optimizer, jnp.ones((3, 2))).updated)
      False
      >>> print(step.close_window(model, optimizer).updated)
      True
    """

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool):
        self._loss_fn = loss_fn
        self._has_aux = has_aux
        self._jitted = nnx.jit(self._program, donate_argnums=(0, 1))
        self.close_window = nnx.jit(_close_window, donate_argnums=(0, 1))

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Any
    ) -> StepMetrics:
        """Adds a micro-batch, and applies the update if the window closes with it.

        Args:
          model: updated in place, its statistics and random streams in every call.
          optimizer: updated in place.
          batch: what `loss_fn` is given.

        Raises:
          TypeError: `optimizer` is none around `token_accumulation(...)`, or `loss_fn`
            returned something else than `(loss_sum, num_tokens)`.
          ValueError: `token_accumulation` was not told when a window closes, or that
            gradients are of a mean.
        """
        return self._jitted(model, optimizer, batch)

    def _program(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Any
    ) -> StepMetrics:
        accumulation = _accumulation_of(optimizer)

        def loss_fn(model: nnx.Module, batch: Any) -> Any:
            return unpack(self._loss_fn(model, batch), self._has_aux)

        wrt = nnx.DiffState(0, optimizer.wrt)
        (loss_sum, (num_tokens, aux)), grads = nnx.value_and_grad(
            loss_fn, argnums=wrt, has_aux=True
        )(model, batch)
        params, opt_state = _arrays_of(model, optimizer)
        opt_state, skipped = accumulation.add(
            _arrays_in(nnx.state(grads)), opt_state, params, num_tokens, loss_sum
        )
        closes = accumulation.schedule.closes(
            opt_state.mini_step, opt_state.acc_tokens, opt_state.gradient_step
        )
        metrics = _close(accumulation, closes, model, optimizer, params, opt_state)
        return metrics._replace(skipped=skipped, aux=aux)


def make_train_step(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> TrainStep:
    """Builds a jitted train step of one micro-batch a call, for NNX.

    Model and optimizer are updated in place and their buffers donated: parameters move
    when, and only when, the window closes; batch statistics and `nnx.Rngs` move in
    every call, so no two micro-batches share a dropout mask.

    Args:
      loss_fn: `loss_fn(model, batch) -> (loss_sum, num_tokens)`, the loss *summed* over
        the micro-batch's tokens and how many there were.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.

    Returns:
      `step(model, optimizer, batch) -> StepMetrics`, where `optimizer` is
      `nnx.Optimizer(model, token_accumulation(...), wrt=...)`. `optimizer.step` counts
      calls; updates are `metrics.gradient_step`.

    Raises:
      TypeError: `loss_fn` is not a function.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from optax_tokenaccum import token_accumulation
      >>> from optax_tokenaccum.nnx import make_train_step
      >>> def loss_fn(model, batch):
      ...     x, y, mask = batch
      ...     errors = (model(x)[:, 0] - y) ** 2
      ...     return jnp.sum(errors * mask), jnp.sum(mask)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = token_accumulation(optax.adamw(1e-2), every_k_schedule=2)
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> step = make_train_step(loss_fn)
      >>> for mask in ([1.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
      ...     batch = jnp.ones((3, 2)), jnp.ones(3), jnp.array(mask)
      ...     metrics = step(model, optimizer, batch)
      ...     print(metrics.updated, metrics.num_tokens)
      False 1.0
      True 4.0
    """
    _checks.check_function(loss_fn, "loss_fn")
    return TrainStep(loss_fn, has_aux)


def _close_window(model: nnx.Module, optimizer: nnx.Optimizer) -> StepMetrics:
    params, opt_state = _arrays_of(model, optimizer)
    return _close(
        _accumulation_of(optimizer),
        opt_state.mini_step > 0,
        model,
        optimizer,
        params,
        opt_state,
    )


def _close(
    accumulation: Accumulation,
    closes: jax.Array | bool,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    params: Any,
    opt_state: Any,
) -> StepMetrics:
    """Closes the window where it `closes`, and puts everything back in place."""
    params, opt_state, metrics = close_and_apply(
        accumulation, closes, params, opt_state
    )
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] += 1
    return metrics


def _arrays_of(model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[Any, Any]:
    """Parameters and optimizer state as the transformation sees them."""
    return (
        _arrays_in(nnx.state(model, optimizer.wrt)),
        _arrays_in(optimizer.opt_state),
    )


def _arrays_in(tree: Any) -> Any:
    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    return jax.tree.map(
        lambda x: x[...] if is_variable(x) else x, tree, is_leaf=is_variable
    )


def _accumulation_of(optimizer: nnx.Optimizer) -> Accumulation:
    tx = getattr(optimizer.tx.update, "__self__", None)
    if not isinstance(tx, Transformation):
        raise TypeError(
            "The optimizer must be an nnx.Optimizer around token_accumulation(...) "
            f"itself: got {optimizer.tx!r}. A chain goes inside: "
            "token_accumulation(optax.chain(...), k)."
        )
    gradients = tx.accumulation.gradients
    if gradients != "sum":
        raise ValueError(
            "loss_fn returns a sum over tokens, so token_accumulation must be told "
            f"gradients='sum', the default: got {gradients!r}."
        )
    return tx.accumulation
