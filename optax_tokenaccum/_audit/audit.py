"""Finds the gradient that a training loop really applies."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._audit import reading
from optax_tokenaccum._audit.report import AuditReport, Parameter
from optax_tokenaccum._audit.verdict import Evidence, judge
from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.loss import LossFn
from optax_tokenaccum._core.trees import Params


def audit(
    run: reading.Run,
    loss_fn: LossFn,
    params: Params,
    micro_batches: Sequence[Any],
    *,
    rtol: float | None = None,
) -> AuditReport:
    r"""Finds which gradient a training loop applies to one window of micro-batches.

    The exact gradient is :math:`\sum_i g_i / \sum_i n_i`. The audit runs the loop three
    times with its own SGD optimizer. Only the first update moves the parameters in the
    first run, only the second update in the second run, and no update in the third run.
    The updates are scaled to be larger than the parameters, so that the gradient can be
    read off the parameters in their own dtype. If the parameters move in the second
    run, the loop applied a second update in the window. Any movement in the third run
    is not a gradient (manual weight decay, a cast to bfloat16 and back), and is
    subtracted.

    A micro-batch with a small gradient hardly changes the relative error. So the
    audit also estimates the weight of every micro-batch by least squares, and the
    weight must be 1 within `rtol` plus 8 of its standard errors. If rounding hides a
    micro-batch, the verdict is `UNKNOWN` and the explanation says "cannot tell".

    The loop may use any framework that takes an optax optimizer. It must run one
    window, with every wrapper of the optimizer, and without randomness: dropout would
    change the gradient. The audit runs the loop once more if the second update moves
    the parameters, because the loop may drift at random, and four more times if it
    must measure noise. It repeats a run whose gradient overflows, with a smaller scale.

    Args:
      run: `run(optimizer, params, micro_batches) -> params`: the loop, which must use
        the given optax optimizer. It gets copies of the parameters and micro-batches,
        so it may donate them.
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`, the ground
        truth: the loss *summed* over tokens, and the number of these tokens.
        `check_loss_fn` checks it.
      params: the parameters to audit at. Avoid a minimum: a gradient of zero tells
        nothing.
      micro_batches: the micro-batches of one window, with *different* numbers of
        tokens.
      rtol: the relative L2 error up to which a gradient counts as right. The default is
        1e-4, or 4 times the machine epsilon of the parameters' least precise dtype if
        that is larger. If no known gradient is this near, the audit measures the
        rounding noise of `run` and `loss_fn` (bfloat16 inside, TF32 on a GPU), and
        `rtol` is 4 times the noise if that is larger.

    Returns:
      An `AuditReport`, which `print` shows as text.

    Raises:
      ValueError: if there are no micro-batches or no tokens; if the exact gradient is
        zero or not finite; if `rtol` is not between 0 and 1; or if the loop returned a
        different tree than `params`.
      TypeError: if `run` or `loss_fn` is not a function, if `micro_batches` is a
        mapping, or if `loss_fn` returned something other than
        `(loss_sum, num_tokens)`.

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
    checks.check_function(run, "run")
    checks.check_function(loss_fn, "loss_fn")
    micro_batches = checks.as_micro_batches(micro_batches)
    if rtol is not None and not 0 < rtol < 1:
        raise ValueError(f"rtol must be between 0 and 1, or None: got {rtol}.")
    params = jax.tree.map(jnp.asarray, params)
    if not micro_batches:
        raise ValueError("A window must hold at least one micro-batch: got none.")
    token_sums = reading.token_sums_of(loss_fn)
    window = reading.Window(run, token_sums, params, micro_batches)
    if not np.isfinite(window.exact).all() or not window.exact.any():
        what = "zero" if np.isfinite(window.exact).all() else "not finite"
        raise ValueError(
            f"The exact gradient must be finite and not zero: got one that is {what}. "
            "Audit at other parameters, such as the initial ones."
        )
    limit = _default_rtol(params) if rtol is None else rtol
    second, readings = window.second(), window.readings()
    evidences = [
        Evidence(g, window.tokens, x, second, limit, window.drifts) for g, x in readings
    ]
    errors = [min(evidence.candidates().values()) for evidence in evidences]
    place = int(np.argmin(errors))
    evidence = evidences[place]
    if rtol is None and limit < errors[place] < np.inf:
        noise = window.noise(place, readings[place])
        if 4 * noise > limit:
            evidence = evidence._replace(rtol=4 * noise, noise=noise)
    return judge(evidence, _parameters(params, evidence.first, evidence.exact))


def _default_rtol(params: Params) -> float:
    dtypes = [x.dtype for x in jax.tree.leaves(params)]
    units = [jnp.finfo(d).eps for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    return max(1e-4, 4 * float(max(units, default=0)))


def _parameters(
    params: Params, applied: np.ndarray, exact: np.ndarray
) -> list[Parameter]:
    """The gradients of each parameter array that has any."""
    ends = np.cumsum([x.size for x in reading.numbers(params)])[:-1]
    leaves = zip(
        trees.named_leaves(params),
        np.split(applied, ends),
        np.split(exact, ends),
        strict=True,
    )
    return [
        Parameter(path, *(float(np.linalg.norm(z)) for z in (x, y, x - y)))
        for (path, _), x, y in leaves
        if x.size
    ]
