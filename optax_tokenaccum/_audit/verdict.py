"""Decides which of the known gradients a loop applied."""

from typing import NamedTuple

import numpy as np

from optax_tokenaccum._audit.report import AuditReport, Parameter, Verdict
from optax_tokenaccum._audit.weights import Weights, estimate_weights

EXPLANATIONS = {
    Verdict.EXACT: "the loop applies the exact mean of the window, by loss_fn's count.",
    Verdict.MEAN_OF_MEANS: (
        "the loop averages the means of its micro-batches, so a token counts for less "
        "the longer its micro-batch. Use optax_tokenaccum.MultiSteps, and give each "
        "update the loss's own count as num_tokens (a count that is the same for all, "
        "such as mask.size, changes nothing); or make_train_step with a summed loss."
    ),
    Verdict.DISCARDED: (
        "the parameters did not move: no call closes the window, or the updates of the "
        "call that does are thrown away (apply those of every call, or use "
        "make_train_step). Or run takes its step with another optimizer than the one "
        "that it is given, or gives it zeros first, as optax.apply_every does."
    ),
    Verdict.NOT_DIVIDED: (
        "the loop applies the sum over tokens. Divide once, by the number of tokens in "
        "the window; token_accumulation does."
    ),
    Verdict.DIVIDED_TWICE: (
        "the loop divides by the tokens of the window and also by the number of its "
        "micro-batches. Drop the second division (use_grad_mean=False)."
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
MOVED_BY_ANOTHER = (
    "the parameters move, but not by the optimizer that run is given: run takes its "
    "step with another one, such as a global optimizer (build the step inside run, "
    "from the one that it is given). Or something else moves them, such as weight "
    "decay by hand, and the update is thrown away."
)
NOT_A_SUM = (
    "the applied gradient is not a sum of these micro-batches' gradients. Possible "
    "reasons: a window left open by earlier calls (end it with close_window); padding "
    "that the loss counts; another loss; dropout; means that devices take of their own "
    "rows; parameters that run keeps frozen (also stop their gradient in loss_fn); or "
    "weight decay or a rescaling by parameter before the given optimizer."
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
    drifts: bool = False  # whether the loop moves parameters without any update
    noise: float = 0.0  # measured rounding error if `rtol` is derived from it, relative

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
        if self.second.any() and np.count_nonzero(self.tokens) > 1:
            i, j, *_ = map(self.forms_of_one, np.flatnonzero(self.tokens))
            errors = nearest(self.first, i), nearest(self.second, j)
            found[Verdict.STEPPED_EVERY_MICRO_BATCH] = max(errors)
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
    gradients, tokens, applied, _, rtol, _, noise = evidence
    exact = evidence.exact
    weights = estimate_weights(gradients, tokens, applied, rtol)
    found = _conclude(evidence, weights)
    verdict = found if isinstance(found, Verdict) else Verdict.UNKNOWN
    explanation = EXPLANATIONS[found] if isinstance(found, Verdict) else found
    if found is Verdict.DISCARDED and evidence.drifts:
        explanation = MOVED_BY_ANOTHER
    if noise and not explanation.startswith("cannot tell"):
        explanation += f" Rounding noise of {noise:.1e} was measured and is tolerated."
    candidates, factor = evidence.candidates(), evidence.factor_of(exact)
    if candidates[Verdict.EXACT] <= rtol:
        factor = 1.0 if verdict is Verdict.EXACT else None
    size = np.linalg.norm(applied) * np.linalg.norm(exact)
    shown = None
    if weights is not None:
        shown = tuple(np.where(gradients.any(1), weights.values, np.nan).tolist())
    return AuditReport(
        verdict=verdict,
        explanation=explanation,
        relative_error=distance(applied, exact),
        cosine=float(applied @ exact / size) if 0 < size < np.inf else 0.0,
        factor=factor,
        rtol=rtol,
        candidates=candidates,
        weights=shown,
        parameters=parameters,
    )


def _conclude(evidence: Evidence, weights: Weights | None) -> Verdict | str:
    """The verdict, or what an unknown gradient may be."""
    candidates, rtol, noise = evidence.candidates(), evidence.rtol, evidence.noise
    if not np.isfinite(evidence.first).all():
        empty = np.flatnonzero(evidence.tokens == 0).tolist()
        cause = "Keep sums in float32: float16 overflows."
        if empty:
            cause = (
                f"Micro-batches {empty}, counted from 0, have no tokens, so their mean "
                "loss is 0/0: leave them out, as optax_tokenaccum.MultiSteps does."
            )
        return f"the parameters are not finite after the window. {cause}"
    if evidence.second.any():  # NaN also counts as movement
        verdict = Verdict.STEPPED_EVERY_MICRO_BATCH
        if candidates[verdict] <= max(rtol, STEPS_RTOL):
            return verdict
        return (
            "the optimizer takes several steps, not one for each micro-batch. run must "
            "be one window, in which it takes one step."
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
    tokens, total = evidence.tokens, evidence.tokens.sum()
    others = {
        repr(verdict.value): forms
        for verdict, forms in evidence.forms().items()
        if verdict is not Verdict.EXACT
    }
    for i in np.flatnonzero(evidence.gradients.any(1)):
        more = np.outer([-1, 1], np.arange(len(tokens)) == i)
        others[f"'micro-batch {i}, from 0, lost or twice'"] = (1 + more) / total

    def may_be(form: np.ndarray) -> bool:
        got = form @ evidence.gradients
        far = distance(got, evidence.exact) > 2 * evidence.rtol
        return not (far or weights and not weights.are_near(form * total).all())

    same = [name for name, forms in others.items() if any(map(may_be, forms))]
    if not same:
        return None
    return (
        "cannot tell: on these micro-batches the exact gradient is, up to rounding, "
        f"also {' and '.join(same)}. Give it two or more ragged micro-batches, with "
        "different numbers of tokens but gradients of similar sizes, or audit in "
        f"float32: got {tokens.tolist()} tokens."
    )


def _explain(evidence: Evidence, weights: Weights | None) -> str:
    """Explains a gradient that matches no candidate."""
    factor, total = evidence.factor_of(evidence.exact), evidence.tokens.sum()
    if factor is not None:
        # Clipping the window and a learning rate also scale it by any factor.
        other = f"a count of {total / factor:.0f} tokens where loss_fn counts {total:g}"
        if factor < 0:
            other = "it goes uphill"
        return (
            "the direction is right, the size is not: "
            f"{_times(factor, evidence, f'{other}, clipping, or a learning rate?')}."
        )
    mean_of_means = evidence.forms()[Verdict.MEAN_OF_MEANS][0]
    factor = evidence.factor_of(mean_of_means @ evidence.gradients)
    if factor is not None:
        return (
            "the direction is that of a mean of means, and the size is wrong as well: "
            f"{_times(factor, evidence, 'clipping, or a learning rate?')}. Use "
            "make_train_step with a summed loss."
        )
    return NOT_A_SUM if weights is None else weights.explanation()


def _times(factor: float, evidence: Evidence, otherwise: str) -> str:
    """Names a factor."""
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
    known = [x for x in names if abs(factor / names[x] - 1) <= evidence.rtol]
    name = "; or: ".join(known) or otherwise
    return f"it is {factor:.6g} times what it should be ({name})"
