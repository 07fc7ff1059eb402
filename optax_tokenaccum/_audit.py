"""Finds the gradient that a training loop really applies."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_tokenaccum import _checks as checks
from optax_tokenaccum._audit_model import Model, as_vector, copied
from optax_tokenaccum._audit_report import AuditReport, ParameterRow, Verdict, progress
from optax_tokenaccum._micro_batch import LossFn, unpack
from optax_tokenaccum._trees import (
    Batch,
    Gradients,
    OptState,
    Params,
    as_num_tokens,
    common_dtype,
    leading_axis,
)

Run = Callable[[optax.GradientTransformationExtraArgs, Params, Sequence[Batch]], Params]
Gradient = Callable[..., tuple[np.ndarray, float]]  # (batch, share) -> it, num_tokens

EXPLANATIONS = {
    Verdict.EXACT: "the loop applies the exact mean of the window, by loss_fn's count.",
    Verdict.MEAN_OF_MEANS: (
        "the loop averages means, so tokens of long micro-batches count for less. Give "
        "optax_tokenaccum.MultiSteps the loss's own count as num_tokens (mask.size "
        "changes nothing), or make_train_step a summed loss."
    ),
    Verdict.DISCARDED: (
        "no update moves the parameters: none closes the window, or it is thrown away. "
        "If something moves them, run uses another optimizer than the one it is given."
    ),
    Verdict.NOT_DIVIDED: "the loop applies a sum. Divide it once, by the tokens.",
    Verdict.DIVIDED_TWICE: "divided by tokens and by k: use_grad_mean=False helps.",
    Verdict.LAST_MICRO_BATCH_ONLY: "only the last gradient is applied: sum them.",
    Verdict.STEPPED_EVERY_MICRO_BATCH: "wrap the optimizer in token_accumulation.",
}
NOT_FINITE = (
    "the parameters are not finite after the window. A float16 sum overflows (keep "
    "sums in float32); the mean of a micro-batch without tokens is 0/0 (leave it out)."
)
NOT_A_SUM = (
    "the applied gradient is not a sum of these micro-batches' gradients. Is it "
    "clipped by value? Was a window left open (close_window ends it)? Does padding "
    "count? Is there dropout, another loss, lower precision than in loss_fn (give "
    "rtol), a rescaling by parameter? Do devices take means? Does run freeze "
    "parameters (stop their gradient in loss_fn)?"
)
INSIDE = "Clip inside of the optimizer that run gets."
NO_SUM = "loss_fn returns a mean, or a count that is not a sum: see check_loss_fn."
COUPLED = (
    "loss_fn couples rows: its gradient for a micro-batch is not the sum of those for "
    "two halves. Contrastive and balance losses, BatchNorm and dropout do that, and "
    "sequences without an axis of rows: give each an axis of one row. "
    "coupled_value_and_grad has the gradient of such a loss; or keep such rows in one "
    "micro-batch, or leave the term out."
)
OF_DEVICES = (
    "devices take the mean of their own means. In pmap or shard_map, write "
    "t = psum(n, axis), g = psum(g * n, axis) / t for the gradient g of a mean over n "
    "tokens, and num_tokens=t."
)
ON_ZEROS = (
    "the optimizer also runs on zeros, {} times in this window, as behind "
    "optax.apply_every: moments decay, and weight decay and schedules go on. Put it "
    "inside of token_accumulation."
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
        return {
            Verdict.EXACT: self.right[None],
            Verdict.MEAN_OF_MEANS: np.outer([1 / k, 1 / np.count_nonzero(n)], inverse),
            Verdict.NOT_DIVIDED: np.ones((1, k)),
            Verdict.DIVIDED_TWICE: np.full((1, k), 1 / total / k),
            Verdict.LAST_MICRO_BATCH_ONLY: self.forms_of_one(k - 1),
        }

    def forms_of_one(self, i: int) -> np.ndarray:
        """The same for the gradient of the micro-batch at index `i`."""
        n, k, total = self.tokens[i] or np.inf, len(self.tokens), self.tokens.sum()
        return np.outer([1 / n, 1 / n / k, 1 / total, 1], np.arange(k) == i)

    def candidates(self) -> dict[Verdict, float]:
        """The relative error of the applied gradient to each known one."""

        def nearest(got: np.ndarray, forms: np.ndarray) -> float:
            return min(distance(got, form @ self.gradients) for form in forms)

        found = {v: nearest(self.first, forms) for v, forms in self.forms().items()}
        exact, stepped = self.right @ self.gradients, np.inf
        found[Verdict.DISCARDED] = distance(self.first + exact, exact)
        if self.second is not None and np.count_nonzero(self.tokens) > 1:
            i, j, *_ = map(self.forms_of_one, np.flatnonzero(self.tokens))
            stepped = max(nearest(self.first, i), nearest(self.second, j))
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
    SGD of which only the first update, then only the second, moves the parameters, by
    more than their size: they then show the gradient in their own dtype. Least squares
    give the weight of each micro-batch, which must be 1. Last, two halves of a
    micro-batch are compared with the whole: a loss that couples rows is not `EXACT`.

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
      >>> from optax_tokenaccum import audit
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
    first, second, drift, zeros = _read(run, model, micro_batches, size)
    # Times 0.75, numbers round differently.
    scaled = gradients
    if not rtol:
        again = progress(micro_batches, "audit: rounding")
        scaled = np.array([summed(x, 0.75)[0] for x in again])
    noise = np.linalg.norm(scaled - gradients, axis=1)
    units = [float(jnp.finfo(x.dtype).eps) / 2 for x in model.trained]
    rtol = rtol or max(1e-4, *units, 4 * drift)
    window = MeasuredWindow(tokens, gradients, noise, rtol, first, second)
    verdict, explanation = _judge(window)
    if explanation == NOT_A_SUM and _is_of_devices(summed, micro_batches, window):
        explanation = OF_DEVICES
    doubt = _doubt(summed, micro_batches, window)
    said = [ON_ZEROS.format(zeros)] if zeros and window.first.any() else []
    if verdict is Verdict.EXACT and (said or doubt in (NO_SUM, COUPLED)):
        verdict = Verdict.UNKNOWN
    else:
        said.append(explanation)
    explanation = " ".join([*said, doubt]).rstrip()
    ends = np.cumsum([as_vector([x]).size for x in model.trained])[:-1]
    parts = [np.split(x, ends) for x in (first, exact, first - exact)]
    norms = [[float(np.linalg.norm(part)) for part in x] for x in parts]
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
        parameters=[*map(ParameterRow, model.names, *norms)],
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

    def summed(batch: Batch, share: float = 1.0) -> tuple[np.ndarray, float]:
        found, n = gradient(model.trained, batch, share)
        n = float(as_num_tokens(n, np.float64))
        found = as_vector(found) / share
        return np.where((n > 0) | np.isfinite(found), found, 0), n  # 0/0 adds nothing

    return summed


def _read(
    run: Run, model: Model, batches: list[Batch], exact: float
) -> tuple[np.ndarray, np.ndarray | None, float, int]:
    """What two updates apply, how far parameters drift without, and zero updates."""
    # Rounding of such an update costs a unit of the gradient, not of the parameters.
    # The margin leaves room for small gradients; float16 has none.
    margin = 4.0 if jnp.float16 in [x.dtype for x in model.trained] else 2.0**30
    start = as_vector(model.trained)
    size = np.linalg.norm(start) or exact
    scale = float(2.0 ** np.round(np.log2(margin * size / exact)))
    unit = 0.73 * exact / np.sqrt(start.size)  # what a gradient of zeros applies

    def after(which: int, of_zeros: float = 0.0) -> tuple[np.ndarray, float]:
        """The parameters after a run, and how far they moved."""
        own = model.build(model.trained)
        optimizer = _sgd_once(which, scale, of_zeros)
        found = model.numbers(run(optimizer, own, copied(batches)))
        return found, float(np.linalg.norm(found - start) / size)

    (moved, _), (still, drift) = (
        after(i, i * unit) for i in progress((0, 1), "audit: run")
    )
    zeros = 0
    if not drift <= margin**0.3:  # by a second update, by zeros, or NaN
        by_zeros = (start - still).min() / scale / unit  # of every parameter
        still, drift = after(1)
        if not drift <= margin**0.3:
            return (start - moved) / scale, (start - still) / scale, 0.0, 0
        zeros = round(by_zeros)
    return (still - moved) / scale, None, drift, zeros


def _sgd_once(
    which: int, scale: float, of_zeros: float
) -> optax.GradientTransformationExtraArgs:
    """SGD in which only update number `which`, from 0, moves parameters.

    Updates with zeros are not numbered; they apply `of_zeros`.
    """

    def update(
        updates: Gradients, state: OptState, params: Params = None, **extra: Any
    ) -> tuple[Gradients, OptState]:
        is_some = jnp.any(
            jnp.array([jnp.any(g != 0) for g in jax.tree.leaves(updates)])
        )

        def step(g: jax.Array) -> jax.Array:
            wide = g.astype(common_dtype(g.dtype, jnp.float32))  # float16 overflows
            size = jnp.where(is_some, jnp.where(state == which, wide, 0), of_zeros)
            return (-scale * size).astype(g.dtype)

        return jax.tree.map(step, updates), state + is_some.astype(jnp.int32)

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)


def _doubt(summed: Gradient, batches: list[Batch], window: MeasuredWindow) -> str:
    """What is wrong with `loss_fn` if two halves of a micro-batch do not add up."""
    try:
        sizes = [leading_axis(batch, "a micro-batch") for batch in batches]
        i = max(np.flatnonzero(window.tokens), key=lambda i: sizes[i])
        rows = sizes[i]
        parts = map(
            summed, _parts(batches[i], [slice(rows // 2), slice(rows // 2, rows)])
        )
        found, counts = map(np.array, zip(*parts, strict=True))
    except Exception:  # no rows, or whatever a loss raises at such a shape
        return NOT_CHECKED
    if rows < 2:
        return NOT_CHECKED
    g, n = window.gradients[i], window.tokens[i]
    limit = 2 * max(window.rtol * np.linalg.norm(found), 4 * window.noise[i])
    is_sum = abs(counts.sum() - n) <= 1e-4 * n
    if is_sum and np.linalg.norm(found.sum(0) - g) <= limit:
        return ""
    if max(np.ndim(x) for x in jax.tree.leaves(batches[i])) == 1:
        return NOT_CHECKED  # it may be a sequence
    return COUPLED if is_sum and distance(g, counts @ found / n) > 0.01 else NO_SUM


def _parts(batch: Batch, slices: list[slice]) -> list[Batch]:
    return [jax.tree.map(operator.itemgetter(rows), batch) for rows in slices]


def _is_of_devices(
    summed: Gradient, batches: list[Batch], window: MeasuredWindow
) -> bool:
    """Whether the loop applies means over the local devices' means."""
    d, means = jax.local_device_count(), []
    for batch in batches:
        rows = len(jax.tree.leaves(batch)[0])
        if d == 1 or rows % d:
            return False
        parts = _parts(
            batch, [slice(i, i + rows // d) for i in range(0, rows, rows // d)]
        )
        means.append(sum(g / (n or 1) for g, n in map(summed, parts)) / d)
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
    others = [repr(v.value) for v in found if v is not Verdict.EXACT]
    for i in np.flatnonzero(window.gradients.any(1)):
        one = np.diag(window.right)[i]
        if window.fits(window.right - one) or window.fits(window.right + one):
            others.append(f"'micro-batch {i}, from 0, lost or twice'")
    if Verdict.EXACT in found and others:
        return Verdict.UNKNOWN, (
            "cannot tell: the exact gradient of this window is, up to rounding, "
            f"also {' and '.join(others[:4])}. Give two or more ragged micro-batches, "
            "with gradients of similar sizes, or audit in float32, or give rtol."
        )
    if found:
        verdict = min(found, key=candidates.__getitem__)
        return verdict, EXPLANATIONS[verdict]
    return Verdict.UNKNOWN, _explain(window)


def _explain(window: MeasuredWindow) -> str:
    """Explains a gradient that matches no known one."""
    n, k, total = window.tokens, len(window.tokens), window.tokens.sum()
    size, clipped = np.linalg.norm(window.first), "is clipped to a norm of"
    if factor := window.factor_of(window.right):
        if factor < 0:
            return (
                f"the direction is opposite: the gradient is {factor:.6g} times what "
                "it should be. Is a reward descended, or an update negated twice?"
            )
        if 0 < factor < 1 and abs(size / float(f"{size:.1g}") - 1) <= 1e-3:
            return f"the gradient of the window {clipped} {size:.1g}. {INSIDE}"
        return (
            f"the direction is right, the size is not: it is {factor:.6g} times what it"
            f" should be. {'Is it clipped? ' * (factor < 1)}Are two devices summed (2) "
            f"or averaged (0.5)? Is it k ({k}), the tokens ({total:g}), or a sum given "
            f"as a mean ({total / k:g})? Or a learning rate, or a count of "
            f"{total / factor:.0f} tokens?"
        )
    if window.weights is None:
        return NOT_A_SUM
    values, errors = window.weights
    sizes = np.nan_to_num(values) * np.linalg.norm(window.gradients, axis=1)
    for norms in (sizes, sizes / np.maximum(n, 1e-9)):  # of a sum's or mean of means'
        equal = norms >= 0.98 * norms.max()
        if equal.sum() > 1 and np.ptp(values[equal]) > 0.1 * max(values[equal]):
            return (
                f"each micro-batch is clipped: {equal.sum()} of {k} have gradients of "
                f"the same norm. {INSIDE}"
            )
    if factor := window.factor_of(window.forms()[Verdict.MEAN_OF_MEANS][0]):
        if np.isclose(factor, k, rtol=0.01):
            return "means are added up, as by optax.apply_every. Average by tokens."
        if np.isclose(factor, k / total, rtol=0.01):
            return (
                "the sum of means is divided by all tokens: a mean is given where a "
                'sum is expected. Give summed losses, or gradients="mean".'
            )
        return f"the mean of means is applied, times {factor:.6g}."
    if max(n) > 2 and window.near(n).all():
        return (
            "a sum is given where a mean is expected. Give optax_tokenaccum.MultiSteps "
            'gradients="sum", or divide the loss by its tokens.'
        )
    lost, twice = (int(np.sum((errors < 0.5) & window.near(x))) for x in (0, 2))
    if lost or twice and (window.near(1) | window.near(2)).all():
        return (
            f"of the {k} micro-batches, {lost} count for nothing and {twice} twice: "
            "the window closes too early, or they are lost or repeated on the way."
        )
    # Weights of means add up to 1, whatever their counts.
    if abs(np.nansum(values * n) / total - 1) <= 0.01 and not (values < 0).any():
        return (
            "the means are averaged with wrong counts, see the weights. Count no "
            "padding, and shifted labels."
        )
    return (
        "the micro-batches are weighted in a way of their own. Is each of them clipped "
        "(do it inside the optimizer), or divided by maximum(n, 1) or a wrong count?"
    )
