"""Checks that a loss is a sum over tokens, and counts these tokens."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from optax_tokenaccum._audit_parts import Model
from optax_tokenaccum._audit_report import wrapped
from optax_tokenaccum._checks import as_micro_batches, check_function
from optax_tokenaccum._loss import LossFn, unpack
from optax_tokenaccum._trees import (
    Batch,
    Leaf,
    Params,
    is_key,
    leading_axis,
    named_leaves,
)

Loss = Callable[[Batch], list[float]]  # at fixed parameters: [loss_sum, num_tokens]

OWN_MASK = "Count with the mask that the loss is multiplied by."
PER_SEQUENCE = 'If the loss is a mean over sequences, give per="sequence".'
FIRST = "correct the above first."
MOST_ROWS = 16  # from which the first, the last and one more entry are removed


@dataclass(frozen=True)
class LossReport:
    """The result of `check_loss_fn`, which `print` shows as text.

    Attributes:
      findings: a message for each problem; empty if there are none.
      count_checked: how the count was checked, by which masks; `None` if it was not.
      note: why the count was not checked; `None` if it was.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum import check_loss_fn
      >>> loss_fn = lambda params, x: (params * x.sum(), 2)
      >>> report = check_loss_fn(loss_fn, jnp.ones(()), [jnp.ones(2)])
      >>> print(report.passed, report.findings[0].split(":")[0])
      False the count is not a sum
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
        lines = lines or ["OK: the loss and its count are sums over rows."]
        how = f"Whether the count is the loss's own was not checked: {self.note}"
        if self.count_checked:
            how = f"The count was checked {self.count_checked}."
        return "\n".join(map(wrapped, [*lines, how]))


def check_loss_fn(
    loss_fn: LossFn,
    params: Params,
    micro_batches: Sequence[Batch],
    *,
    mask: str | None = None,
    per: Literal["token", "sequence"] = "token",
) -> LossReport:
    """Checks that `loss_fn` returns a sum over tokens and the number of those tokens.

    Rows are doubled, halved and reversed: the sums must add up. Then entries of the
    mask are removed, one at a time, at parameters of zero, where a token's loss does
    not depend on other tokens: loss and count must change together. This finds a loss
    or a term that is a mean, rows that depend on each other, a count from another mask,
    and randomness; not a term below 1e-4 of the loss (1e-2 if it computes in 16 bits).

    Args:
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`.
      params: the parameters to check at, as for `audit`.
      micro_batches: pytrees of arrays that share a leading axis of rows, of which
        `loss_fn` must accept any number. The largest is checked.
      mask: the path or last key of the leaf that says which tokens count, where 0, or a
        negative label, is none: a mask, weights, segment ids, labels. By default, every
        leaf of bools without whose entries the loss is 0.
      per: what the loss counts. With `"sequence"`, for means over sequences as
        `reduce_loss` returns them, the count of a row must not change with every token,
        and not be 0 where the row has a loss.

    Returns:
      A `LossReport`, which `print` shows as text.

    Raises:
      ValueError: if no micro-batch has two rows, if leaves do not share an axis of
        rows, if `per` is another word, or if no leaf is `mask`.
      TypeError: if an argument is of another kind, or `loss_fn` returned no pair.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_tokenaccum import check_loss_fn
      >>> def loss_fn(params, batch):
      ...     errors = (params * batch["x"] - 1) ** 2
      ...     return jnp.mean(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> batch = {"x": jnp.ones((4, 3)), "mask": jnp.tri(4, 3) > 0}
      >>> report = check_loss_fn(loss_fn, jnp.array(2.0), [batch])
      >>> print(report.passed, report.findings[0])
      False the loss is already a mean: rows counted twice leave it as it is.
    """
    check_function(loss_fn, "loss_fn")
    if per not in ("token", "sequence"):
        raise ValueError(f"per must be 'token' or 'sequence': got {per!r}.")
    batches = as_micro_batches(micro_batches)
    sizes = [leading_axis(batch, "a micro-batch") for batch in batches]
    if max(sizes, default=0) < 2:
        raise ValueError(f"A micro-batch must have at least two rows: got {sizes}.")
    model = Model(params)

    @jax.jit
    def loss_and_count(trained: list[jax.Array], batch: Batch) -> Any:
        return unpack(loss_fn(model.build(trained), batch), False)[:2]

    def at(trained: list[jax.Array]) -> Loss:
        return lambda batch: [float(x) for x in loss_and_count(trained, batch)]

    loss = at(model.trained)
    largest = (x for x, n in zip(batches, sizes, strict=True) if n == max(sizes))
    batch = max(largest, key=lambda batch: loss(batch)[1])
    batch = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), batch)
    named = dict(named_leaves(batch))
    masks = [x for x in named if mask in (x, *re.findall(r"[^\[\].']+", x)[-1:])]
    if mask and not masks:
        raise ValueError(f"mask must be one of {[*named]}: got {mask!r}.")
    masks = masks or [x for x in named if named[x].dtype == bool]
    program = str(jax.make_jaxpr(loss_and_count)(model.trained, batch))
    rtol = 1e-2 if re.search(r"\b(b?f16|f8_\w+)\[", program) else 1e-4
    if findings := [*_sums(loss, batch, rtol)]:
        return LossReport(tuple(findings), None, FIRST)
    losses = [at([*map(jnp.zeros_like, model.trained)]), loss]
    if not 0 < abs(losses[0](batch)[0]) < np.inf:
        losses = [loss]
    gates = {}  # whether the loss is 0 without any entry, and the count another
    for x in masks:
        (before, n), (after, m) = (losses[0](_without(batch, x, y)) for y in (0, 1))
        gates[x] = abs(after) <= rtol * abs(before), m != n
    # A reward of False removes the loss alone, next to a mask that removes both.
    likely = [x for x in masks if all(gates[x])] or [x for x in masks if any(gates[x])]
    how, check = "entry by entry", _tokens
    if per == "sequence":
        how, check = "row by row", _sequences
    for x in likely:
        findings += check(losses, batch, x, rtol)
    if checked := ", ".join(x for x in masks if gates[x][1]):
        return LossReport(tuple(findings), f"{how} of {checked}")
    note = f"it is the same without {mask or 'any leaf of bools'}. Name another mask=."
    return LossReport(tuple(findings), None, FIRST if findings else note)


