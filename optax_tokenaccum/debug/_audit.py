"""Finds the gradient that a training loop really applies."""

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.trees import Batch, Gradients, OptState, Params
from optax_tokenaccum._steps.loss_fn import LossFn, unpack
from optax_tokenaccum.debug._model import Model, as_vector, copied
from optax_tokenaccum.debug._report import AuditReport, ParameterRow, Verdict, progress

Run = Callable[[optax.GradientTransformationExtraArgs, Params, Sequence[Batch]], Params]
Measured = tuple[np.ndarray, float]  # a gradient, num_tokens
Gradient = Callable[..., Measured]  # of (batch, share)

EXPLANATIONS = {
    Verdict.EXACT: "the loop applies the exact mean of the window, by loss_fn's count.",
    Verdict.MEAN_OF_MEANS: (
        "the loop averages means, so tokens of long micro-batches count for less. Give "
        "optax_tokenaccum.MultiSteps the loss's own count as num_tokens (mask.size "
        "changes nothing), or make_train_step a summed loss."
    ),
    Verdict.DISCARDED: (
        "no update moves the parameters: none closes the window (is one accumulation "
        "inside another?), or it is thrown away."
    ),
    Verdict.NOT_DIVIDED: "the loop applies a sum. Divide it once, by the tokens.",
    Verdict.DIVIDED_TWICE: (
        "divided by tokens and by k. Remove '/ k' from the loss; or, if the loss is "
        "divided by all tokens of the window, give MultiSteps use_grad_mean=False."
    ),
    Verdict.LAST_MICRO_BATCH_ONLY: "only the last gradient is applied: sum them.",
    Verdict.STEPPED_EVERY_MICRO_BATCH: (
        "wrap the optimizer in token_accumulation (gradients='mean' for a mean loss)."
    ),
}
CANNOT_TELL = (
    "cannot tell: up to rounding, a wrong loop applies this window's exact gradient, "
    "too. Give two or more ragged micro-batches, with gradients of similar sizes, or "
    "audit in float32, or give rtol."
)
NOT_FINITE = (
    "the parameters are not finite. A float16 sum overflows (keep sums in float32); "
    "the mean of a micro-batch without tokens is 0/0 (leave it out)."
)
NOT_A_SUM = (
    "the applied gradient is not a sum of these micro-batches' gradients. Is dropout "
    "on (model.eval(), deterministic=True)? Does padding count? Was a window left open "
    "(close_window ends it)? Is its loss another, or of lower precision (give rtol)?"
)
UNCLEAR = CANNOT_TELL, NOT_A_SUM, EXPLANATIONS[Verdict.DISCARDED]
MOVED = (
    "parameters move without the given optimizer: by another one, an EMA, decay, or a "
    "layer such as nnx.SpectralNorm or nnx.WeightNorm (call a copy, nnx.clone(model))."
)
FROZEN = (
    "run does not move {} of the parameters, such as {}: stop their gradient in "
    "loss_fn, or leave them out of params. As to the others, "
)
APPLY_EVERY = (
    "the optimizer {}, as with optax.apply_every, so moments and schedules are wrong. "
    "Drop apply_every, and write token_accumulation(optax.chain(...), k), with "
    "gradients='mean' for a mean loss."
)
NOT_ADDED = "loss_fn couples rows, or is not a sum: check_loss_fn says which, and why."
OF_DEVICES = (
    "devices take the mean of their own means. For means over n tokens, write "
    "t = psum(n, axis), g = psum(g * n, axis) / t, and num_tokens=t."
)
NOT_CHECKED = "Not checked: whether loss_fn couples rows."
SIGMAS = 8  # 5 was seen, because a token's rounding errors are correlated
STEP_RTOL = 0.1  # relative error of a step on one micro-batch


