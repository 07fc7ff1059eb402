"""Flax NNX: a train step for a model and an `nnx.Optimizer` that accumulates."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from optax_tokenaccum._core import arrays, checks, trees
from optax_tokenaccum._core.accumulation import Accumulation
from optax_tokenaccum._core.loss_fn import unpack
from optax_tokenaccum._core.trees import Batch, Params
from optax_tokenaccum._devices.shardings import is_explicit, sharding_of
from optax_tokenaccum._multi_steps import accumulation_of
from optax_tokenaccum._steps.state import StepMetrics
from optax_tokenaccum._steps.update import close_and_apply

# What variables hold. Reading one instead, `variable[...]`, runs its own `get_value`.
_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure


class TrainStep:
    """What `make_train_step` returns: `step(model, optimizer, batch) -> StepMetrics`.

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

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, donate: bool):
        self._loss_fn = loss_fn
        self._has_aux = has_aux
        self._donate = donate
        self._jitted: dict[Any, Any] = {}

    def __reduce__(self) -> Any:
        return TrainStep, (self._loss_fn, self._has_aux, self._donate)

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch
    ) -> StepMetrics:
        """Adds a micro-batch, and applies the update if the window closes with it.

        Args:
          model: updated in place.
          optimizer: updated in place.
          batch: what `loss_fn` is given.

        Raises:
          TypeError: `optimizer` is not an `nnx.Optimizer` around an accumulation, or
            `loss_fn` returned something else than `(loss_sum, num_tokens)`.
          ValueError: the accumulation was not told when a window closes, or was told
            that gradients are of a mean.
        """
        return self._run(self._program, model, optimizer, batch)

    def close_window(self, model: nnx.Module, optimizer: nnx.Optimizer) -> StepMetrics:
        """Closes a partial window with the denominator it has, at the end of an epoch.

        On an empty window nothing changes, except that `optimizer.step` counts the
        call.
        """
        return self._run(_close_window, model, optimizer)

    def _run(
        self,
        program: Callable[..., StepMetrics],
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *batch: Batch,
    ) -> StepMetrics:
        """Runs a program that leaves every array where it was."""
        _accumulation_of(optimizer)
        leaves = _leaves(model, optimizer)
        if not self._is_settled(leaves, batch):
            self._settle(model, optimizer, batch)
        shardings = tuple(map(_own_sharding, leaves))

        # The compiler would place what is returned as it sees fit, and the next call
        # compile once more.
        def run(model: nnx.Module, optimizer: nnx.Optimizer, *batch: Batch) -> Any:
            leaves = _leaves(model, optimizer)
            metrics = program(model, optimizer, *batch)
            for leaf, sharding in zip(leaves, shardings, strict=True):
                if sharding is not None:
                    value = leaf.get_raw_value()
                    leaf.set_raw_value(
                        jax.lax.with_sharding_constraint(value, sharding)
                    )
            return metrics

        key = program, shardings
        if key not in self._jitted:
            donated = (0, 1) if self._donate else ()
            self._jitted[key] = nnx.jit(run, donate_argnums=donated)
        return self._jitted[key](model, optimizer, *batch)

    def _is_settled(self, leaves: list[Any], batch: Batch) -> bool:
        """Whether `_settle`, which is slow, would have nothing to do."""
        values = jax.tree.leaves(list(map(_value_of, leaves)))
        ids = set(map(id, values))
        shared = ids & set(map(id, jax.tree.leaves(batch)))
        if self._donate and (shared or len(ids) < len(values)):
            return False
        unplaced = set(map(arrays.is_unplaced, values))
        return len(unplaced) == 1 and not any(
            getattr(x, "weak_type", False) for x in values
        )

    def _settle(self, model: Any, optimizer: Any, batch: Batch) -> None:
        """Prepares arrays that would be donated twice, or cost a second compilation.

        An array that is there twice is copied. One that was never placed goes to the
        devices of the parameters: to those of the parameter whose path ends its own
        (sums and moments made before the parameters were placed), or to all of them.
        """
        params = _held(nnx.state(model, optimizer.wrt))
        home, taken = arrays.home(params), {id(x) for x in jax.tree.leaves(batch)}

        def settle(path: Any, x: Any) -> Any:
            if home is not None and arrays.is_unplaced(x):
                ends = (params.get(path[i:]) for i in range(len(path)))
                like = [p for p in ends if getattr(p, "shape", None) == x.shape]
                x = jax.device_put(x, arrays.home(like, whole=False) or home)
            return arrays.settled(x, taken if self._donate else set())

        state = {
            path: jax.tree.map(functools.partial(settle, path), x)
            for path, x in _held(nnx.state((model, optimizer))).items()
        }
        _put((model, optimizer), state)

    def _program(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch
    ) -> StepMetrics:
        accumulation = _accumulation_of(optimizer)
        before = _held(nnx.state(model))
        opt_state = _pure(optimizer.opt_state)
        params = _pure(nnx.state(model, optimizer.wrt))
        (loss_sum, (num_tokens, aux)), grads = self._value_and_grad(
            model, optimizer.wrt, batch
        )
        opt_state, skipped = accumulation.add(
            grads, opt_state, params, num_tokens, loss_sum
        )
        if accumulation.should_skip_update_fn is not None:
            _take_back(skipped, before, model)
        closes = accumulation.schedule.closes(
            opt_state.mini_step, opt_state.acc_tokens, opt_state.gradient_step
        )
        metrics = _close(accumulation, closes, model, optimizer, opt_state)
        return metrics._replace(skipped=skipped, aux=aux)

    def _value_and_grad(self, model: nnx.Module, wrt: Any, batch: Batch) -> Any:
        """`((loss_sum, (num_tokens, aux)), gradients)`; the loss may change `model`."""

        def loss_fn(model: nnx.Module, batch: Batch) -> Any:
            return unpack(self._loss_fn(model, batch), self._has_aux)

        if _is_graph_mode():
            result, grads = nnx.value_and_grad(
                loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=True
            )(model, batch)
            return result, _pure(nnx.state(grads))

        graphdef, params, rest = nnx.split(model, wrt, ...)

        def loss_of(params: Params, rest: Any, batch: Batch) -> Any:
            model = nnx.merge(graphdef, params, rest)
            loss_sum, counted = loss_fn(model, batch)
            return loss_sum, (counted, list(_held(nnx.state(model)).values()))

        (loss_sum, (counted, after)), grads = nnx.value_and_grad(loss_of, has_aux=True)(
            params, rest, batch
        )
        _put(model, dict(zip(_held(nnx.state(model)), after, strict=True)))
        return (loss_sum, counted), _pure(grads)