def _rows(batch: Batch, rows: Any) -> Any:
    return jax.tree.map(lambda x: x[np.asarray(rows)], batch)


def _sums(loss: Loss, batch: Batch, rtol: float) -> Iterator[str]:
    """Yields what is wrong with rows that are doubled, halved or reversed."""
    rows = np.arange(len(jax.tree.leaves(batch)[0]) // 2 * 2)
    half = np.split(rows, 2)
    (all_, n), (again, _), (back, m), (twice, n_twice) = (
        loss(_rows(batch, x)) for x in (rows, rows, rows[::-1], [*rows, *rows])
    )
    parts, counts = np.array([loss(_rows(batch, x)) for x in half]).T
    most = max(abs(all_), abs(twice) / 2, abs(parts).sum())

    def same(x: float, y: float, size: float = most) -> bool:
        return abs(x - y) <= rtol * size

    if not np.isfinite([all_, n]).all():
        yield f"loss and count must be finite: got {all_} and {n}."
    elif all_ and not n:
        yield f"the loss is {all_:.6g}, and its count is 0. {OWN_MASK}"
    elif not same(all_, again):
        yield "the loss is random: two calls differ. Fix its key, or leave dropout out."
    elif not (same(n_twice, 2 * n, n) and same(counts.sum(), n, n) and same(m, n, n)):
        yield (
            f"the count is not a sum: {n:g} in all rows, {counts.sum():g} in their "
            f"halves, and {n_twice:g} with every row twice. {OWN_MASK}"
        )
    elif same(twice, all_) and not same(all_, 0):
        yield "the loss is already a mean: rows counted twice leave it as it is."
    elif not (same(twice, 2 * all_) and same(parts.sum(), all_) and same(back, all_)):
        # A sum S plus a mean M has the loss S + M, and 2 S + M with every row twice.
        twices = [loss(_rows(batch, [*x, *x]))[0] for x in half]
        mean, means = 2 * all_ - twice, 2 * parts - np.array(twices)
        shares = np.array([[0.5, 0.5], counts / n])
        if not same(mean, 0) and any(same(mean, x) for x in shares @ means):
            yield (
                "the loss holds a term that is not a sum over tokens: with every row "
                f"twice it is {twice:.6g}, not {2 * all_:.6g}. Add a mean as "
                "loss_sum + c * auxiliary * num_tokens."
            )
        else:
            yield (
                f"the loss of a row depends on the other rows: all have {all_:.6g}, "
                f"their halves {parts.sum():.6g}. Contrastive and balance losses, "
                "BatchNorm, pairs and dropout do that. Keep such rows together, or "
                "take coupled_value_and_grad."
            )


def _without(batch: Batch, mask: str, where: Leaf) -> Batch:
    """The batch without the entries of a mask where `where` is true."""

    def changed(path: KeyPath, x: Leaf) -> Leaf:
        if (jax.tree_util.keystr(path) or "the root") == mask:
            return np.where(where, min(np.min(x), 0), x).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating):
            # A weight or reward of 0 would hide a loss.
            return np.where(x == 0, 1, x).astype(x.dtype)
        return x

    return jax.tree_util.tree_map_with_path(changed, batch)


