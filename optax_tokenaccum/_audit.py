"""What gradient does a training loop really apply?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum import _arrays, _checks
from optax_tokenaccum._audit_report import AuditReport, Parameter
from optax_tokenaccum._audit_verdict import Evidence, judge
from optax_tokenaccum._axes import Axes
from optax_tokenaccum._micro_batch import LossFn, sums_and_gradient

Run = Callable[[optax.GradientTransformationExtraArgs, Any, Sequence[Any]], Any]


def audit(
    run: Run,
    loss_fn: LossFn,
    params: Any,
    micro_batches: Sequence[Any],
    *,
    rtol: float | None = None,
) -> AuditReport:
    r"""Says which gradient a training loop applies to one window of micro-batches.

    The exact one is :math:`\sum_i g_i / \sum_i n_i`. The loop is run twice, with an SGD
    of the audit's own: in the first run only its first update moves the parameters, in
    the second run only its second. The scale makes the gradient larger than the
    parameters, so that it can be read off them in their own dtype; a second update in
    the window shows itself by moving them at all.

    The loop may be of any framework that takes an optax optimizer. One window of it is
    needed, with whatever the optimizer is wrapped in, and without randomness: dropout
    would be another gradient. What comes after the optimizer and does not scale with
    the gradient, such as weight decay by hand, is not seen.

    Args:
      run: `run(optimizer, params, micro_batches) -> params`: the loop, with the optax
        optimizer that it is handed. The parameters are a copy, so it may donate them.
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`, what is true:
        the loss *summed* over tokens, and their number. `check_loss_fn` checks it.
      params: where to look. Not a minimum: a gradient of zero says nothing.
      micro_batches: of one window, with *different* numbers of tokens.
      rtol: the relative L2 error of a right gradient; by default 1e-4, or 4 units of
        the parameters' least precise dtype. A GPU's shortened matrix products
        (TF32) need 1e-2, or `jax.default_matmul_precision("highest")`.

    Returns:
      An `AuditReport`: print it.

    Raises:
      ValueError: there is no micro-batch, no token, or the exact gradient is zero or
        not finite; the loop returned another tree than `params`.
      TypeError: `run` or `loss_fn` is not a function, or `loss_fn` returned something
        else than `(loss_sum, num_tokens)`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import audit
      >>> def loss_fn(params, batch):
      ...     x, mask = batch
      ...     return jnp.sum(mask * (params * x - 1) ** 2), jnp.sum(mask)
      >>> def run(optimizer, params, micro_batches):
      ...     optimizer = optax.MultiSteps(optimizer, len(micro_batches))
      ...     state = optimizer.init(params)
      ...     for batch in micro_batches:
      ...         grads, n = jax.grad(loss_fn, has_aux=True)(params, batch)
      ...         grads = grads / n
      ...         updates, state = optimizer.update(grads, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...     return params
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> micro_batches = [(x, jnp.array([1, 0, 0])), (x, jnp.array([1, 1, 1]))]
      >>> audit(run, loss_fn, jnp.array(1.5), micro_batches).verdict
      <Verdict.MEAN_OF_MEANS: 'mean of means'>
    """
    _checks.check_function(run, "run")
    _checks.check_function(loss_fn, "loss_fn")
    params, micro_batches = jax.tree.map(jnp.asarray, params), list(micro_batches)
    tokens, gradients = _token_sums(loss_fn, params, micro_batches)
    exact = gradients.sum(0) / tokens.sum()
    if not np.isfinite(exact).all() or not exact.any():
        what = "zero" if np.isfinite(exact).all() else "not finite"
        raise ValueError(
            f"The exact gradient must be finite and not zero: got one that is {what}. "
            "Audit at other parameters, the initial ones say."
        )
    scale = _readable_scale(params, exact)
    first = _read(run, params, micro_batches, 0, scale)
    if not np.isfinite(first).all():
        # A sum that was not divided may be what overflowed: read it smaller.
        first = _read(run, params, micro_batches, 0, scale / _power_of_2(tokens.sum()))
    second = _read(run, params, micro_batches, 1, scale)
    evidence = Evidence(
        gradients,
        tokens,
        first,
        second,
        _default_rtol(params) if rtol is None else rtol,
    )
    finding = judge(evidence)
    return AuditReport(**finding, parameters=_parameters(params, first, exact))


def _token_sums(
    loss_fn: LossFn, params: Any, micro_batches: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[k]` and gradients of summed losses `[k, parameters]`, in float64."""
    if not micro_batches:
        raise ValueError("A window must hold at least one micro-batch: got none.")

    @jax.jit
    def sums(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        (_, (n, _)), g = sums_and_gradient(loss_fn, False, params, batch, {}, Axes())
        return _checks.as_num_tokens(n), g

    found = [sums(params, batch) for batch in micro_batches]
    tokens = np.array([n for n, _ in found], np.float64)
    if not (np.isfinite(tokens).all() and (tokens >= 0).all() and tokens.any()):
        raise ValueError(
            "Token counts must be finite, at least 0, and not all 0: got "
            f"{tokens.tolist()}."
        )
    gradients = np.stack([_flat(gradient) for _, gradient in found])
    return tokens, np.where(tokens[:, None] > 0, gradients, 0)


def _reading_optimizer(
    which: int, scale: float
) -> optax.GradientTransformationExtraArgs:
    """SGD whose update number `which`, counted from 0, alone moves the parameters."""

    def init(params: Any) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, jax.Array]:
        def step(g: Any) -> Any:
            if _arrays.is_float0(g):
                return g
            return jnp.where(state == which, -scale * g, 0).astype(g.dtype)

        return jax.tree.map(step, updates), state + 1

    return optax.GradientTransformationExtraArgs(init, update)


def _read(
    run: Run, params: Any, micro_batches: list[Any], which: int, scale: float
) -> np.ndarray:
    """The gradient that one update applied, from how far the parameters moved."""
    moved = run(
        _reading_optimizer(which, scale), _arrays.owned(params), list(micro_batches)
    )
    _checks.check_same_tree(
        moved, params, "run must return the parameters it was given, moved"
    )
    return (_flat(params) - _flat(jax.tree.map(jnp.asarray, moved))) / scale


def _readable_scale(params: Any, exact: np.ndarray) -> float:
    """A power of 2 that makes the update outweigh the parameters, as far as they reach.

    Rounding to the parameters' dtype then costs a unit of the gradient, not of the
    parameters. Leaves with a thousandth of the gradient can still be read; float16
    would overflow there.
    """
    margin = 2.0**10
    if any(x.dtype == jnp.float16 for x in jax.tree.leaves(params)):
        margin = 4.0
    size = np.linalg.norm(_flat(params)) or np.linalg.norm(exact)
    return _power_of_2(margin * size / np.linalg.norm(exact))


def _power_of_2(x: Any) -> float:
    return float(2.0 ** np.round(np.log2(x)))


def _default_rtol(params: Any) -> float:
    dtypes = [x.dtype for x in jax.tree.leaves(params)]
    units = [jnp.finfo(d).eps for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    return max(1e-4, 4 * float(max(units, default=0)))


def _flat(tree: Any) -> np.ndarray:
    """Every number of a tree, as float64; integers have no gradient and do not move."""
    parts = [_numbers(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _numbers(leaf: Any) -> np.ndarray:
    if _arrays.is_float0(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(0)
    flat = np.asarray(leaf).ravel()
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return np.concatenate([flat.real, flat.imag]).astype(np.float64)
    return flat.astype(np.float64)


def _parameters(params: Any, applied: np.ndarray, exact: np.ndarray) -> list[Parameter]:
    found, start = [], 0
    for path, leaf in _checks.named_leaves(params):
        end = start + _numbers(leaf).size
        if end > start:
            found.append(Parameter.of(path, applied[start:end], exact[start:end]))
        start = end
    return found
