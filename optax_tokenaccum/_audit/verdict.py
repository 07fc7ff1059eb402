"""Decides which of the known gradients a loop applied."""

from typing import Any, NamedTuple

import numpy as np

from optax_tokenaccum._audit.report import Verdict

# Verdict -> its forms, each the weights of the micro-batches' summed gradients.
Forms = dict[Verdict, list[np.ndarray]]

EXPLANATIONS = {
    Verdict.EXACT: "the loop applies the token mean of the whole window.",
    Verdict.MEAN_OF_MEANS: (
        "the loop averages the means of its micro-batches, so a token counts for less "
        "the longer its micro-batch. Use optax_tokenaccum.MultiSteps, and give each "
        "update the loss's own count as num_tokens (a count that is the same for all, "
        "such as mask.size, changes nothing); or make_train_step with a summed loss."
    ),
    Verdict.DISCARDED: (
        "the parameters did not move: the updates of the one call that closes the "
        "window are thrown away, or no call closes it. Apply the updates of every "
        "call, those of an open window are zeros; make_train_step has none to lose. Or "
        "run takes its step with another optimizer than the one that it is given, or "
        "gives it zeros first, as optax.apply_every does."
    ),
    Verdict.NOT_DIVIDED: (
        "the loop applies the sum over tokens. Divide once, by the number of tokens in "
        "the window; token_accumulation does."
    ),
    Verdict.DIVIDED_TWICE: (
        "the loop divides by the tokens of the window and by the number of its "
        "micro-batches as well. Drop the second division: losses that are divided by "
        "the window's count are to be summed (use_grad_mean=False)."
    ),
    Verdict.LAST_MICRO_BATCH_ONLY: (
        "only the last micro-batch's gradient is applied, the others are lost. Carry "
        "the sums from one micro-batch to the next."
    ),
    Verdict.STEPPED_EVERY_MICRO_BATCH: (
        "the optimizer takes a step for every micro-batch. Wrap it in "
        "token_accumulation, or use make_train_step, so that it takes one a window."
    ),
}
NOT_FINITE = "the parameters are not finite after the window. "
OVERFLOW = (
    "Sums in float16 overflow: keep them in float32, and use a mean loss with "
    "gradients='mean'."
)
WITHOUT_TOKENS = (
    "Micro-batches {}, counted from 0, have no tokens, so their mean loss is 0/0: "
    "leave them out, as optax_tokenaccum.MultiSteps does."
)
SEVERAL_STEPS = (
    "the optimizer takes several steps, and they are not those of a micro-batch each. "
    "run must be one window, in which the optimizer takes one step."
)
TOO_NOISY = (
    "cannot tell: at nearby parameters the gradient differs by {:.0%} in a way that "
    "loss_fn does not explain. Dropout does that: leave it out or fix its key. If it "
    "is rounding, give rtol."
)
SUM_FOR_MEAN = (
    "a sum is given where a mean is expected, so each micro-batch is weighted by its "
    'tokens once too often. Give optax_tokenaccum.MultiSteps gradients="sum", or '
    "divide the loss by its tokens. Or the loop is right, and loss_fn returns a mean: "
    "check_loss_fn tells."
)
WRONG_COUNTS = (
    "the means of the micro-batches are averaged with wrong counts, in the proportion "
    "of {} where loss_fn counts {}. Give num_tokens the count that loss_fn returns: "
    "without padding, and of labels after their shift."
)
WRONG_DIVISORS = (
    "the losses of the micro-batches are divided by wrong counts, by {} where loss_fn "
    "counts {}. Divide by the count that loss_fn returns: without padding, and of "
    "labels after their shift."
)
NOT_A_SUM = (
    "the applied gradient is not a sum of these micro-batches' gradients. Possible "
    "reasons: a window left open by earlier calls (end it with close_window); another "
    "loss; dropout; means that devices take of their own rows; parameters that run "
    "keeps frozen (also stop their gradient in loss_fn); or weight decay or a "
    "rescaling by parameter before the given optimizer."
)

# Relative error of a step on one micro-batch; for a step on a window it is larger.
STEPS_RTOL = 0.1
MOST_NOISE = 0.1  # relative; larger noise is not rounding
SIGMAS = 8  # 5 was seen: a token's rounding errors are correlated