@dataclass(frozen=True)
class MeasuredWindow:
    """What was measured of a window of `k` micro-batches."""

    tokens: np.ndarray  # [k]
    gradients: np.ndarray  # of summed losses, [k, parameters]
    noise: np.ndarray  # norms of the gradients' rounding errors, [k]
    rtol: float  # the least relative error that is tolerated
    first: np.ndarray  # the gradient of the loop's first update, [parameters]
    second: np.ndarray | None = None  # of its second update, if there was one

    @property
    def right(self) -> np.ndarray:
        """The weights of the exact gradient."""
        return np.full(len(self.tokens), 1 / self.tokens.sum())

    def limit(self, form: np.ndarray) -> float:
        """The relative error up to which a gradient counts as `form @ gradients`."""
        size = np.linalg.norm(form @ self.gradients) or np.inf
        return float(max(self.rtol, 4 * np.linalg.norm(form * self.noise) / size))

    def forms(self) -> dict[Verdict, np.ndarray]:
        """The known gradients of one update, as weights of `gradients`, [forms, k]."""
        n, k, total = self.tokens, len(self.tokens), self.tokens.sum()
        inverse = np.divide(1, n, out=np.zeros(k), where=n > 0)
        of_one = inverse[-1], inverse[-1] / k, 1 / total, 1
        return {
            Verdict.EXACT: self.right[None],
            Verdict.MEAN_OF_MEANS: np.outer([1 / k, 1 / np.count_nonzero(n)], inverse),
            Verdict.NOT_DIVIDED: np.ones((1, k)),
            Verdict.DIVIDED_TWICE: np.full((1, k), 1 / total / k),
            Verdict.LAST_MICRO_BATCH_ONLY: np.outer(of_one, np.eye(k)[-1]),
        }

    def candidates(self) -> dict[Verdict, float]:
        """The relative error of the applied gradient to each known one."""
        found = {
            verdict: min(distance(self.first, form @ self.gradients) for form in forms)
            for verdict, forms in self.forms().items()
        }
        exact, stepped = self.right @ self.gradients, np.inf
        found[Verdict.DISCARDED] = distance(self.first + exact, exact)
        if self.second is not None and np.count_nonzero(self.tokens) > 1:
            i, j, *_ = self.gradients[self.tokens > 0]
            stepped = max(off_line(self.first, i), off_line(self.second, j))
        return found | {Verdict.STEPPED_EVERY_MICRO_BATCH: stepped}

    def fits(self, form: np.ndarray) -> bool:
        """Whether the first update may have applied `form @ gradients`."""
        is_near = distance(self.first, form @ self.gradients) <= self.limit(form)
        return is_near and bool(self.near(form * self.tokens.sum()).all())

    def factor_of(self, form: np.ndarray) -> float | None:
        """How many times `form @ gradients` is applied; `None` if it is not."""
        if not np.isfinite(self.first).all():
            return None
        expected = form @ self.gradients
        factor = float(self.first @ expected / (expected @ expected))
        return factor if self.fits(factor * form) else None

    def near(self, expected: np.ndarray | float) -> np.ndarray:
        """Which weights of tokens may be these; one that is not known may be any."""
        values, errors = self.weights or np.full((2, len(self.tokens)), np.nan)
        return ~(abs(values - expected) > errors * np.maximum(1, expected))

    @functools.cached_property
    def weights(self) -> tuple[np.ndarray, np.ndarray] | None:
        """A token's weight, by micro-batch, and its error. NaN: it has no gradient."""
        seen, total = self.gradients.any(1), self.tokens.sum()
        is_unique = np.linalg.matrix_rank(self.gradients) == seen.sum()
        if not is_unique or not np.isfinite(self.first).all():
            return None
        inverse = np.linalg.pinv(self.gradients.T)
        form = inverse @ self.first
        expected, limit = form @ self.gradients, self.limit(form)
        if distance(self.first, expected) > limit:
            return None
        errors = np.linalg.norm(inverse, axis=1) * limit * np.linalg.norm(expected)
        if len(self.first) > 4 * len(form):
            # White's standard errors, because the noise differs from number to number.
            errors = SIGMAS * np.sqrt(inverse**2 @ (self.first - expected) ** 2)
        errors = errors * total + max(self.rtol, limit / 2)
        values, errors = np.where(seen, [form * total, errors], np.nan)
        return values, errors


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; infinite if `expected` is zero or `got` is not finite."""
    size = np.linalg.norm(expected)
    is_known = size and np.isfinite(got).all()
    return float(np.linalg.norm(got - expected) / size) if is_known else np.inf


def off_line(got: np.ndarray, line: np.ndarray) -> float:
    """The relative error of `got`, which may be clipped, to a multiple of `line`."""
    return distance(got * (line @ line), line * (got @ line))


def audit(
    run: Run,
    loss_fn: LossFn,
    params: Params,
    micro_batches: Sequence[Batch],
    *,
    rtol: float | None = None,
) -> AuditReport:
    r"""Finds which gradient a training loop applies to one window of micro-batches.

    The exact gradient is :math:`\sum_i g_i / \sum_i n_i`. The loop runs twice with an
    SGD of which only the first update, then only the second, moves the parameters.
    Then two halves of a micro-batch are compared with the whole: a loss that couples
    rows is not `EXACT`.

    Args:
      run: `run(optimizer, params, micro_batches) -> params`: the loop, for one window,
        with every wrapper of the given optax optimizer, and without dropout. It gets
        copies, which it may donate.
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`, the ground
        truth, in the loop's precision. `check_loss_fn` checks it.
      params: where to audit, not at a minimum: arrays, an Equinox module, an NNX model.
      micro_batches: those of one window, with *different* numbers of tokens.
      rtol: the relative L2 error up to which a gradient counts as right. The default is
        the largest of 1e-4, half the machine epsilon of the parameters, 4 times how far
        they move without an update, and 4 times the rounding noise of `loss_fn`.

    Returns:
      An `AuditReport`, which `print` shows as text.

    Raises:
      ValueError: if there are no tokens, if the exact gradient is zero or not finite,
        if `rtol` is not between 0 and 1, or if `run` returned a different tree.
      TypeError: if an argument has the wrong type, or `loss_fn` returned no pair.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum.debug import audit
      >>> def loss_fn(params, x):
      ...     return jnp.sum((params * x - 1) ** 2), x.size
      >>> def run(optimizer, params, micro_batches):
      ...     optimizer = optax.MultiSteps(optimizer, len(micro_batches))
      ...     state = optimizer.init(params)
      ...     for x in micro_batches:
      ...         grads = jax.grad(lambda p: jnp.divide(*loss_fn(p, x)))(params)
      ...         updates, state = optimizer.update(grads, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...     return params
      >>> micro_batches = [jnp.ones(1), jnp.arange(3.0)]
      >>> audit(run, loss_fn, jnp.array(1.5), micro_batches).verdict
      <Verdict.MEAN_OF_MEANS: 'mean of means'>
    """
    _check_takes(run, "run", "optimizer", "params", "micro_batches")
    _check_takes(loss_fn, "loss_fn", "params", "micro_batch")
    micro_batches = checks.as_micro_batches(micro_batches)
    if rtol is not None and not 0 < rtol < 1:
        raise ValueError(f"rtol must be between 0 and 1, or None: got {rtol}.")
    model = Model(params)
    summed = _gradient_of(loss_fn, model)
    found = [summed(x) for x in progress(micro_batches, "audit: gradient")]
    gradients, tokens = np.array([g for g, _ in found]), np.array([n for _, n in found])
    exact = gradients.sum(0) / (tokens.sum() or 1)
    size = np.linalg.norm(exact)
    if not 0 < size < np.inf:
        raise ValueError(
            "A window must have tokens, and a gradient that is finite and not 0: got "
            f"{tokens.tolist()} tokens and a gradient of norm {size:.3g}."
        )
    first, second, drift, how = _read(run, model, micro_batches, size)
    share = 1.0 if rtol else 0.75  # of the loss: numbers round differently
    again = [summed(x, share)[0] for x in progress(micro_batches, "audit: rounding")]
    noise = np.linalg.norm(again - gradients, axis=1)
    units = [float(jnp.finfo(x.dtype).eps) / 2 for x in model.trained]
    rtol = rtol or max(1e-4, *units, 4 * drift)
    window = MeasuredWindow(tokens, gradients, noise, rtol, first, second)
    sizes = [as_vector([x]).size for x in model.trained]
    parts = [np.split(x, np.cumsum(sizes)[:-1]) for x in (first, exact, first - exact)]
    norms = [[float(np.linalg.norm(part)) for part in x] for x in parts]
    rows = [*map(ParameterRow, model.names, *norms)]
    verdict, explanation = _judge(window)
    frozen = [p.path for p in rows if p.exact > p.applied == 0]
    if how and first.any():
        verdict, explanation = Verdict.UNKNOWN, how
    elif 4 * drift >= rtol and explanation in UNCLEAR:
        explanation = MOVED
    elif explanation == NOT_A_SUM and _is_of_devices(summed, micro_batches, window):
        explanation = OF_DEVICES
    elif explanation == NOT_A_SUM and frozen:
        moved = np.repeat([p.applied > 0 for p in rows], sizes)
        rest = dataclasses.replace(window, gradients=gradients * moved)
        explanation = FROZEN.format(len(frozen), frozen[0]) + _judge(rest)[1]
    doubt = _doubt(summed, micro_batches, window)
    if verdict is Verdict.EXACT and doubt == NOT_ADDED:
        verdict, explanation = Verdict.UNKNOWN, ""
    explanation = f"{explanation} {doubt}".strip()
    right, weights, both = window.right, window.weights, np.linalg.norm(first) * size
    return AuditReport(
        verdict,
        explanation,
        relative_error=distance(first, exact),
        cosine=float(first @ exact / both) if 0 < both < np.inf else 0.0,
        factor=1.0 if verdict is Verdict.EXACT else window.factor_of(right),
        rtol=window.limit(right),
        candidates=window.candidates(),
        tokens=tuple(tokens.tolist()),
        weights=None if weights is None else tuple(weights[0].tolist()),
        parameters=rows,
    )


def _check_takes(f: Callable[..., Any], name: str, *arguments: str) -> None:
    checks.check_function(f, name)
    signature = inspect.signature(f)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise TypeError(
            f"{name} must be a function of ({', '.join(arguments)}): got one of "
            f"({', '.join(signature.parameters)}). Give audit run first, then loss_fn."
        ) from None


def _gradient_of(loss_fn: LossFn, model: Model) -> Gradient:
    """The gradient of a micro-batch's loss times a share, and its tokens."""

    def loss(trained: list[jax.Array], batch: Batch, share: float) -> Any:
        loss_sum, n, _ = unpack(loss_fn(model.build(trained), batch), False)
        return loss_sum * share, n

    gradient = jax.jit(jax.grad(loss, has_aux=True))

    def summed(batch: Batch, share: float = 1.0) -> Measured:
        found, n = gradient(model.trained, batch, share)
        n = float(trees.as_num_tokens(n, np.float64))
        found = as_vector(found) / share
        return np.where((n > 0) | np.isfinite(found), found, 0), n  # 0/0 adds nothing

    return summed


def _read(
    run: Run, model: Model, batches: list[Batch], exact: float
) -> tuple[np.ndarray, np.ndarray | None, float, str]:
    """What two updates apply, how far parameters drift without, and what is wrong."""
    # Rounding of such an update costs a unit of the gradient, not of the parameters.
    # The margin leaves room for small gradients; float16 has none.
    margin = 4.0 if jnp.float16 in [x.dtype for x in model.trained] else 2.0**30
    start = as_vector(model.trained)
    size = np.linalg.norm(start) or exact
    scale = float(2.0 ** np.round(np.log2(margin * size / exact)))
    unit = 0.73 * exact / np.sqrt(start.size)  # what a gradient of zeros applies

    def read(armed: range, of_zeros: float = 0.0) -> np.ndarray:
        """What a run applies if only these updates move the parameters."""
        own, optimizer = model.build(model.trained), _sgd(armed, scale, of_zeros)
        found = model.numbers(run(optimizer, own, copied(batches)))
        return (start - found) / scale

    def drift(applied: np.ndarray) -> float:
        return float(np.linalg.norm(applied) * scale / size)

    runs = progress(((range(1), 0.0), (range(1, 2), unit)), "audit: run")
    first, rest = (read(*x) for x in runs)
    how, most = "", margin**0.3
    if not drift(rest) <= most:  # by a second update, by zeros, or NaN
        by_zeros, rest = rest.min() / unit, read(range(1, 2))  # min: all parameters
        how = APPLY_EVERY.format(f"also runs on zeros, {by_zeros:.0f} times")
        if not drift(rest) <= most:
            if distance(read(range(2)) - first, rest) > STEP_RTOL:
                return first, rest, 0.0, ""
            # The second gradient does not depend on the first update.
            first, rest = read(range(2**31 - 1)), 0 * rest
            how = APPLY_EVERY.format("runs on every micro-batch and adds its updates")
    return first - rest, None, drift(rest), how


def _sgd(
    armed: range, scale: float, of_zeros: float
) -> optax.GradientTransformationExtraArgs:
    """SGD of the updates `armed`, from 0; those of zeros apply `of_zeros` instead."""

    def update(
        updates: Gradients, state: OptState, params: Params = None, **extra: Any
    ) -> tuple[Gradients, OptState]:
        is_some = jnp.array([jnp.any(g != 0) for g in jax.tree.leaves(updates)]).any()
        is_armed = (armed.start <= state) & (state < armed.stop)

        def step(g: jax.Array) -> jax.Array:
            # float16 overflows
            wide = g.astype(trees.common_dtype(g.dtype, jnp.float32))
            size = jnp.where(is_some, jnp.where(is_armed, wide, 0), of_zeros)
            return (-scale * size).astype(g.dtype)

        return jax.tree.map(step, updates), state + is_some.astype(jnp.int32)

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)


def _doubt(summed: Gradient, batches: list[Batch], window: MeasuredWindow) -> str:
    """What is wrong with `loss_fn` if two halves of a micro-batch do not add up."""
    for i in np.argsort(-window.tokens):
        if window.tokens[i] and (parts := _parts(summed, batches[i], 2)):
            break
    else:
        return NOT_CHECKED
    found, counts = zip(*parts, strict=True)
    g, n = window.gradients[i], window.tokens[i]
    limit = 2 * max(window.rtol * np.linalg.norm(found), 4 * window.noise[i])
    is_sum = abs(sum(counts) - n) <= 1e-4 * n
    if is_sum and np.linalg.norm(sum(found) - g) <= limit:
        return ""
    is_sequence = max(np.ndim(x) for x in jax.tree.leaves(batches[i])) == 1
    return NOT_CHECKED if is_sequence else NOT_ADDED


def _parts(summed: Gradient, batch: Batch, number: int) -> list[Measured]:
    """What parts of the rows give; empty where they give nothing."""
    try:
        rows = trees.leading_axis(batch, "a micro-batch")
        ends = [rows * i // number for i in range(number + 1)]
        cut = [slice(*x) for x in itertools.pairwise(ends)] * (rows >= number)
        return [summed(jax.tree.map(operator.itemgetter(x), batch)) for x in cut]
    except Exception:  # no rows, or whatever a loss raises at such a shape
        return []


def _is_of_devices(
    summed: Gradient, batches: list[Batch], window: MeasuredWindow
) -> bool:
    """Whether the loop applies means over the local devices' means."""
    parts = [_parts(summed, batch, jax.local_device_count()) for batch in batches]
    means = [np.mean([g / (n or 1) for g, n in x], axis=0) for x in parts if x]
    if len(means) < len(batches):
        return False
    means = np.array(means) * window.tokens[:, None]
    return dataclasses.replace(window, gradients=means).weights is not None


def _judge(window: MeasuredWindow) -> tuple[Verdict, str]:
    """The verdict on a loop, and why."""
    candidates, stepped = window.candidates(), Verdict.STEPPED_EVERY_MICRO_BATCH
    if not np.isfinite(window.first).all():
        return Verdict.UNKNOWN, NOT_FINITE
    if candidates[stepped] <= STEP_RTOL:
        return stepped, EXPLANATIONS[stepped]
    if window.second is not None:
        return Verdict.UNKNOWN, "run takes several steps: make it one window, one step."
    if not window.first.any():
        return Verdict.DISCARDED, EXPLANATIONS[Verdict.DISCARDED]
    found = [v for v, forms in window.forms().items() if any(map(window.fits, forms))]
    ones = np.diag(window.right)[window.gradients.any(1)]  # that are lost, or twice
    others = [*(window.right - ones), *(window.right + ones)]
    if Verdict.EXACT in found and (len(found) > 1 or any(map(window.fits, others))):
        return Verdict.UNKNOWN, CANNOT_TELL
    if found:
        verdict = min(found, key=candidates.__getitem__)
        return verdict, EXPLANATIONS[verdict]
    return Verdict.UNKNOWN, _explain(window)


def _explain(window: MeasuredWindow) -> str:
    """Explains a gradient that matches no known one."""
    n, k, total = window.tokens, len(window.tokens), window.tokens.sum()
    if factor := window.factor_of(window.right):
        if factor < 0:
            return (
                f"the direction is opposite: it is {factor:.6g} times the exact "
                "gradient. Is a reward descended, or an update negated twice?"
            )
        return (
            f"the direction is right, the size is {factor:.6g} times the exact one. Is "
            "it clipped, or summed (2) or averaged (0.5) over two devices? Is a sum "
            f"given as a mean ({total / k:g})? Then write MultiSteps(gradients='sum')."
        )
    if window.weights is None:
        return NOT_A_SUM
    values, _ = window.weights
    sizes = np.nan_to_num(values) * np.linalg.norm(window.gradients, axis=1)
    for norms in (sizes, sizes / np.maximum(n, 1e-9)):  # of a sum's or mean of means'
        equal = norms >= 0.98 * norms.max()
        if equal.sum() > 1 and np.ptp(values[equal]) > 0.1 * max(values[equal]):
            return "each micro-batch is clipped. Clip in the optimizer that run gets."
    if factor := window.factor_of(window.forms()[Verdict.MEAN_OF_MEANS][0]):
        return (
            f"the mean of means, times {factor:.6g}. Is a mean given where a sum is "
            f"expected ({k / total:.6g}), or are means added up ({k})? Write "
            "token_accumulation(gradients='mean'), and give num_tokens."
        )
    if max(n) > 2 and window.near(n).all():
        return "a sum is given as a mean: write MultiSteps(gradients='sum')."
    if (window.near(0) | window.near(1) | window.near(2)).all():
        return "micro-batches are lost (weight 0) or repeated (2) on the way."
    return "micro-batches have other weights: is each clipped, or its count wrong?"