def make_train_step(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, donate: bool = True
) -> TrainStep:
    """Builds a jitted train step of one micro-batch a call, for NNX.

    Model and optimizer are updated in place: parameters move when, and only when, the
    window closes; batch statistics and `nnx.Rngs` move in every call, so no two
    micro-batches share a dropout mask. A micro-batch without tokens moves them too: its
    rows are real. One that `should_skip_update_fn` rejects never happened: all
    variables of the model are what they were before it.

    Args:
      loss_fn: `loss_fn(model, batch) -> (loss_sum, num_tokens)`, the loss *summed* over
        the micro-batch's tokens and how many there were.
      has_aux: `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      donate: update buffers in place. Arrays that the model and the optimizer held
        before a call are gone after it, and `nnx.clone(model)` shares them: copy the
        arrays of a model that is to stay, or give `False`.

    Returns:
      `step(model, optimizer, batch) -> StepMetrics`, where `optimizer` is
      `nnx.Optimizer(model, token_accumulation(...), wrt=...)`, or has
      `MultiSteps(..., gradients="sum")`. `optimizer.step` counts calls; updates are
      `metrics.gradient_step`.

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
    checks.check_function(loss_fn, "loss_fn")
    return TrainStep(loss_fn, has_aux, donate)


def _close_window(model: nnx.Module, optimizer: nnx.Optimizer) -> StepMetrics:
    opt_state = _pure(optimizer.opt_state)
    closes = opt_state.mini_step > 0
    return _close(_accumulation_of(optimizer), closes, model, optimizer, opt_state)


def _close(
    accumulation: Accumulation,
    closes: jax.Array | bool,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    opt_state: Any,
) -> StepMetrics:
    """Closes the window where it `closes`, and puts everything back in place."""
    params = _pure(nnx.state(model, optimizer.wrt))
    params, opt_state, metrics = close_and_apply(
        accumulation, closes, params, opt_state
    )
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] += 1
    return metrics


def _take_back(skipped: jax.Array, before: dict[Any, Any], model: nnx.Module) -> None:
    """Gives the model's variables what they held `before`, where `skipped`."""
    after = _held(nnx.state(model))
    pairs = {path: (before[path], after[path]) for path in before if path in after}
    trees.check_same_tree(
        {"/".join(map(str, path)): new for path, (_, new) in pairs.items()},
        {"/".join(map(str, path)): old for path, (old, _) in pairs.items()},
        "With should_skip_update_fn the model's variables must keep their shapes, so "
        "that a rejected micro-batch can be undone",
    )
    select = functools.partial(jnp.where, skipped)
    _put(model, {path: jax.tree.map(select, *pair) for path, pair in pairs.items()})