class Evidence(NamedTuple):
    """The measurements that a verdict is based on."""

    gradients: np.ndarray  # of each micro-batch's summed loss, [k, parameters]
    tokens: np.ndarray  # of each micro-batch, [k]
    first: np.ndarray  # the gradient of the loop's first update, [parameters]
    second: np.ndarray  # of its second update; zeros if there was none
    rtol: float  # the relative error up to which a gradient counts as right
    noise: float = 0.0  # measured rounding error if `rtol` is derived from it, relative

    @property
    def stepped_again(self) -> bool:
        return bool(self.second.any())  # NaN also counts as movement

    @property
    def nearest(self) -> float:
        """The relative error to the nearest known gradient."""
        return min(_candidates(self).values())

    @property
    def exact(self) -> np.ndarray:
        return self.gradients.sum(0) / self.tokens.sum()


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; infinite if `expected` is zero or `got` is not finite."""
    size = np.linalg.norm(expected)
    if not size or not np.isfinite(got).all():
        return np.inf
    return float(np.linalg.norm(got - expected) / size)


class Weights(NamedTuple):
    """The weight of a token of each micro-batch, relative to the exact mean."""

    values: np.ndarray  # [k]; an exact weight is 1
    errors: np.ndarray  # how far rounding may move each weight, [k]

    def are_near(self, expected: Any) -> np.ndarray:
        return abs(self.values - expected) <= self.errors * np.maximum(1, expected)


def judge(evidence: Evidence) -> dict[str, Any]:
    """The fields of an `AuditReport`, except `parameters`."""
    applied, exact = evidence.first, evidence.exact
    candidates, weights = _candidates(evidence), _weights(evidence)
    verdict, factor, explanation = _conclude(evidence, candidates, weights)
    if evidence.noise and not explanation.startswith("cannot tell"):
        explanation += (
            f" Rounding noise of {evidence.noise:.1e} was measured and is tolerated."
        )
    size = np.linalg.norm(applied) * np.linalg.norm(exact)
    shown = None
    if weights is not None:
        has_gradient = evidence.gradients.any(1)
        shown = tuple(np.where(has_gradient, weights.values, np.nan).tolist())
    return {
        "verdict": verdict,
        "explanation": explanation,
        "relative_error": distance(applied, exact),
        "cosine": float(applied @ exact / size) if 0 < size < np.inf else 0.0,
        "factor": factor,
        "rtol": evidence.rtol,
        "candidates": candidates,
        "weights": shown,
    }


def _forms(evidence: Evidence) -> Forms:
    """The known gradients of a single update, as weights."""
    n = evidence.tokens
    k, total = len(n), n.sum()
    inverse = np.divide(1, n, out=np.zeros(k), where=n > 0)
    last = np.arange(k) == k - 1
    return {
        Verdict.EXACT: [np.full(k, 1 / total)],
        Verdict.MEAN_OF_MEANS: [inverse / k, inverse / np.count_nonzero(n)],
        Verdict.NOT_DIVIDED: [np.ones(k)],
        Verdict.DIVIDED_TWICE: [np.full(k, 1 / total / k)],
        Verdict.LAST_MICRO_BATCH_ONLY: _forms_of_one(last, evidence),
    }


def _forms_of_one(which: np.ndarray, evidence: Evidence) -> list[np.ndarray]:
    n = evidence.tokens
    own, k, total = max(n[which].item(), 1e-300), len(n), n.sum()
    return [which / own, which / own / k, which / total, which * 1.0]


def _candidates(evidence: Evidence) -> dict[Verdict, float]:
    """Relative error of the applied gradient to each candidate's nearest form."""

    def nearest(got: np.ndarray, forms: list[np.ndarray]) -> float:
        return min(distance(got, form @ evidence.gradients) for form in forms)

    found = {
        verdict: nearest(evidence.first, forms)
        for verdict, forms in _forms(evidence).items()
    }
    size = np.linalg.norm(evidence.exact)
    found[Verdict.DISCARDED] = float(np.linalg.norm(evidence.first) / size)
    found[Verdict.STEPPED_EVERY_MICRO_BATCH] = np.inf
    if evidence.stepped_again:
        # The first update must match the first micro-batch with tokens, the second
        # update the next one.
        places = np.flatnonzero(evidence.tokens)[:2]
        errors = [
            nearest(got, _forms_of_one(np.arange(len(evidence.tokens)) == i, evidence))
            for got, i in zip((evidence.first, evidence.second), places, strict=False)
        ]
        if len(errors) == 2:
            found[Verdict.STEPPED_EVERY_MICRO_BATCH] = max(errors)
    return found


