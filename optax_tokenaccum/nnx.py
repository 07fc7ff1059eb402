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

# The raw values of variables. `variable[...]` would call the variable's `get_value`.
_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure


class TrainStep:
    """A train step, called as `step(model, optimizer, batch) -> StepMetrics`.

    Use `make_train_step` to build one.

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
          batch: the second argument of `loss_fn`.

        Raises:
          TypeError: `optimizer` is not an `nnx.Optimizer` around an accumulation, or
            `loss_fn` did not return `(loss_sum, num_tokens)`.
          ValueError: the accumulation has no schedule, or was built with
            `gradients="mean"`.
        """
        return self._run(self._program, model, optimizer, batch)

    def close_window(self, model: nnx.Module, optimizer: nnx.Optimizer) -> StepMetrics:
        """Closes a partial window, for example at the end of an epoch.

        The window's tokens so far are the denominator. On an empty window nothing
        changes except `optimizer.step`, which counts the call.
        """
        return self._run(_close_window, model, optimizer)

    def _run(
        self,
        program: Callable[..., StepMetrics],
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *batch: Batch,
    ) -> StepMetrics:
        """Runs `program` and keeps the placement of every array."""
        _accumulation_of(optimizer)
        leaves = _leaves(model, optimizer)
        if not self._is_settled(leaves, batch):
            self._settle(model, optimizer, batch)
        shardings = tuple(map(_own_sharding, leaves))

        # Without constraints the compiler chooses the placement of the results, and the
        # next call compiles again.
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
        """Whether `_settle`, which is slow, can be skipped."""
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
        """Prepares arrays that would be donated twice or cause a second compilation.

        An array that occurs twice is copied. An array that was never placed moves to
        the devices of the parameters. If its path ends with the path of a parameter of
        the same shape, it is sharded like that parameter: these are sums and moments
        that were created before the parameters were placed. Otherwise it is replicated.
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
        try:
            opt_state, skipped, (aux, after) = accumulation.add_loss(
                self._loss_of(model, optimizer.wrt, batch), opt_state, params
            )
            _put(model, after)
        except _NewVariables:
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

    def _loss_of(self, model: nnx.Module, wrt: Any, batch: Batch) -> Any:
        """A function of the parameters, which also returns what the loss updated."""
        graphdef, own, rest = nnx.split(model, wrt, ...)
        structure = jax.tree.structure(own)
        others, other_structure = jax.tree.flatten(rest)
        before = _held(nnx.state(model))

        def loss_of(params: Params) -> Any:
            # Variables can be updated only in the trace in which they were made.
            own = jax.tree.unflatten(structure, jax.tree.leaves(params))
            rest = jax.tree.unflatten(other_structure, others)
            copy = nnx.merge(graphdef, own, rest)
            loss_sum, (num_tokens, aux) = self._loss(copy, batch)
            after = _held(nnx.state(copy))
            if after.keys() != before.keys():
                raise _NewVariables
            return loss_sum, (num_tokens, (aux, after))

        return loss_of

    def _value_and_grad(self, model: nnx.Module, wrt: Any, batch: Batch) -> Any:
        """`((loss_sum, (num_tokens, aux)), gradients)`, if the loss adds variables."""
        result, grads = nnx.value_and_grad(
            self._loss, argnums=nnx.DiffState(0, wrt), has_aux=True
        )(model, batch)
        return result, _pure(nnx.state(grads))

    def _loss(self, model: nnx.Module, batch: Batch) -> Any:
        return unpack(self._loss_fn(model, batch), self._has_aux)


class _NewVariables(Exception):
    """The loss added variables to the model, or removed some."""


def make_train_step(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, donate: bool = True
) -> TrainStep:
    """Builds a jitted NNX train step that takes one micro-batch per call.

    The step updates the model and the optimizer in place. Parameters change only when
    the window closes. Batch statistics and `nnx.Rngs` change in every call, so no two
    micro-batches share a dropout mask. They also change for a micro-batch without
    tokens, because its rows are real. If `should_skip_update_fn` rejects a micro-batch,
    all variables of the model keep the values they had before it.

    Args:
      loss_fn: `loss_fn(model, batch) -> (loss_sum, num_tokens)`: the loss *summed* over
        the micro-batch's tokens, and the number of those tokens.
      has_aux: whether `loss_fn` returns `(loss_sum, (num_tokens, aux))`.
      donate: whether to update buffers in place. A call then deletes the arrays that
        the model and the optimizer held before it. `nnx.clone(model)` shares these
        arrays: to keep a model, copy its arrays or pass `False`.

    Returns:
      `step(model, optimizer, batch) -> StepMetrics`, where `optimizer` is
      `nnx.Optimizer(model, tx, wrt=...)` and `tx` is `token_accumulation(...)` or
      `MultiSteps(..., gradients="sum")`. `optimizer.step` counts calls;
      `metrics.gradient_step` counts updates.

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
    """Closes the window if `closes`, and updates the model and the optimizer."""
    params = _pure(nnx.state(model, optimizer.wrt))
    params, opt_state, metrics = close_and_apply(
        accumulation, closes, params, opt_state
    )
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] += 1
    return metrics


def _take_back(skipped: jax.Array, before: dict[Any, Any], model: nnx.Module) -> None:
    """Restores the model's variables to the values in `before`, if `skipped`."""
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
    """The values of a state's variables, keyed by path."""
    return {path: _pure(variable) for path, variable in nnx.to_flat_state(state)}


def _put(node: Any, held: dict[Any, Any]) -> None:
    """Writes the values in `held`, keyed by path as in `_held`, back to `node`."""
    for path, leaf in nnx.to_flat_state(nnx.state(node)):
        if path not in held:
            continue
        if isinstance(leaf, nnx.Variable):
            leaf.set_raw_value(held[path])
            continue
        with contextlib.suppress(ValueError):  # nnx cannot set an array in a tuple
            nnx.update(node, nnx.from_flat_state({path: held[path]}))


def _leaves(model: nnx.Module, optimizer: nnx.Optimizer) -> list[Any]:
    """Every variable once, and the model's arrays that are not in a variable.

    Modules may refer to each other in cycles, which jax's tree functions do not
    support. For the optimizer jax's tree functions are used, because nnx's are slow.
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
    """A variable's mesh sharding, unless the array type already includes it."""
    sharding = sharding_of(_value_of(leaf))
    is_kept = isinstance(leaf, nnx.Variable) and sharding is not None
    return sharding if is_kept and not is_explicit(sharding.mesh) else None


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