def _held(state: Any) -> dict[Any, Any]:
    """What the variables of a state hold, by their paths."""
    return {path: _pure(variable) for path, variable in nnx.to_flat_state(state)}


def _put(node: Any, held: dict[Any, Any]) -> None:
    """Writes back what `_held` read, by the same paths."""
    for path, leaf in nnx.to_flat_state(nnx.state(node)):
        if path not in held:
            continue
        if isinstance(leaf, nnx.Variable):
            leaf.set_raw_value(held[path])
            continue
        with contextlib.suppress(ValueError):  # in a tuple, where nnx cannot set it
            nnx.update(node, nnx.from_flat_state({path: held[path]}))


def _leaves(model: nnx.Module, optimizer: nnx.Optimizer) -> list[Any]:
    """Every variable once, and the model's arrays that are in none.

    Modules may hold each other, which jax's trees do not survive; nnx's walk is slow.
    """
    of_model = [leaf for _, leaf in nnx.to_flat_state(nnx.state(model))]
    of_optimizer = jax.tree.leaves(
        (optimizer.step, optimizer.opt_state),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return [*of_model, *of_optimizer]


def _value_of(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _own_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of a variable on a mesh whose types do not say it."""
    sharding = sharding_of(_value_of(leaf))
    is_kept = isinstance(leaf, nnx.Variable) and sharding is not None
    return sharding if is_kept and not is_explicit(sharding.mesh) else None


def _is_graph_mode() -> bool:
    """Whether flax is in the mode in which it knows `nnx.DiffState`."""
    modes = [getattr(nnx, f"set_graph_{name}", None) for name in ("mode", "updates")]
    return all(mode is None or mode.current_value() for mode in modes)


def _accumulation_of(optimizer: nnx.Optimizer) -> Accumulation:
    given = getattr(optimizer, "tx", optimizer)
    accumulation = accumulation_of(given)
    if not isinstance(optimizer, nnx.Optimizer) or accumulation is None:
        raise TypeError(
            "The optimizer must be an nnx.Optimizer around token_accumulation(...) "
            "itself, or around MultiSteps(..., gradients='sum'): got "
            f"{given!r}. A chain goes inside: token_accumulation(optax.chain(...), k)."
        )
    gradients = accumulation.gradients
    if gradients != "sum":
        raise ValueError(
            "loss_fn returns a sum over tokens, so the optimizer must be told "
            f"gradients='sum': got {gradients!r}. Write token_accumulation(inner, k), "
            "or MultiSteps(inner, k, gradients='sum')."
        )
    return accumulation
