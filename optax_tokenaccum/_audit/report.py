"""The report of an audit, for people and for tests."""

import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Verdict(enum.Enum):
    """Which gradient a loop applies to a window.

    Example:
      >>> from optax_tokenaccum import Verdict
      >>> [verdict.value for verdict in Verdict][:4]
      ['exact', 'mean of means', 'discarded', 'not divided']
    """

    EXACT = "exact"
    MEAN_OF_MEANS = "mean of means"
    DISCARDED = "discarded"
    NOT_DIVIDED = "not divided"
    DIVIDED_TWICE = "divided twice"
    LAST_MICRO_BATCH_ONLY = "last micro-batch only"
    STEPPED_EVERY_MICRO_BATCH = "stepped every micro-batch"
    UNKNOWN = "unknown"


class Parameter(NamedTuple):
    """The L2 norms of one parameter array's gradients, see `AuditReport`."""

    path: str
    applied: float
    exact: float
    error: float


@dataclass(frozen=True)
class AuditReport:
    """The result of `audit`, which `print` shows as text.

    Attributes:
      verdict: a `Verdict`.
      explanation: the verdict in a sentence, with the fix.
      relative_error: L2 error of the applied gradient, relative to the exact gradient.
      cosine: the cosine between the applied and the exact gradient.
      factor: ratio of the applied to the exact gradient if they differ at most in size,
        else `None`.
      rtol: the relative error up to which gradients count as the same.
      candidates: relative error of the applied gradient to each candidate.
      weights: the weight of a token of each micro-batch, relative to the exact mean, if
        the applied gradient is a weighted sum of the micro-batches' gradients; else
        `None`. NaN for a micro-batch without a gradient, which may have any weight.
      parameters: for each parameter array, its `path` and three L2 norms: of the
        `applied` gradient, of the `exact` gradient, and of their difference, `error`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import audit, make_train_step
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> def run(optimizer, params, micro_batches):
      ...     step = make_train_step(loss_fn, optimizer, len(micro_batches))
      ...     state = step.init(params)
      ...     for batch in micro_batches:
      ...         state, _ = step(state, batch)
      ...     return state.params
      >>> micro_batches = [jnp.full(1, 2.0), jnp.full(9, 10.0)]
      >>> report = audit(run, loss_fn, jnp.ones(()), micro_batches)
      >>> report.assert_exact()
      >>> print(report.verdict.name, report.passed, report.factor)
      EXACT True 1.0
    """

    verdict: Verdict
    explanation: str
    relative_error: float
    cosine: float
    factor: float | None
    rtol: float
    candidates: dict[Verdict, float]
    weights: tuple[float, ...] | None
    parameters: list[Parameter]

    @property
    def passed(self) -> bool:
        """Whether the loop applies the exact gradient."""
        return self.verdict is Verdict.EXACT

    def assert_exact(self) -> None:
        """Raises `AssertionError` with the report unless the audit passed."""
        if not self.passed:
            raise AssertionError(f"The loop is not exact.\n{self}")

    def __str__(self) -> str:
        lines = [
            f"{self.verdict.name}: {self.explanation}",
            "",
            f"relative error {self.relative_error:.1e} (right up to {self.rtol:.0e}), "
            f"cosine {self.cosine:.4f}",
        ]
        if self.weights is not None:
            shown = ["-" if math.isnan(w) else f"{w:.3g}" for w in self.weights[:8]]
            if len(self.weights) > 8:
                shown.append("...")
            by = f"weight of a token, by micro-batch: {', '.join(shown)} (exact: 1)"
            lines.append(by)
        lines += ["", "  relative error  to the gradient"]
        for error, verdict in sorted((e, v.value) for v, e in self.candidates.items()):
            mark = " <-" if verdict == self.verdict.value else ""
            lines.append(f"  {error:14.1e}  {verdict}{mark}")
        lines += ["", "     error   applied     exact  parameters, worst first"]
        worst = sorted(self.parameters, key=lambda p: -p.error)
        for p in worst[:8]:
            lines.append(
                f"  {p.error:8.1e}  {p.applied:8.1e}  {p.exact:8.1e}  {p.path}"
            )
        if len(worst) > 8:
            lines.append(f"  and {len(worst) - 8} more")
        return "\n".join(lines)

    def plot(self) -> Any:
        """Plots the applied and the exact gradient norm of every parameter array.

        Returns:
          The matplotlib `Figure`.
        """
        from matplotlib.figure import Figure

        height = 1.5 + 0.3 * len(self.parameters)
        figure = Figure(figsize=(7, height), layout="constrained")
        axes = figure.subplots()
        places = np.arange(len(self.parameters))
        paths, applied, exact, _ = zip(*self.parameters, strict=True)
        axes.barh(places - 0.2, applied, 0.4, label="applied", color="tab:red")
        axes.barh(places + 0.2, exact, 0.4, label="exact", color="tab:gray")
        axes.set_yticks(places, paths)
        axes.invert_yaxis()
        axes.set(
            xscale="log",
            xlabel="L2 norm of the gradient",
            title=f"{self.verdict.value}, relative error {self.relative_error:.1e}",
        )
        axes.legend()
        return figure