def _conclude(
    evidence: Evidence, candidates: dict[Verdict, float], weights: Weights | None
) -> tuple[Verdict, float | None, str]:
    """The verdict, the factor, and the explanation."""
    rtol = evidence.rtol
    if not np.isfinite(evidence.first).all():
        empty = np.flatnonzero(evidence.tokens == 0).tolist()
        cause = WITHOUT_TOKENS.format(empty) if empty else OVERFLOW
        return Verdict.UNKNOWN, None, NOT_FINITE + cause
    if evidence.stepped_again:
        verdict = Verdict.STEPPED_EVERY_MICRO_BATCH
        if candidates[verdict] <= max(rtol, STEPS_RTOL):
            return verdict, None, EXPLANATIONS[verdict]
        return Verdict.UNKNOWN, None, SEVERAL_STEPS
    if not evidence.first.any():
        return Verdict.DISCARDED, None, EXPLANATIONS[Verdict.DISCARDED]
    if evidence.noise > MOST_NOISE:
        return Verdict.UNKNOWN, None, TOO_NOISY.format(evidence.noise)
    within = [verdict for verdict, error in candidates.items() if error <= rtol]
    if Verdict.EXACT in within:
        if weights is None or weights.are_near(1).all():
            return _exact_unless_ambiguous(evidence, weights)
        return Verdict.UNKNOWN, None, _unknown_weights(weights, evidence.tokens)
    factor = _factor(evidence, evidence.exact)
    # As many numbers as micro-batches would explain any rounding.
    is_gradient = weights is not None and len(evidence.first) > len(evidence.tokens)
    if is_gradient and Verdict.DISCARDED in within:
        within.remove(Verdict.DISCARDED)
    if within:
        verdict = min(within, key=candidates.__getitem__)
        return verdict, factor, EXPLANATIONS[verdict]
    return Verdict.UNKNOWN, factor, _unknown(evidence, factor, weights)


def _exact_unless_ambiguous(
    evidence: Evidence, weights: Weights | None
) -> tuple[Verdict, float | None, str]:
    """Concludes `EXACT`, unless the weights allow another gradient that fits too."""
    total, places = evidence.tokens.sum(), np.arange(len(evidence.tokens))

    def may_be(form: np.ndarray) -> bool:
        got = form @ evidence.gradients
        far = distance(got, evidence.exact) > 2 * evidence.rtol
        return not (far or weights and not weights.are_near(form * total).all())

    same = [
        verdict.value
        for verdict, forms in _forms(evidence).items()
        if verdict is not Verdict.EXACT and any(map(may_be, forms))
    ]
    hidden = [
        i
        for i in places[evidence.gradients.any(1)].tolist()
        if any(
            may_be((places != i) / total + twice * (places == i))
            for twice in (0, 2 / total)
        )
    ]
    if same:
        explanation = (
            "cannot tell: on these micro-batches the exact gradient is as good as that "
            f"which is {' or '.join(same)}. Give it ragged micro-batches, two or more "
            f"with different numbers of tokens: got {evidence.tokens.tolist()}."
        )
    elif hidden:
        explanation = (
            f"cannot tell: rounding hides whether micro-batches {hidden}, counted from "
            "0, are lost or count twice, so small are their gradients. Give it "
            "micro-batches of similar sizes, or audit in float32."
        )
    else:
        return Verdict.EXACT, 1.0, EXPLANATIONS[Verdict.EXACT]
    return Verdict.UNKNOWN, None, explanation


def _unknown(evidence: Evidence, factor: float | None, weights: Weights | None) -> str:
    """Explains a gradient that matches no candidate."""
    if factor is not None:
        name = _name(factor, evidence) or _name_of_scale(factor, evidence)
        return f"the direction is right, the size is not: {_times(factor)}{name}."
    mean_of_means, *_ = _forms(evidence)[Verdict.MEAN_OF_MEANS]
    factor = _factor(evidence, mean_of_means @ evidence.gradients)
    if factor is not None:
        return (
            "the direction is that of a mean of means, and the size is wrong as well: "
            f"{_times(factor)}{_name(factor, evidence)}. Use make_train_step with a "
            "summed loss."
        )
    return NOT_A_SUM if weights is None else _unknown_weights(weights, evidence.tokens)


def _unknown_weights(weights: Weights, tokens: np.ndarray) -> str:
    if max(tokens) > 2 and weights.are_near(tokens).all():
        return SUM_FOR_MEAN
    told = weights.errors < 0.5
    lost, twice = (np.sum(told & weights.are_near(times)) for times in (0, 2))
    if lost:
        return (
            f"{lost} of the {len(told)} micro-batches count for nothing: the window "
            "closes without them, or they are lost on the way."
        )
    if twice and (weights.are_near(1) | weights.are_near(2)).all():
        verb = "count" if twice > 1 else "counts"
        return f"{twice} of the {len(told)} micro-batches {verb} twice."
    if (explanation := _wrong_counts(weights, tokens)) is not None:
        return explanation
    values = weights.values
    return (
        "the micro-batches are weighted in a way of their own, a token with "
        f"{min(values):.3g} to {max(values):.3g} where 1 is exact. Something "
        "rescales each of them: clipping, which belongs inside the optimizer that runs "
        "once a window, or wrong counts."
    )


