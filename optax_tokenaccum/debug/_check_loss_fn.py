"""Checks that a loss is a sum over tokens, and counts these tokens."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.linalg import norm

from optax_tokenaccum._core import checks, trees
from optax_tokenaccum._steps.loss_fn import LossFn, unpack
from optax_tokenaccum.debug._model import Model, as_vector
from optax_tokenaccum.debug._report import LossReport, progress

Leaves = dict[str, Any]  # the arrays of a micro-batch, by path
Run = Callable[..., tuple[float, np.ndarray]]  # -> num_tokens, gradient of loss_sum
Texts = Iterator[str]

# The least relative error of a gradient that is reported, in float32 and in 16 bits:
# rounding makes 1e-5 and 2e-2. What is masked has a gradient of zeros, or nearly.
RTOL, RTOL_16_BITS, ZERO = 3e-4, 5e-2, 1e-6
SEVERAL = "several terms, docs/losses.md"
IF_MEANT = "If that is meant, name the leaf that marks what counts, or give mask=None."


class Mask(NamedTuple):
    """A leaf of micro-batches that marks what counts."""

    path: str
    absent: Any  # its value where nothing counts

    def there(self, batch: Leaves) -> np.ndarray:
        x = np.asarray(batch[self.path])
        return (x != self.absent).reshape(len(x), -1)

    def keep(self, batch: Leaves, where: Any) -> Leaves:
        x = np.asarray(batch[self.path])
        kept = (self.there(batch) & where).reshape(x.shape)
        return batch | {self.path: np.where(kept, x, self.absent).astype(x.dtype)}


def check_loss_fn(
    loss_fn: LossFn,
    params: trees.Params,
    micro_batches: Sequence[trees.Batch],
    *,
    mask: str | Sequence[str] | None,
    per: Literal["token", "sequence"] = "token",
) -> LossReport:
    """Checks that `loss_fn` returns a sum over tokens and the number of those tokens.

    Gradients of rows must add up, and not depend on the size of the loss. Without the
    entries of the mask, count and gradient must be 0 (or 0/0); without some, both must
    change. It finds means, counts with padding, losses and backward passes that do not
    follow the mask, rows that depend on each other, swapped results, losses that no
    parameter changes, counts that parameters change, and randomness. It does not find a
    term below 3e-4 of the gradient (5e-2 with 16-bit floats), or twice the right count.

    Args:
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`.
      params: the parameters to check at, as for `audit`.
      micro_batches: pytrees of arrays. The largest is checked, and that with the fewest
        tokens; rows only if all arrays share a leading axis of at least 2.
      mask: the path or last key of the leaf that marks what counts: a mask, weights,
        segment ids, lengths, or labels of which one number is ignored. A list if
        several must hold. `None` if nothing is masked, as with one label per row, or if
        what a mask leaves out is trained too, as the background of images.
      per: what the loss counts. With `"sequence"`, for means over sequences as
        `reduce_loss` returns them, the count must not change with every token.

    Returns:
      A `LossReport`, which `print` shows as text.

    Raises:
      ValueError: if no leaf is `mask`, or if `per` is a different word.
      TypeError: if an argument has the wrong type, or `loss_fn` returned no pair.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum.debug import check_loss_fn
      >>> def loss_fn(params, batch):
      ...     errors = (params * batch["x"] - 1) ** 2
      ...     return jnp.mean(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> batch = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}
      >>> report = check_loss_fn(loss_fn, jnp.array(2.0), [batch], mask="mask")
      >>> print(report.passed, report.findings[0].split(":")[0])
      False the loss is already a mean
    """
    checks.check_function(loss_fn, "loss_fn")
    if per not in ("token", "sequence"):
        raise ValueError(f"per must be 'token' or 'sequence': got {per!r}.")
    given, model = checks.as_micro_batches(micro_batches), Model(params)
    batches: list[Leaves] = [dict(trees.named_leaves(batch)) for batch in given]
    names = [mask] if isinstance(mask, str) else [] if mask is None else map(str, mask)
    paths: list[str] = []
    for name in names:
        new = [k for k in batches[0] if name in (k, *re.findall(r"[^\[\].']+", k)[-1:])]
        if not new:
            raise ValueError(f"mask must be one of {[*batches[0]]}: got {name!r:.40}.")
        paths += new

    @jax.jit
    def graded(trained: list[jax.Array], batch: Any, c: float, of_count: float) -> Any:
        def loss(trained: list[jax.Array]) -> Any:
            loss_sum, n, _ = unpack(loss_fn(model.build(trained), batch), False)
            n = trees.as_real_scalar(n, "num_tokens", jnp.float32)
            return loss_sum * c + n * of_count, n

        return jax.grad(loss, has_aux=True)(trained)

    def run(batch: Leaves, c: float = 1.0, of_count: float = 0.0) -> Any:
        leaves = jax.tree.unflatten(jax.tree.structure(given[0]), batch.values())
        gradient, n = graded(model.trained, leaves, c, of_count)
        vector = as_vector(gradient) / (c or 1.0)  # in steps, 0/0 adds nothing, too:
        return float(n), np.where((n != 0) | np.isfinite(vector), vector, 0)

    shown = progress(batches, "check_loss_fn: micro-batch")
    found = [(n, float(norm(g))) for n, g in map(run, shown)]
    axes = [{np.shape(x)[:1] for x in batch.values()} - {()} for batch in batches]
    rows = [max(x)[0] if len(x) == 1 else 1 for x in axes]
    if findings := [*_trains(found, run(batches[0], 0.0, 1.0)[1])]:
        return LossReport(tuple(findings), ())
    used = [i for i, (n, size) in enumerate(found) if n * size]
    largest = max(used, key=lambda i: (rows[i], found[i]))
    fewest = min(used, key=lambda i: found[i])
    masks = [_mask(run, batches[fewest], path) for path in paths]
    program = str(graded.trace(model.trained, given[0], 1.0, 0.0).jaxpr)
    rtol = RTOL_16_BITS if re.search(r"\b(b?f16|f8_\w+)\[", program) else RTOL
    for i in dict.fromkeys([largest, fewest]):
        one = run, batches[i], rtol
        findings = findings or [*_repeats(*one, *found[i])]
        if rows[i] > 1:
            findings = findings or [*_rows(*one, rows[i], masks)]
        entries = (_entries(*one, rows[i], m, per) for m in masks)
        findings = findings or [x for of_mask in entries for x in of_mask]
    return LossReport(tuple(findings), ("rows",) * (rows[largest] > 1) + (*paths,))


def _trains(found: list[tuple[float, float]], of_count: np.ndarray) -> Texts:
    """Yields what is wrong with what parameters change, by counts and norms."""
    trained = any(size for _, size in found)
    bad = [x for x in found if not all(0 <= number < np.inf for number in x)]
    if (abs(of_count) > 0).any():  # where the loss is NaN, this is NaN, too
        yield (
            "the parameters change the count, which steps take as a constant. Stop its "
            "gradient (jax.lax.stop_gradient), and that of such weights in the loss."
            if trained
            else "loss and count are swapped. Return (loss_sum, num_tokens)."
        )
    elif not trained:
        yield "no parameter changes the loss: a stop_gradient, argmax, another model?"
    elif bad:
        yield (
            f"count and gradient must be finite: got (count, norm) {bad[:3]}. Select "
            "with jnp.where before a division or a logarithm, not after it."
        )
    elif not any(n * size for n, size in found):
        yield "the count is 0 wherever the loss has a gradient."


def _repeats(run: Run, batch: Leaves, rtol: float, n: float, size: float) -> Texts:
    """Yields what differs in a second call, or for a smaller loss."""
    n_again, full = run(batch)
    _, scaled = run(batch, 2.0 ** -max(1.0, np.round(np.log2(max(n, 1.0)))))
    if n != n_again:
        yield f"the count is random: two calls return {n:g} and {n_again:g}."
    elif not abs(size - norm(full)) <= rtol * size:
        yield "the loss is random: two calls differ. Fix its key, or leave dropout out."
    elif not norm(scaled - full) <= rtol * size:
        yield (
            "the gradient depends on the size of the loss: that of the mean, times the "
            f"count, has the norm {norm(scaled):.3g}, that of the sum {size:.3g}. Does "
            "the backward pass clip, or round to 8 bits of a fixed range? Divide both "
            "results by one power of two near the tokens of a window."
        )


def _rows(run: Run, batch: Leaves, rtol: float, rows: int, masks: list[Mask]) -> Texts:
    """Yields what is wrong with rows that do not add up."""

    def halves(batch: Leaves, rows: np.ndarray) -> Any:  # each, both, and each twice
        a, b = np.split(rows, 2)
        cuts = map(np.concatenate, ([a], [b], [a, b], [a, a], [b, b]))
        taken = [{k: x[i] if np.ndim(x) else x for k, x in batch.items()} for i in cuts]
        return zip(*map(run, taken), strict=True)

    taken = np.arange(rows // 2 * 2)
    (n_a, n_b, n, n_aa, n_bb), (a, b, both, aa, bb) = halves(batch, taken)
    limit = rtol * (norm(a) + norm(b))
    if not np.allclose([n, (n_aa + n_bb) / 2], n_a + n_b, 1e-5):
        yield (
            f"the count is not a sum over rows: {n:g} in all, {n_a:g} and {n_b:g} in "
            f"halves, {n_aa + n_bb:g} with every row twice."
        )
    elif limit and norm(aa + bb - a - b) <= limit:
        yield (
            "the loss is already a mean: rows counted twice leave its gradient as it "
            f"is. Return the sum. For terms with denominators of their own: {SEVERAL}."
        )
    elif not norm(both - a - b) <= limit:
        if masks:  # as many entries in each row, so that rows have equal denominators
            rank = masks[0].there(batch).cumsum(1)
            taken = np.resize(np.flatnonzero(rank[:, -1]), len(taken))
            batch = masks[0].keep(batch, rank <= rank[taken, -1].min())
            _, (a, b, both, aa, bb) = halves(batch, taken)
        # If all but a mean is a sum, the mean of both lies between those of the halves.
        of_a, of_b = 2 * a - aa, 2 * b - bb
        rest, line = both - a - b + of_a, of_a - of_b
        share = np.clip(rest @ line / (line @ line or 1), 0, 1)
        if norm(rest - share * line) < rtol * (norm(a) + norm(b)):
            yield (
                "a term of the loss is not a sum over tokens: it has a denominator of "
                f"its own, or counts once per micro-batch. See {SEVERAL}, or add a "
                "mean as loss_sum + c * mean * num_tokens. If the model has dropout, "
                "check it without, model.eval()."
            )
        else:
            yield (
                "the loss of a row depends on the other rows, as in contrastive and "
                "balance losses, BatchNorm and dropout. Keep such rows together, or "
                "take coupled_value_and_grad."
            )


def _mask(run: Run, batch: Leaves, path: str) -> Mask:
    """A mask, which is absent where its value makes the count the smallest."""
    x = np.asarray(batch[path])
    often, times = np.unique(x, return_counts=True)
    values = [0, -100, -1, 1, 255, *often[np.argsort(-times)][:4].tolist()]
    values = [v for v in values if v == np.array(v).astype(x.dtype)]
    found: list[tuple[float, float]] = []
    for value in values:
        n, gradient = run(batch | {path: np.full_like(x, value)})
        found.append((abs(n), float(norm(gradient))))
        if not any(found[-1]):
            break
    return Mask(path, values[found.index(min(found))])


def _entries(
    run: Run, batch: Leaves, rtol: float, rows: int, mask: Mask, per: str
) -> Texts:
    """Yields what is wrong with the count or the loss of a mask's entries."""
    path, there, full = mask.path, mask.there(batch), run(batch)[1]
    row, rank = np.arange(len(there))[:, None], there.cumsum(1)

    def kept(where: Any) -> tuple[float, np.ndarray]:
        return run(mask.keep(batch, where))

    (n_none, none), zero = kept(False), ZERO * norm(full)
    leaks = norm(none) > zero
    if rows > 1 and not leaks:  # of a mean, the gradient without entries is 0/0
        (_, even), (_, odd) = kept(row % 2 == 0), kept(row % 2 == 1)
        leaks = norm(even + odd - full) > rtol * (norm(even) + norm(odd))
    if n_none:
        yield (
            f"the count takes in what the loss leaves out: it is {n_none:g}, not 0, "
            f"without any entry of {path}. Count with the loss's own mask: neither its "
            f"size nor maximum(n, 1). {IF_MEANT}"
        )
    if leaks:
        yield (
            f"the loss takes in what {path} leaves out: its gradient there is not 0. "
            f"Multiply every term by the mask, also in backward passes. {IF_MEANT}"
        )
    if n_none or leaks:
        return
    for name, where in (("first", rank == 1), ("last", rank == rank[:, -1:])):
        n, some = kept(where)
        # In a mean over a sequence, one entry may have no loss, as in a ranking.
        if n and not some.any() and per == "token" or not n and norm(some) > zero:
            more, less = ("count", "loss") if n else ("loss", "count")
            yield (
                f"the {more} takes in what the {less} leaves out: the {name} entries "
                f"of {path} in all rows change the {more} alone. Is the count taken "
                "from labels before their shift, or with the prompt?"
            )
            return
    # Every other entry: of a row of tokens, or of all rows.
    is_long, every = rank.max() > 1, there.cumsum().reshape(there.shape) % 2 == 0
    where = row == rank[:, -1].argmax() if is_long and per == "token" else True
    (n_a, a), (n_b, b), (n, both) = (kept(where & x) for x in (every, ~every, True))
    limit = rtol * (norm(a) + norm(b))
    is_count = abs(n_a + n_b - n) <= 1e-5 * n
    is_sum = norm(a + b - both) <= limit
    is_mean = norm((n_a * a + n_b * b) / (n or 1) - both) <= limit
    if per == "sequence" and is_long and is_count:
        yield (
            "the count is not one of sequences: it changes with every entry of "
            f'{path}. For a mean over tokens, leave per="sequence" out.'
        )
    elif per == "token" and limit and is_sum != is_count and (is_sum or is_mean):
        yield (
            f"the loss is a {'sum' if is_sum else 'mean'} over entries of {path}, and "
            f"the count is {'not ' if is_sum else ''}theirs: {n_a:g} and {n_b:g} in "
            f"halves of a row, {n:g} in all. If the loss is a mean over sequences, "
            'count these, and give per="sequence".'
        )
