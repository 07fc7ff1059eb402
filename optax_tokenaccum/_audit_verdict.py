"""Which of the known gradients an applied one is."""

from typing import Any, NamedTuple

import numpy as np

from optax_tokenaccum._audit_report import Verdict

# Verdict -> weights of the micro-batches' summed gradients, each in several forms.
Forms = dict[Verdict, list[np.ndarray]]

MENDS = {
    Verdict.EXACT: "the loop applies the token mean of the whole window.",
    Verdict.MEAN_OF_MEANS: (
        "the loop averages the means of its micro-batches, so a token counts for less "
        "the longer its micro-batch. Use optax_tokenaccum.MultiSteps and give each "
        "update its num_tokens, or make_train_step with a summed loss."
    ),
    Verdict.DISCARDED: (
        "the parameters did not move: the updates of the one call that closes the "
        "window are thrown away, or none closes it. Apply the updates of every call, "
        "those of an open window are zeros; make_train_step has none to lose."
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
NOT_FINITE = (
    "the parameters are not finite after the window. Sums in float16 overflow: keep "
    "them in float32, and use a mean loss with gradients='mean'."
)
SEVERAL_STEPS = (
    "the optimizer takes several steps, and they are not those of a micro-batch each. "
    "run must be one window, in which the optimizer takes one step."
)
NO_SUM = (
    "the applied gradient is no sum of these micro-batches' gradients. A window left "
    "open by what came before (end it with close_window), another loss, dropout, or a "
    "rescaling by parameter would do that."
)


class Evidence(NamedTuple):
    """What was measured.

    Attributes:
      gradients: of each micro-batch's summed loss, `[k, parameters]`.
      tokens: of each micro-batch, `[k]`.
      first: the gradient of the loop's first update, `[parameters]`.
      second: of its second; zeros where there was none.
      rtol: the relative error of a right gradient.
    """

    gradients: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    second: np.ndarray
    rtol: float

    @property
    def exact(self) -> np.ndarray:
        return self.gradients.sum(0) / self.tokens.sum()

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """The sum of the micro-batches' gradients, each times its weight."""
        return weights @ self.gradients

    def is_near(self, got: np.ndarray, expected: np.ndarray) -> bool:
        return distance(got, expected) <= self.rtol


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; infinite where either has no numbers to compare."""
    size = np.linalg.norm(expected)
    if not size or not np.isfinite(got).all():
        return np.inf
    return float(np.linalg.norm(got - expected) / size)


def judge(evidence: Evidence) -> dict[str, Any]:
    """The fields of an `AuditReport`, but for its parameters."""
    applied, exact = evidence.first, evidence.exact
    stepped_again = bool(evidence.second.any())  # NaN is a movement too
    candidates = _candidates(evidence, stepped_again)
    verdict, factor, explanation = _conclude(evidence, candidates, stepped_again)
    size = np.linalg.norm(applied) * np.linalg.norm(exact)
    return {
        "verdict": verdict,
        "explanation": explanation,
        "relative_error": distance(applied, exact),
        "cosine": float(applied @ exact / size) if 0 < size < np.inf else 0.0,
        "factor": factor,
        "rtol": evidence.rtol,
        "candidates": candidates,
        "weights": _weights(evidence),
    }


def _forms(evidence: Evidence) -> Forms:
    """The gradients of one update that have a name, by their weights."""
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


def _candidates(evidence: Evidence, stepped_again: bool) -> dict[Verdict, float]:
    """Relative error of what was applied to the nearest form of each candidate."""

    def nearest(got: np.ndarray, forms: list[np.ndarray]) -> float:
        return min(distance(got, evidence.weighted(weights)) for weights in forms)

    found = {
        verdict: nearest(evidence.first, forms)
        for verdict, forms in _forms(evidence).items()
    }
    size = np.linalg.norm(evidence.exact)
    found[Verdict.DISCARDED] = float(np.linalg.norm(evidence.first) / size)
    found[Verdict.STEPPED_EVERY_MICRO_BATCH] = np.inf
    if stepped_again:
        # Updates of a micro-batch each: the first of the first, the second of the next.
        places = np.flatnonzero(evidence.tokens)[:2]
        errors = [
            nearest(got, _forms_of_one(np.arange(len(evidence.tokens)) == i, evidence))
            for got, i in zip((evidence.first, evidence.second), places, strict=False)
        ]
        if len(errors) == 2:
            found[Verdict.STEPPED_EVERY_MICRO_BATCH] = max(errors)
    return found


def _conclude(
    evidence: Evidence, candidates: dict[Verdict, float], stepped_again: bool
) -> tuple[Verdict, float | None, str]:
    """Verdict, factor, and the sentence that says so."""
    rtol = evidence.rtol
    if not np.isfinite(evidence.first).all():
        return Verdict.UNKNOWN, None, NOT_FINITE
    if stepped_again:
        verdict = Verdict.STEPPED_EVERY_MICRO_BATCH
        if candidates[verdict] <= rtol:
            return verdict, None, MENDS[verdict]
        return Verdict.UNKNOWN, None, SEVERAL_STEPS
    if not evidence.first.any():
        return Verdict.DISCARDED, None, MENDS[Verdict.DISCARDED]
    within = [verdict for verdict, error in candidates.items() if error <= rtol]
    if Verdict.EXACT in within:
        return _exact_unless_ambiguous(evidence)
    factor = _factor(evidence, evidence.exact)
    if within:
        verdict = min(within, key=candidates.__getitem__)
        return verdict, factor, MENDS[verdict]
    return Verdict.UNKNOWN, factor, _unknown(evidence, factor)


def _exact_unless_ambiguous(evidence: Evidence) -> tuple[Verdict, float | None, str]:
    exact, rtol = evidence.exact, evidence.rtol
    same = [
        verdict.value
        for verdict, forms in _forms(evidence).items()
        if verdict is not Verdict.EXACT
        and any(distance(evidence.weighted(form), exact) <= 2 * rtol for form in forms)
    ]
    if not same:
        return Verdict.EXACT, 1.0, MENDS[Verdict.EXACT]
    explanation = (
        "cannot tell: on these micro-batches the exact gradient is as good as that "
        f"which is {' or '.join(same)}. Give it ragged micro-batches, two or more with "
        f"different numbers of tokens: got {evidence.tokens.tolist()}."
    )
    return Verdict.UNKNOWN, None, explanation


def _unknown(evidence: Evidence, factor: float | None) -> str:
    """What can be said of a gradient that has no name."""
    if factor is not None:
        size = _name(factor, evidence)
        return f"the direction is right, the size is not: {size}."
    mean_of_means, *_ = _forms(evidence)[Verdict.MEAN_OF_MEANS]
    factor = _factor(evidence, evidence.weighted(mean_of_means))
    if factor is not None:
        size = _name(factor, evidence)
        return (
            "the direction is that of a mean of means, and the size is wrong as well: "
            f"{size}. Use make_train_step with a summed loss."
        )
    weights = _weights(evidence)
    if weights is None:
        return NO_SUM
    lost = sum(abs(weight) <= evidence.rtol for weight in weights)
    if lost:
        return (
            f"{lost} of the {len(weights)} micro-batches count for nothing: the window "
            "closes without them, or they are lost on the way."
        )
    return (
        "the micro-batches are weighted in a way of their own, a token with "
        f"{min(weights):.3g} to {max(weights):.3g} where 1 is exact. Something "
        "rescales each of them: clipping, say, which belongs inside the optimizer that "
        "runs once a window."
    )


def _factor(evidence: Evidence, direction: np.ndarray) -> float | None:
    """How many times `direction` was applied, or `None` where it was not."""
    factor = float(evidence.first @ direction / (direction @ direction))
    is_it = factor and evidence.is_near(evidence.first, factor * direction)
    return factor if is_it else None


def _name(factor: float, evidence: Evidence) -> str:
    k, total = len(evidence.tokens), evidence.tokens.sum()
    names = {
        "k, the number of micro-batches": k,
        "1 over k, the number of micro-batches": 1 / k,
        "the number of tokens": total,
        "1 over the number of tokens": 1 / total,
        "the mean number of tokens in a micro-batch": total / k,
        "k over the number of tokens": k / total,
        "the sign alone: it goes uphill": -1,
        "are two devices summed, or is a window counted twice?": 2,
        "are two devices averaged where they should be summed?": 0.5,
    }
    known = [
        f" ({name})"
        for name, value in names.items()
        if abs(factor / value - 1) <= evidence.rtol
    ]
    return f"it is {factor:.6g} times what it should be{''.join(known[:1])}"


def _weights(evidence: Evidence) -> tuple[float, ...] | None:
    """What a token of each micro-batch counts for, if that explains it."""
    if not np.isfinite(evidence.first).all():
        return None
    has_tokens = evidence.tokens > 0
    columns = evidence.gradients[has_tokens].T
    found, _, rank, _ = np.linalg.lstsq(columns, evidence.first, rcond=None)
    if rank < columns.shape[1] or not evidence.first.any():
        return None
    if not evidence.is_near(columns @ found, evidence.first):
        return None
    weights = np.zeros(len(evidence.tokens))
    weights[has_tokens] = found * evidence.tokens.sum()
    return tuple(weights.tolist())
