"""Checks that a loss is a sum over tokens, and counts these tokens."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._audit.check_count import RTOL, check_count
from optax_tokenaccum._audit.check_sequences import check_sequences
from optax_tokenaccum._audit.masks import Measure, rows_of
from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._core.contribution import as_num_tokens
from optax_tokenaccum._core.loss import LossFn, unpack
from optax_tokenaccum._core.trees import Batch, Params

OWN_MASK = "Return the sum of the loss's own mask."


@dataclass(frozen=True)
class LossReport:
    """The result of `check_loss_fn`, which `print` shows as text.

    Attributes:
      findings: a message for each problem; empty if there are none.
      count_checked: how the count was checked; `None` if it was not.
      note: why the count was not checked, or what the check leaves open; `None` if it
        leaves nothing open.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum import check_loss_fn
      >>> def loss_fn(params, batch):
      ...     errors = (params * batch["x"] - 1) ** 2
      ...     return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> batch = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}
      >>> print(check_loss_fn(loss_fn, jnp.array(2.0), [batch]))
      OK: the loss and its count are sums over rows.
      The count was checked entry by entry of ['mask'].
    """

    findings: tuple[str, ...]
    count_checked: str | None
    note: str | None = None

    @property
    def passed(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def assert_exact(self) -> None:
        """Raises `AssertionError` with the findings unless the check passed."""
        if not self.passed:
            raise AssertionError(f"loss_fn does not return sums.\n{self}")

    def __str__(self) -> str:
        lines = [f"WRONG: {finding}" for finding in self.findings]
        if self.passed:
            lines.append("OK: the loss and its count are sums over rows.")
        how = "Whether the count is the loss's own was not checked:"
        if self.count_checked:
            how = f"The count was checked {self.count_checked}."
        lines.append(f"{how} {self.note}" if self.note else how)
        return "\n".join(lines)


def check_loss_fn(
    loss_fn: LossFn,
    params: Params,
    micro_batches: Sequence[Any],
    per: Literal["token", "sequence"] = "token",
) -> LossReport:
    """Checks that `loss_fn` returns a sum over tokens and the number of those tokens.

    The most likely mistake with exact accumulation is a loss that is not a sum: it
    compiles, it trains, and the result is wrong. The check splits the rows of a
    micro-batch and counts them twice: the sums must add up. If removing all entries of
    a leaf leaves no loss and no count, the leaf is a mask. The check then removes its
    entries one at a time: loss and count must change together, at least at some
    parameters, because a token may have no loss at others. If there is no mask, the
    check sets the parameters to zero, where a cross entropy is the same for every
    token, so loss and count must be proportional.

    The check detects a loss that is already a mean, a count from another mask
    (unshifted, with padding, one per sequence), a term that depends on the batch (an
    auxiliary loss, batch statistics), and randomness. It does not detect a term below
    1e-4 of the loss (1e-2 if the loss computes in 16 bits). It also does not detect a
    count that leaves out a leaf of float zeros and ones that scales the loss, because
    the leaf may be a reward. If the check cannot tell whether the count is right,
    `count_checked` is `None`, and `note` says why.

    If the loss is a mean over sequences, as GRPO's is, give `per="sequence"`. Without
    it, such a loss passes with a count of tokens, which is wrong. With it, the loss
    must be a sum of the sequences' losses, and the count their number, as `reduce_loss`
    returns them: whole, not changed by every token, and without a row that has a loss
    and a count of 0. The check cannot know whether a constant that sums are divided by
    is one of the run, or the padded length. Nor does it see a term that is a sum over
    tokens, such as a KL term, in a loss that is counted in sequences.

    Args:
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`.
      params: the parameters to check at.
      micro_batches: pytrees of arrays; the leaves of one share a leading axis of rows.
        `loss_fn` must accept any number of rows: the check splits the micro-batch with
        the most rows, at least two. To check the count, the micro-batch with the most
        tokens needs a mask: a leaf of bools, of zeros and ones, of weights of which
        some are below 1, or of integer labels of which some are negative. Without a
        mask, the first 32 rows must have different numbers of tokens.
      per: what the loss counts, `"token"` or `"sequence"`.

    Returns:
      A `LossReport`, which `print` shows as text.

    Raises:
      ValueError: if the leaves of a micro-batch do not share a leading axis, if no
        micro-batch has two rows, or if `per` is another word.
      TypeError: if `loss_fn` is not a function or returned something other than a
        pair, or if `micro_batches` is a mapping.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum import check_loss_fn
      >>> def loss_fn(params, batch):
      ...     errors = (params * batch["x"] - 1) ** 2
      ...     return jnp.mean(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> batch = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}
      >>> print(check_loss_fn(loss_fn, jnp.array(2.0), [batch]).findings[0])
      the loss is already a mean: rows counted twice leave it as it is. Return the sum.
    """
    checks.check_function(loss_fn, "loss_fn")
    if per not in ("token", "sequence"):
        raise ValueError(
            f"per must be 'token' or 'sequence', what the loss counts: got {per!r}."
        )
    batches = [
        jax.tree.map(_as_numpy, batch)
        for batch in checks.as_micro_batches(micro_batches)
    ]
    sizes = [trees.leading_axis(batch, "a micro-batch") for batch in batches]
    if max(sizes, default=0) < 2:
        raise ValueError(
            "check_loss_fn needs a micro-batch of at least two rows, to cut it: got "
            f"micro-batches of {sizes} rows."
        )

    # A jitted function keeps its compiled programs from one check to the next.
    is_jitted = isinstance(loss_fn, jax.stages.Wrapped)
    jitted = loss_fn if is_jitted else jax.jit(lambda *given: loss_fn(*given))

    def at(params: Params) -> Measure:
        def measure(batch: Batch) -> tuple[float, float]:
            loss_sum, num_tokens = jitted(params, batch)
            return float(loss_sum), float(num_tokens)

        return measure

    batch, measure = batches[int(np.argmax(sizes))], at(params)
    _, (num_tokens, _) = unpack(jitted(params, batch), False)
    as_num_tokens(num_tokens)
    program = str(jax.make_jaxpr(jitted)(params, batch))
    rtol = 1e-2 if re.search(r"\b(b?f16|f8_\w+)\[", program) else RTOL
    findings = [*_findings_on_sums(measure, batch, rtol)]
    if findings:
        return LossReport(tuple(findings), None, "correct the above first.")
    params = jax.tree.map(jnp.asarray, params)
    zeros, negative = (jax.tree.map(f, params) for f in (jnp.zeros_like, _negative))
    measures = [measure, at(zeros), at(negative)]
    batch = max(batches, key=lambda batch: measure(batch)[1])
    if per == "token":
        dims = {size for x in jax.tree.leaves(params) for size in x.shape}
        how, findings, note = check_count(measures, batch, batches, dims, rtol)
    else:
        how, findings, note = check_sequences(measures, batch, rtol)
    return LossReport(tuple(findings), how, note)


def _negative(x: jax.Array) -> jax.Array:
    return -x if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _as_numpy(x: Any) -> Any:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def _findings_on_sums(measure: Measure, batch: Batch, rtol: float) -> Iterator[str]:
    """Yields a finding for each sum that is wrong with rows duplicated or split."""
    half = trees.leading_axis(batch, "a micro-batch") // 2

    def same(x: float, y: float, size: float = 0.0) -> bool:
        return abs(x - y) <= rtol * max(abs(x), abs(y), size)

    loss, n = measure(batch)
    if not (np.isfinite(loss) and np.isfinite(n)):
        yield f"loss and count must be finite: got {loss} and {n}."
        return
    if loss and not n:
        yield f"the loss is {loss:.6g}, and its count is 0. {OWN_MASK}"
        return
    if not all(map(same, measure(batch), (loss, n))):
        yield "the loss is random: two calls differ. Fix its key, or leave dropout out."
        return
    twice, n_twice = measure(jax.tree.map(lambda x: jnp.concatenate([x, x]), batch))
    halves = [measure(rows_of(batch, *cut)) for cut in ((0, half), (half, None))]
    losses, counts = np.array(halves).T
    size = abs(losses).sum()
    if not same(n_twice, 2 * n):
        yield (
            f"the count is not a sum: {n:g} tokens, and {n_twice:g} with every row "
            f"twice. {OWN_MASK}"
        )
    elif not same(counts.sum(), n):
        yield (
            f"the count depends on the batch: {n:g} tokens in all rows, "
            f"{counts.sum():g} in their halves. {OWN_MASK}"
        )
    if same(twice, loss, size) and not same(loss, 0, size):
        yield (
            "the loss is already a mean: rows counted twice leave it as it is. Return "
            "the sum."
        )
    elif not same(twice, 2 * loss, size):
        yield (
            "the loss holds a term that is not a sum over tokens: it is "
            f"{twice:.6g}, not {2 * loss:.6g}, with every row twice. An auxiliary loss "
            "that is a mean goes in as loss_sum + c * auxiliary * num_tokens. Dropout "
            "does this too if its masks depend on the number of rows: leave it out."
        )
    elif not same(losses.sum(), loss, size):
        yield (
            f"the loss of a row depends on the other rows: all have {loss:.6g}, their "
            f"halves {losses.sum():.6g}. Batch statistics (BatchNorm) and balance "
            "losses do that, and accumulation cannot undo it."
        )
