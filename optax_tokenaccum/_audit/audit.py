"""What gradient does a training loop really apply?"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._audit import reading
from optax_tokenaccum._audit.report import AuditReport, Parameter
from optax_tokenaccum._audit.verdict import Evidence, judge
from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.loss_fn import LossFn
from optax_tokenaccum._core.trees import Params


def audit(
    run: reading.Run,
    loss_fn: LossFn,
    params: Params,
    micro_batches: Sequence[Any],
    *,
    rtol: float | None = None,
) -> AuditReport:
    r"""Says which gradient a training loop applies to one window of micro-batches.

    The exact one is :math:`\sum_i g_i / \sum_i n_i`. The loop is run with an SGD of the
    audit's own: in the first run only its first update moves the parameters, in the
    second run only its second, in the third run none. The scale makes the gradient
    larger than the parameters, so that it can be read off them in their own dtype; a
    second update in the window shows itself by moving them at all. What moves in the
    third run is not a gradient (weight decay by hand, a cast to bfloat16 and back), and
    is subtracted.

    The relative error says little about a micro-batch with a small gradient. So the
    weight of every micro-batch is estimated by least squares, and must be 1 up to its
    standard error. A micro-batch that rounding hides makes the verdict `UNKNOWN`, with
    the explanation "cannot tell".

    The loop may be of any framework that takes an optax optimizer. One window of it is
    needed, with whatever the optimizer is wrapped in, and without randomness: dropout
    would be another gradient. It is run two to five times more where noise must be
    measured or where it drifts at random.

    Args:
      run: `run(optimizer, params, micro_batches) -> params`: the loop, with the optax
        optimizer that it is handed. The parameters are a copy, so it may donate them.
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`, what is true:
        the loss *summed* over tokens, and their number. `check_loss_fn` checks it.
      params: where to look. Not a minimum: a gradient of zero says nothing.
      micro_batches: of one window, with *different* numbers of tokens.
      rtol: the relative L2 error of a right gradient. By default 1e-4, or 4 units of
        the parameters' least precise dtype. Where no known gradient is that near, the
        rounding noise of `run` and `loss_fn` (bfloat16 inside, TF32 on a GPU) is
        measured, and `rtol` is 4 times the noise if that is more.

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
    checks.check_function(run, "run")
    checks.check_function(loss_fn, "loss_fn")
    params, micro_batches = jax.tree.map(jnp.asarray, params), list(micro_batches)
    if not micro_batches:
        raise ValueError("A window must hold at least one micro-batch: got none.")
    token_sums = reading.token_sums_of(loss_fn)
    tokens, gradients = token_sums(params, micro_batches)
    exact = gradients.sum(0) / tokens.sum()
    if not np.isfinite(exact).all() or not exact.any():
        what = "zero" if np.isfinite(exact).all() else "not finite"
        raise ValueError(
            f"The exact gradient must be finite and not zero: got one that is {what}. "
            "Audit at other parameters, the initial ones say."
        )
    loop = reading.Loop(run, token_sums, reading.readable_scale(params, exact))
    window = params, micro_batches
    still = loop.moved(*window, -1)
    second = loop.second(*window, still, _scale_of_second(params, tokens, gradients))
    readings = loop.readings(*window, still)
    limit = _default_rtol(params) if rtol is None else rtol
    evidences = [Evidence(g, tokens, x, second, limit) for g, x in readings]
    place = int(np.argmin([evidence.nearest for evidence in evidences]))
    evidence = evidences[place]
    if rtol is None and limit < evidence.nearest < np.inf:
        noise = loop.noise(*window, place, readings[place])
        if 4 * noise > limit:
            evidence = evidence._replace(rtol=4 * noise, noise=noise)
    parameters = _parameters(params, evidence.first, evidence.exact)
    return AuditReport(**judge(evidence), parameters=parameters)


def _scale_of_second(
    params: Params, tokens: np.ndarray, gradients: np.ndarray
) -> float:
    """Makes a step on the second micro-batch readable, however small its gradient."""
    sizes = np.linalg.norm(gradients, axis=1)
    places = [*np.flatnonzero(tokens)[1:2], *np.argsort(-sizes)]
    place = next(i for i in places if sizes[i])
    return reading.readable_scale(params, gradients[place] / tokens[place])


def _default_rtol(params: Params) -> float:
    dtypes = [x.dtype for x in jax.tree.leaves(params)]
    units = [jnp.finfo(d).eps for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    return max(1e-4, 4 * float(max(units, default=0)))


def _parameters(
    params: Params, applied: np.ndarray, exact: np.ndarray
) -> list[Parameter]:
    found, start = [], 0
    for (path, _), numbers in zip(
        trees.named_leaves(params), reading.numbers(params), strict=True
    ):
        end = start + numbers.size
        if end > start:
            found.append(Parameter.of(path, applied[start:end], exact[start:end]))
        start = end
    return found
