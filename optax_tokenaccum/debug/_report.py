"""The report of an audit, for people and for tests."""

import enum
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optax_tokenaccum._core.trees import T


class Verdict(enum.Enum):
    """Which gradient a loop applies to a window.

    Example:
      >>> from optax_tokenaccum.debug import Verdict
      >>> Verdict.MEAN_OF_MEANS.value
      'mean of means'
    """

    EXACT = "exact"
    MEAN_OF_MEANS = "mean of means"
    DISCARDED = "discarded"
    NOT_DIVIDED = "not divided"
    DIVIDED_TWICE = "divided twice"
    LAST_MICRO_BATCH_ONLY = "last micro-batch only"
    STEPPED_EVERY_MICRO_BATCH = "stepped every micro-batch"
    UNKNOWN = "unknown"


class ParameterRow(NamedTuple):
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
      factor: ratio of the applied to the exact gradient if they differ at most in size.
      rtol: the relative error up to which gradients count as the same.
      candidates: relative error of the applied gradient to each known gradient.
      tokens: the tokens of each micro-batch, by `loss_fn`.
      weights: the weight of a token of each micro-batch, where 1 is exact, if weights
        explain the applied gradient. NaN for a micro-batch without a gradient.
      parameters: `path` and gradient norms (`applied`, `exact`, `error`) of each array.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum.debug import audit
      >>> def loss_fn(params, x):
      ...     return jnp.sum(params * x), x.size
      >>> def run(optimizer, params, micro_batches):  # all of them at once
      ...     gradient = jnp.concatenate(micro_batches).mean()
      ...     return params + optimizer.update(gradient, optimizer.init(params))[0]
      >>> report = audit(run, loss_fn, jnp.ones(()), [jnp.ones(1), jnp.arange(9.0)])
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
    tokens: tuple[float, ...]
    weights: tuple[float, ...] | None
    parameters: list[ParameterRow]

    @property
    def passed(self) -> bool:
        """Whether the loop applies the exact gradient."""
        return self.verdict is Verdict.EXACT

    def assert_exact(self) -> None:
        """Raises `AssertionError` with the report unless the audit passed."""
        if not self.passed:
            raise AssertionError(f"The loop is not exact.\n{self}")

    def __str__(self) -> str:
        text = wrapped(f"{self.verdict.name}: {self.explanation}")
        if not np.isfinite(self.relative_error):
            return text
        right = f"right up to {self.rtol:.0e}), cosine {self.cosine:.4f}"
        lines = [text, "", f"relative error {self.relative_error:.1e} ({right}"]
        if self.weights is not None:
            head = "weight of a token, by micro-batch (exact: 1)"
            lines += ["", f"{'tokens':>16}  {head}"]
            weights = [f"{w:.4g}" if w == w else "no gradient" for w in self.weights]
            pairs = zip(self.tokens, weights, strict=True)
            lines += _first([f"  {n:14.8g}  {weight}" for n, weight in pairs])
        lines += ["", "  relative error  to the gradient"]
        known = sorted((error, v.value) for v, error in self.candidates.items())
        lines += [f"  {error:14.1e}  {name}" for error, name in known if error < np.inf]
        lines += ["", "   norms of gradients, by parameter, worst first"]
        lines += ["     error   applied     exact  parameter"]
        worst = []
        for p in sorted(self.parameters, key=lambda p: -p.error):
            path = p.path if len(p.path) <= 48 else f"...{p.path[-45:]}"
            worst.append(f"  {p.error:8.1e}  {p.applied:8.1e}  {p.exact:8.1e}  {path}")
        return "\n".join([*lines, *_first(worst)])


@dataclass(frozen=True)
class LossReport:
    """The result of `check_loss_fn`, which `print` shows as text.

    Attributes:
      findings: a message for each problem; empty if there are none.
      checked: what was checked: `"rows"`, and the paths of masks.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum.debug import check_loss_fn
      >>> loss_fn = lambda params, x: (params * x.sum(), 2)
      >>> report = check_loss_fn(loss_fn, jnp.ones(()), [jnp.ones(2)], mask=None)
      >>> print(report.passed, report.findings[0].split(":")[0])
      False the count is not a sum over rows
    """

    findings: tuple[str, ...]
    checked: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def assert_exact(self) -> None:
        """Raises `AssertionError` with the report unless the check passed."""
        if not self.passed:
            raise AssertionError(f"loss_fn does not return sums.\n{self}")

    def __str__(self) -> str:
        lines = [f"WRONG: {finding}" for finding in self.findings]
        if self.passed:
            lines = [f"OK. Checked: {', '.join(('gradients', *self.checked))}."]
            if "rows" not in self.checked:
                lines.append("Not checked: rows. The arrays share no axis of two rows.")
            if not {*self.checked} - {"rows"}:
                lines.append("Not checked: which tokens count. There is no mask.")
        return "\n".join(map(wrapped, lines))


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a bar on a terminal, and a line now and then elsewhere."""
    shown, is_terminal = time.monotonic(), sys.stderr.isatty()
    for i, item in enumerate(items):
        line = f"{what} {i + 1} of {len(items)}"
        if is_terminal:
            bar = "#" * (20 * i // len(items))
            print(f"\r[{bar:20}] {line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(line, file=sys.stderr, flush=True)
        yield item
    if is_terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


def _first(lines: list[str]) -> list[str]:
    return lines[:8] + [f"  and {len(lines) - 8} more"] * (len(lines) > 8)