def _wrong_counts(weights: Weights, tokens: np.ndarray) -> str | None:
    """Explains weights that are those of wrong counts; `None` if they are not."""
    n, w, errors = (x[tokens > 0] for x in (tokens, *weights))
    if (w <= 0).any():
        return None

    def shown(counts: np.ndarray) -> str:
        return ", ".join(f"{count:.4g}" for count in counts[:4])

    # Weights of means add up to 1, whatever their counts. Clipped ones do not.
    total, slack = n.sum(), errors @ n
    if abs(w @ n - total) <= min(slack, 0.01 * total):
        # Only the proportion is known. Counts that are off by a constant grow by 1 with
        # every token.
        slope = np.polyfit(n, w * n, 1)[0] if np.ptp(n) else 1.0
        return WRONG_COUNTS.format(shown(w * n / (slope if slope > 0 else 1)), shown(n))
    # The means may be weighted by their tokens, or all alike.
    for divisors in (n / w, total / len(tokens) / w):
        slack = divisors * errors
        is_whole = abs(divisors - np.round(divisors)) <= np.minimum(slack, 0.02)
        is_other = abs(divisors - n) > slack
        if is_other.sum() > 1 and (is_whole.all() or np.ptp(divisors) <= slack.min()):
            return WRONG_DIVISORS.format(shown(divisors), shown(n))
    return None


def _factor(evidence: Evidence, direction: np.ndarray) -> float | None:
    """The applied multiple of `direction`, or `None` if it was not applied."""
    factor = float(evidence.first @ direction / (direction @ direction))
    is_it = distance(evidence.first, factor * direction) <= evidence.rtol
    return factor if factor and is_it else None


def _times(factor: float) -> str:
    return f"it is {factor:.6g} times what it should be"


def _name(factor: float, evidence: Evidence) -> str:
    k, total = len(evidence.tokens), evidence.tokens.sum()
    names = {
        "k, the number of micro-batches": k,
        "1 over k, the number of micro-batches": 1 / k,
        "the number of tokens": total,
        "1 over the number of tokens": 1 / total,
        "the mean number of tokens in a micro-batch: a sum is given where a mean is "
        'expected. Use optax_tokenaccum.MultiSteps with gradients="sum"': total / k,
        "k over the number of tokens": k / total,
        "the sign alone: it goes uphill": -1,
        "are two devices summed, or is a window counted twice?": 2,
        "are two devices averaged where they should be summed?": 0.5,
    }
    known = [
        name
        for name, value in names.items()
        if abs(factor / value - 1) <= evidence.rtol
    ]
    return f" ({'; or: '.join(known)})" if known else ""


def _name_of_scale(factor: float, evidence: Evidence) -> str:
    """Names what may scale a window by any factor."""
    count = evidence.tokens.sum() / factor
    if count < 0 or abs(count - round(count)) > evidence.rtol * count:
        return " (clipping and a learning rate do that)"
    return (
        f" (a count of {round(count)} tokens where loss_fn counts "
        f"{evidence.tokens.sum():g} does that, and so do clipping and a learning rate)"
    )


def _weights(evidence: Evidence) -> Weights | None:
    """Estimates the weights; `None` if they do not explain the gradient."""
    first, has_tokens = evidence.first, evidence.tokens > 0
    if not np.isfinite(first).all() or not first.any():
        return None
    columns = evidence.gradients[has_tokens].T
    size, k = columns.shape
    left, singular, right = np.linalg.svd(columns, full_matrices=False)
    if size < k or singular[-1] <= singular[0] * size * np.finfo(float).eps:
        return None
    inverse = (right.T / singular) @ left.T
    found = inverse @ first
    rest = first - columns @ found
    if np.linalg.norm(rest) > evidence.rtol * np.linalg.norm(first):
        return None
    if size > 4 * k:
        # White's standard errors, because the noise differs from number to number.
        errors = SIGMAS * np.sqrt(inverse**2 @ rest**2)
    else:
        # There are too few numbers to estimate the noise: assume that it is rtol.
        errors = np.linalg.norm(inverse, axis=1) * evidence.rtol * np.linalg.norm(first)
    values, slack = np.zeros(len(has_tokens)), np.full(len(has_tokens), np.inf)
    total = evidence.tokens.sum()
    values[has_tokens], slack[has_tokens] = found * total, errors * total
    return Weights(values, evidence.rtol + slack)