def _some_rows(batch: Batch, mask: str) -> Iterator[tuple[Batch, list[Batch]]]:
    """Some rows, twice each, also without some of their entries, one at a time."""
    entries = dict(named_leaves(batch))[mask]
    there = entries != min(entries.min(), 0)
    for i in np.unique(np.linspace(0, len(there) - 1, MOST_ROWS).astype(int)):
        row, found = _rows(batch, [i, i]), np.flatnonzero(there[i])
        some = found[np.linspace(0, len(found) - 1, min(len(found), 3)).astype(int)]
        numbers = np.arange(2 * there[i].size).reshape(2, *there[i].shape)
        yield (
            _without(row, mask, False),
            [_without(row, mask, numbers == x) for x in some],
        )


def _tokens(losses: list[Loss], batch: Batch, mask: str, rtol: float) -> Iterator[str]:
    """Yields what is wrong with a count of tokens."""
    loss, entries = losses[0], dict(named_leaves(batch))[mask]
    half = np.arange(entries.size).reshape(entries.shape) % 2 == 0
    (whole, _), (one, _), (other, _), (_, none) = (
        loss(_without(batch, mask, x)) for x in (False, half, ~half, True)
    )
    adds_up = abs(one + other - whole) <= rtol * abs(whole)
    if not adds_up and len(losses) > 1:
        yield f"the losses of {mask}'s entries depend on each other. {PER_SEQUENCE}"
        return
    only_loss, only_count = 0, 0
    lost = [[], [], []]  # whether the first entry of a row changes the count alone, ...
    for row, without in _some_rows(batch, mask):
        before = [loss(row) for loss in losses]
        for by_row, batch_without in zip(lost, without, strict=False):
            after = [loss(batch_without) for loss in losses]
            counts = before[0][1] != after[0][1]
            pairs = zip(before, after, strict=True)
            changes = [abs(y - x) > 1e-6 * abs(x) for (x, _), (y, _) in pairs]
            only_loss += not counts and changes[0] and adds_up  # not by attention
            only_count += counts and not any(changes)
            by_row.append(counts and not changes[0])
    size = sum(map(len, lost))
    # At parameters of zero some tokens may have no loss, but not the first everywhere.
    if only_count or any(len(x) > 1 and all(x) for x in lost):
        yield (
            f"the count takes in what the loss leaves out: {sum(map(sum, lost))} of "
            f"{size} entries of {mask} change the count alone. Is it taken from "
            f"labels before their shift, or with padding? {OWN_MASK}"
        )
    if only_loss:
        yield (
            f"the loss takes in what the count leaves out: {only_loss} of {size} "
            f"entries of {mask} change the loss alone. Is the count one per sequence, "
            f"a constant, or the mask's size? {OWN_MASK} {PER_SEQUENCE}"
        )
    elif none not in (0, 1):  # maximum(count, 1) is 1
        yield f"the count is {none:g} without any entry of {mask}, not 0. {OWN_MASK}"


def _sequences(
    losses: list[Loss], batch: Batch, mask: str, rtol: float
) -> Iterator[str]:
    """Yields what is wrong with a count of sequences; a row may hold several."""
    loss, by_token, left_out = losses[0], [], []
    whole, _ = loss(batch)
    for row, without in _some_rows(batch, mask):
        value, n = loss(row)
        left_out.append(n == 0 and abs(value) > rtol * abs(whole))
        if len(without) > 1:
            by_token.append(all(loss(x)[1] != n for x in without))
    if by_token and all(by_token):
        yield (
            f"the count is not one of sequences: it changes with every entry of {mask}."
            ' For a mean over tokens, leave per="sequence" out.'
        )
    if any(left_out):
        yield (
            "the loss takes in sequences that the count leaves out: "
            f"{sum(left_out)} of {len(left_out)} rows have a loss and a count of 0. "
            "Leave both out, or neither."
        )
