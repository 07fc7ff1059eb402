"""Decides which of the known gradients a loop applied."""

from typing import NamedTuple

import numpy as np

from optax_tokenaccum._audit.report import AuditReport, Parameter, Verdict
from optax_tokenaccum._audit.weights import Weights, estimate_weights

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


class Evidence(NamedTuple):
    """The measurements that a verdict is based on."""

    gradients: np.ndarray  # of each micro-batch's summed loss, [k, parameters]
    tokens: np.ndarray  # of each micro-batch, [k]
    first: np.ndarray  # the gradient of the loop's first update, [parameters]
    second: np.ndarray  # of its second update; zeros if there was none
    rtol: float  # the relative error up to which a gradient counts as right
    noise: float = 0.0  # measured rounding error if `rtol` is derived from it, relative

    @property
    def nearest(self) -> float:
        """The relative error to the nearest known gradient."""
        return min(self.candidates().values())

    @property
    def exact(self) -> np.ndarray:
        return self.gradients.sum(0) / self.tokens.sum()

    def forms(self) -> dict[Verdict, np.ndarray]:
        """The known gradients of a single update.

        Each has one or more forms: weights of the micro-batches' summed gradients, as
        `[forms, k]`.
        """
        n, k, total = self.tokens, len(self.tokens), self.tokens.sum()
        inverse = np.divide(1, n, out=np.zeros(k), where=n > 0)
        return {
            Verdict.EXACT: np.full((1, k), 1 / total),
            Verdict.MEAN_OF_MEANS: np.outer([1 / k, 1 / np.count_nonzero(n)], inverse),
            Verdict.NOT_DIVIDED: np.ones((1, k)),
            Verdict.DIVIDED_TWICE: np.full((1, k), 1 / total / k),
            Verdict.LAST_MICRO_BATCH_ONLY: self.forms_of_one(k - 1),
        }

    def forms_of_one(self, i: int) -> np.ndarray:
        """The same for the gradient of the micro-batch at index `i`."""
        n, k, total = self.tokens, len(self.tokens), self.tokens.sum()
        own = max(n[i], 1e-300)
        return np.outer([1 / own, 1 / own / k, 1 / total, 1], np.arange(k) == i)

    def candidates(self) -> dict[Verdict, float]:
        """Relative error of the applied gradient to each candidate's nearest form."""

        def nearest(got: np.ndarray, forms: np.ndarray) -> float:
            return min(distance(got, form) for form in forms @ self.gradients)

        found = {v: nearest(self.first, forms) for v, forms in self.forms().items()}
        size = np.linalg.norm(self.exact)
        found[Verdict.DISCARDED] = float(np.linalg.norm(self.first) / size)
        found[Verdict.STEPPED_EVERY_MICRO_BATCH] = np.inf
        places = np.flatnonzero(self.tokens)[:2]
        if self.second.any() and len(places) == 2:
            found[Verdict.STEPPED_EVERY_MICRO_BATCH] = max(
                nearest(got, self.forms_of_one(i))
                for got, i in zip((self.first, self.second), places, strict=True)
            )
        return found

    def factor_of(self, direction: np.ndarray) -> float | None:
        """The applied multiple of `direction`; `None` if it was not applied."""
        factor = float(self.first @ direction / (direction @ direction))
        is_it = distance(self.first, factor * direction) <= self.rtol
        return factor if factor and is_it else None


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; infinite if `expected` is zero or `got` is not finite."""
    size = np.linalg.norm(expected)
    if not size or not np.isfinite(got).all():
        return np.inf
    return float(np.linalg.norm(got - expected) / size)


def judge(evidence: Evidence, parameters: list[Parameter]) -> AuditReport:
    """The report on the evidence."""
    applied, exact = evidence.first, evidence.exact
    weights = estimate_weights(
        evidence.gradients, evidence.tokens, applied, evidence.rtol
    )
    found = _conclude(evidence, weights)
    is_known = isinstance(found, Verdict)
    verdict = found if is_known else Verdict.UNKNOWN
    explanation = EXPLANATIONS[found] if is_known else found
    if evidence.noise and not explanation.startswith("cannot tell"):
        explanation += (
            f" Rounding noise of {evidence.noise:.1e} was measured and is tolerated."
        )
    size = np.linalg.norm(applied) * np.linalg.norm(exact)
    shown = None
    if weights is not None:
        has_gradient = evidence.gradients.any(1)
        shown = tuple(np.where(has_gradient, weights.values, np.nan).tolist())
    return AuditReport(
        verdict=verdict,
        explanation=explanation,
        relative_error=distance(applied, exact),
        cosine=float(applied @ exact / size) if 0 < size < np.inf else 0.0,
        factor=1.0 if verdict is Verdict.EXACT else evidence.factor_of(exact),
        rtol=evidence.rtol,
        candidates=evidence.candidates(),
        weights=shown,
        parameters=parameters,
    )


def _conclude(evidence: Evidence, weights: Weights | None) -> Verdict | str:
    """The verdict, or what an unknown gradient may be."""
    candidates, rtol, noise = evidence.candidates(), evidence.rtol, evidence.noise
    if not np.isfinite(evidence.first).all():
        empty = np.flatnonzero(evidence.tokens == 0).tolist()
        return "the parameters are not finite after the window. " + (
            f"Micro-batches {empty}, counted from 0, have no tokens, so their mean "
            "loss is 0/0: leave them out, as optax_tokenaccum.MultiSteps does."
            if empty
            else "Sums in float16 overflow: keep them in float32, and use a mean loss "
            "with gradients='mean'."
        )
    if evidence.second.any():  # NaN also counts as movement
        verdict = Verdict.STEPPED_EVERY_MICRO_BATCH
        if candidates[verdict] <= max(rtol, STEPS_RTOL):
            return verdict
        return (
            "the optimizer takes several steps, and they are not those of a "
            "micro-batch each. run must be one window, in which the optimizer takes "
            "one step."
        )
    if not evidence.first.any():
        return Verdict.DISCARDED
    if noise > MOST_NOISE:
        return (
            f"cannot tell: at nearby parameters the gradient differs by {noise:.0%} in "
            "a way that loss_fn does not explain. Dropout does that: leave it out or "
            "fix its key. If it is rounding, give rtol."
        )
    within = {verdict: x for verdict, x in candidates.items() if x <= rtol}
    if Verdict.EXACT in within:
        if weights is not None and not weights.are_near(1).all():
            return weights.explanation()
        return _doubt(evidence, weights) or Verdict.EXACT
    # As many numbers as micro-batches would explain any rounding.
    if weights is not None and len(evidence.first) > len(evidence.tokens):
        within.pop(Verdict.DISCARDED, None)
    if within:
        return min(within, key=within.__getitem__)
    return _explain(evidence, weights)


def _doubt(evidence: Evidence, weights: Weights | None) -> str | None:
    """Why the exact gradient may be another one; `None` if it cannot."""
    tokens, k, total = evidence.tokens, len(evidence.tokens), evidence.tokens.sum()

    def may_be(form: np.ndarray) -> bool:
        got = form @ evidence.gradients
        far = distance(got, evidence.exact) > 2 * evidence.rtol
        return not (far or weights and not weights.are_near(form * total).all())

    same = [
        verdict.value
        for verdict, forms in evidence.forms().items()
        if verdict is not Verdict.EXACT and any(map(may_be, forms))
    ]
    if same:
        return (
            "cannot tell: on these micro-batches the exact gradient is as good as that "
            f"which is {' or '.join(same)}. Give it ragged micro-batches, two or more "
            f"with different numbers of tokens: got {tokens.tolist()}."
        )
    hidden = [
        i
        for i in np.flatnonzero(evidence.gradients.any(1)).tolist()
        if any(may_be((1 + more * np.eye(k)[i]) / total) for more in (-1, 1))
    ]
    if hidden:
        return (
            f"cannot tell: rounding hides whether micro-batches {hidden}, counted from "
            "0, are lost or count twice, so small are their gradients. Give it "
            "micro-batches of similar sizes, or audit in float32."
        )
    return None


def _explain(evidence: Evidence, weights: Weights | None) -> str:
    """Explains a gradient that matches no candidate."""
    factor = evidence.factor_of(evidence.exact)
    if factor is not None:
        name = _name(factor, evidence) or _name_of_scale(factor, evidence)
        return (
            "the direction is right, the size is not: it is "
            f"{factor:.6g} times what it should be ({name})."
        )
    mean_of_means = evidence.forms()[Verdict.MEAN_OF_MEANS][0]
    factor = evidence.factor_of(mean_of_means @ evidence.gradients)
    if factor is not None:
        name = _name(factor, evidence)
        return (
            "the direction is that of a mean of means, and the size is wrong as well: "
            f"it is {factor:.6g} times what it should be{name and f' ({name})'}. Use "
            "make_train_step with a summed loss."
        )
    return NOT_A_SUM if weights is None else weights.explanation()


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
    known = (x for x in names if abs(factor / names[x] - 1) <= evidence.rtol)
    return "; or: ".join(known)


def _name_of_scale(factor: float, evidence: Evidence) -> str:
    """Names what may scale a window by any factor."""
    total = evidence.tokens.sum()
    count = total / factor
    if count < 0 or abs(count - round(count)) > evidence.rtol * count:
        return "clipping and a learning rate do that"
    return (
        f"a count of {round(count)} tokens where loss_fn counts {total:g} does that, "
        "and so do clipping and a learning rate"
    )
