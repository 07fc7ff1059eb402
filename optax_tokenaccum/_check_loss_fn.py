"""Checks that a loss is a sum over tokens, and counts these tokens."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum._audit_model import Model, as_vector
from optax_tokenaccum._audit_report import progress, wrapped
from optax_tokenaccum._checks import as_micro_batches, check_function
from optax_tokenaccum._micro_batch import LossFn, unpack
from optax_tokenaccum._trees import (
    Batch,
    Leaf,
    Params,
    as_real_scalar,
    is_float,
    is_key,
    leading_axis,
    named_leaves,
)

Leaves = dict[str, Leaf]  # of a batch, by path
Loss = Callable[[Leaves], list[float]]  # at fixed parameters: [loss_sum, num_tokens]

OWN_MASK = "Count with the mask that the loss is multiplied by."
PER_SEQUENCE = 'If the loss is a mean over sequences, give per="sequence".'
NAME_IT = "Name the leaf that says which tokens count, or mask=None if there is none."
FIRST = "correct the above first."
MOST_ROWS = 16  # from which the first, the last and one more entry are removed
ABSENT = 0, 1, -1, -100, 255  # what usually says that a token does not count


@dataclass(frozen=True)
class LossReport:
    """The result of `check_loss_fn`, which `print` shows as text.

    Attributes:
      findings: a message for each problem; empty if there are none.
      count_checked: how the count was checked, by which masks; `None` if it was not.
      note: why the count was not checked; `None` if it was, or if there is no mask.
      remarks: which leaves the loss alone follows.

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
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are no findings, and nothing was left unchecked."""
        return not self.findings and self.note is None

    def assert_exact(self) -> None:
        """Raises `AssertionError` with the report unless the check passed."""
        if not self.passed:
            what = "does not return sums" if self.findings else "was not checked"
            raise AssertionError(f"loss_fn {what}.\n{self}")

    def __str__(self) -> str:
        lines = [f"WRONG: {finding}" for finding in self.findings]
        head = "OK" if self.passed else "UNSURE"
        lines = lines or [f"{head}: the loss and its count are sums over rows."]
        how = "The count was not checked: there is no mask."
        if self.note:
            how = f"Whether the count is the loss's own was not checked: {self.note}"
        elif self.count_checked:
            how = f"The count was checked {self.count_checked}."
        return "\n".join(map(wrapped, [*lines, *self.remarks, how]))


@dataclass(frozen=True, eq=False)
class Mask:
    """A leaf, and what happens without its entries, which are then `absent`."""

    path: str
    entries: np.ndarray
    absent: Any
    is_binary: bool  # it holds 0 and 1 alone, and is not one-hot
    count: float  # without any entry
    is_counted: bool  # the count is smaller then
    moves_loss: bool  # the loss changes then
    ends_loss: bool  # the loss is 0 then, or 0/0

    @property
    def is_ignored_label(self) -> bool:
        """Whether `absent` can be neither a class, an id nor a number."""
        return self.absent < 0 or self.absent == 255

    @property
    def may_be_data(self) -> bool:
        """Whether it may be data, such as a number of boxes, or class ids."""
        is_integer = jnp.issubdtype(self.entries.dtype, jnp.integer)
        if not self.moves_loss:
            return is_integer and self.entries.size == len(self.entries)
        marks = self.is_binary or self.is_ignored_label or self.ends_loss
        return is_integer and not marks

    def without(self, batch: Leaves, where: Any, value: Any = None) -> Leaves:
        """The batch, or rows of it, without the entries where `where` is true."""
        x = batch[self.path]
        value = self.absent if value is None else value
        return batch | {self.path: np.where(where, value, x).astype(x.dtype)}


def check_loss_fn(
    loss_fn: LossFn,
    params: Params,
    micro_batches: Sequence[Batch],
    *,
    mask: str | None = "auto",
    per: Literal["token", "sequence"] = "token",
) -> LossReport:
    """Checks that `loss_fn` returns a sum over tokens and the number of those tokens.

    Parameters must change the loss and not the count, and the gradient must not depend
    on the size of the loss. Rows are doubled, halved and reversed: the sums must add
    up. Then entries of masks are removed, one at a time: loss and count must change
    together. Where the loss of a token depends on other tokens, as in attention, this
    is done at parameters of zero. It finds a loss or a term that is a mean, rows that
    depend on each other, a count from another mask, a mask that loss or count ignores,
    and randomness; not a term below 1e-4 of the loss (1e-2 if it computes in 16 bits).

    Args:
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`.
      params: the parameters to check at, as for `audit`.
      micro_batches: pytrees of arrays that share a leading axis of rows, of which
        `loss_fn` must accept any number. The largest is checked.
      mask: the path or last key of the leaf that says which tokens count, where 0, or a
        negative label, is none: a mask, weights, segment ids, labels; `None` if there
        is none. By default, every leaf that the count follows, and every leaf of 0 and
        1, of any dtype, without whose entries the loss is 0.
      per: what the loss counts. With `"sequence"`, for means over sequences as
        `reduce_loss` returns them, the count of a row must not change with every token,
        and not be 0 where the row has a loss.

    Returns:
      A `LossReport`, which `print` shows as text. It passes if the count was checked,
      or if `mask=None`.

    Raises:
      ValueError: if no micro-batch has two rows, if leaves do not share an axis of
        rows, if `per` is a different word, or if no leaf is `mask`.
      TypeError: if an argument has the wrong type, or `loss_fn` returned no pair.

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

    def loss_and_count(trained: list[jax.Array], batch: Batch) -> Any:
        loss_sum, n, _ = unpack(loss_fn(model.build(trained), batch), False)
        return loss_sum, as_real_scalar(n, "num_tokens", jnp.float32)

    forward = jax.jit(loss_and_count)

    @jax.jit
    def backward(batch: Batch, share: float) -> Any:
        def result(trained: list[jax.Array], i: int) -> jax.Array:
            return loss_and_count(trained, batch)[i] * (1.0 if i else share)

        return [jax.grad(result)(model.trained, i) for i in (0, 1)]

    largest = (x for x, n in zip(batches, sizes, strict=True) if n == max(sizes))
    given = max(largest, key=lambda batch: float(forward(model.trained, batch)[1]))
    structure = jax.tree.structure(given)
    batch = {k: x if is_key(x) else np.asarray(x) for k, x in named_leaves(given)}
    leaves = {path: x for path, x in batch.items() if not is_key(x) and x.size}

    def at(trained: list[jax.Array]) -> Loss:
        def loss(batch: Leaves) -> list[float]:
            of_batch = forward(trained, structure.unflatten(batch.values()))
            return [float(x) for x in of_batch]

        return loss

    loss = at(model.trained)
    named = [x for x in leaves if mask in (x, *re.findall(r"[^\[\].']+", x)[-1:])]
    if mask not in ("auto", None) and not named:
        raise ValueError(f"mask must be one of {[*leaves]}: got {mask!r}.")
    program = str(jax.make_jaxpr(loss_and_count)(model.trained, given))
    rtol = 1e-2 if re.search(r"\b(b?f16|f8_\w+)\[", program) else 1e-4
    gradient, of_count = map(as_vector, backward(given, 1.0))
    findings = [*_trains(gradient, of_count)] or [*_sums(loss, batch, rtol)]
    if findings:
        return LossReport(tuple(findings), None, FIRST)
    share = 2.0 ** -max(1.0, np.round(np.log2(max(loss(batch)[1], 1.0))))
    findings += _scales(gradient, as_vector(backward(given, share)[0]) / share, rtol)
    if mask is None:
        return LossReport(tuple(findings), None)
    losses = [at([*map(jnp.zeros_like, model.trained)]), loss]
    if not 0 < abs(losses[0](batch)[0]) < np.inf:
        losses = [loss]
    masks = [
        _mask(loss, batch, path, leaves[path], rtol)
        for path in progress([*leaves], "check_loss_fn: leaf")
    ]
    alone = [x for x in masks if x.ends_loss and not x.is_counted]
    counted = [x for x in masks if x.is_counted]
    if named:
        chosen = [x for x in (*counted, *alone) if x.path in named]
    else:
        counted = [x for x in counted if x.is_binary] or counted
        chosen = [*counted, *_suspects(alone, counted, losses, batch)]
    for x in alone:
        is_label = jnp.issubdtype(x.entries.dtype, jnp.integer) and not x.is_binary
        if x not in chosen and not (is_label and x.entries.size >= _size(counted)):
            # A weight or reward of 0 would hide a loss.
            batch = x.without(batch, x.entries == x.absent, int(x.absent != 1))
    checked, doubts = [], []
    for x in progress(chosen, "check_loss_fn: mask"):
        wrong: list[str] | None = None
        if per == "sequence":
            wrong = [*_sequences(losses[0], batch, x, rtol)] if x.is_counted else []
        elif named or not x.may_be_data:
            wrong = _tokens(losses, batch, x, rtol)
        findings += wrong or []
        if x.is_counted:
            (doubts if wrong is None else checked).append(x.path)
    remarks = [f"Without {x.path}, the loss is 0 and the count stays." for x in alone]
    if checked:
        how = "row by row" if per == "sequence" else "entry by entry"
        how = f"{how} of {', '.join(checked)}"
        return LossReport(tuple(findings), how, None, tuple(remarks))
    note = f"it is the same without {mask if named else 'any leaf'}. {NAME_IT}"
    if doubts:
        why = "which may be no mask, or has entries whose losses depend on each other"
        note = f"it follows {', '.join(doubts)}, {why}. {NAME_IT}"
    note = FIRST if findings else note
    return LossReport(tuple(findings), None, note, tuple(remarks))


def _trains(gradient: np.ndarray, of_count: np.ndarray) -> Iterator[str]:
    """Yields what is wrong with what the parameters change."""
    if of_count.any():
        yield (
            "loss and count are swapped: the parameters change the count alone. Return "
            "(loss_sum, num_tokens)."
            if not gradient.any()
            else "the parameters change the count, which is taken as a constant. Stop "
            "its gradient (jax.lax.stop_gradient), and that of the same weights in the "
            "loss."
        )
    elif not gradient.any():
        yield (
            "no parameter changes the loss: its gradient is 0. Is there a "
            "stop_gradient, an argmax, or a model other than params?"
        )


def _scales(gradient: np.ndarray, scaled: np.ndarray, rtol: float) -> Iterator[str]:
    """Yields whether the gradient depends on the size of the loss."""
    size = np.linalg.norm(gradient)
    if not np.isfinite(size):
        yield f"the gradient must be finite: got one of norm {size}."
    elif not np.linalg.norm(scaled - gradient) <= 10 * rtol * size:
        yield (
            "the gradient depends on the size of the loss: that of the mean, times the "
            f"count, has the norm {np.linalg.norm(scaled):.3g}, that of the sum "
            f"{size:.3g}. Does the backward pass clip, or round to 8 bits of a fixed "
            "range? Divide both results by one constant, a power of two near the "
            "tokens of a window: (loss_sum / c, num_tokens / c)."
        )


def _rows(batch: Leaves, rows: Any) -> Leaves:
    return {path: x[np.asarray(rows)] for path, x in batch.items()}


def _sums(loss: Loss, batch: Leaves, rtol: float) -> Iterator[str]:
    """Yields what is wrong with rows that are doubled, halved or reversed."""
    rows = np.arange(len([*batch.values()][0]) // 2 * 2)
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
        shares = np.array([[0.5, 0.5], counts / (n or 1)])
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


def _mask(loss: Loss, batch: Leaves, path: str, x: np.ndarray, rtol: float) -> Mask:
    """What happens without the entries of a leaf, by the value that ends most."""
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    is_one_hot = x.ndim > 1 and x.shape[-1] > 1 and bool((x.sum(-1) == 1).all())
    is_binary = x.dtype == bool or set(np.unique(x)) == {0, 1} and not is_one_hot
    values = [0, 1] if is_binary else [0]
    if is_integer and not is_binary:
        often, counts = np.unique(x, return_counts=True)
        own = often[0], often[-1], often[counts.argmax()]
        low, high = jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max
        values = [
            v for v in dict.fromkeys([*ABSENT, *map(int, own)]) if low <= v <= high
        ]
    whole, n = loss(batch)
    found = []
    for value in values:
        after, m = loss(batch | {path: np.full_like(x, value)})
        # NaN is 0/0 without tokens, or what a class that does not exist gives.
        is_known = bool(np.isfinite(after)) or not is_integer or is_binary
        is_counted = is_known and m < n * (1 - 1e-6)
        moves = not abs(after - whole) <= 1e-6 * abs(whole)
        ends = is_known and not abs(after) > rtol * abs(whole)
        found.append(Mask(path, x, value, is_binary, m, is_counted, moves, ends))
    return min(found, key=lambda x: (x.count if x.is_counted else n, not x.ends_loss))


def _size(masks: list[Mask]) -> int:
    return max((x.entries.size for x in masks), default=0)


def _suspects(
    alone: list[Mask], counted: list[Mask], losses: list[Loss], batch: Leaves
) -> list[Mask]:
    """The masks that end the loss alone, and are neither rewards nor estimates."""
    size = _size(counted)
    found = [
        x
        for x in alone
        if x.entries.size >= size
        and (x.is_binary or x.is_ignored_label and (x.entries == x.absent).any())
    ]
    if not found or len(losses) == 1:
        return found
    # With weights of 1/t, the loss of some tokens is an estimate of that of all.
    masks = [x.path for x in (*found, *counted)]
    before = [loss(batch)[0] for loss in losses]
    for path, x in batch.items():
        if path in masks or is_key(x) or not is_float(x) or x.size > _size(found):
            continue
        twice = batch | {path: 2 * x}
        ratios = [f(twice)[0] / y for f, y in zip(losses, before, strict=True)]
        if abs(ratios[0] - 0.5) < 1e-3 or max(abs(np.array(ratios) - 2)) < 1e-3:
            return []
    return found


def _some_rows(batch: Leaves, mask: Mask) -> Iterator[tuple[Leaves, list[Leaves]]]:
    """Some rows, twice each, also without some of their entries, one at a time."""
    there = mask.entries != mask.absent
    for i in np.unique(np.linspace(0, len(there) - 1, MOST_ROWS).astype(int)):
        row, found = _rows(batch, [i, i]), np.flatnonzero(there[i])
        some = found[np.linspace(0, len(found) - 1, min(len(found), 3)).astype(int)]
        numbers = np.arange(2 * there[i].size).reshape(2, *there[i].shape)
        yield row, [mask.without(row, numbers == x) for x in some]


def _tokens(
    losses: list[Loss], batch: Leaves, mask: Mask, rtol: float
) -> list[str] | None:
    """What is wrong with a count of tokens; `None` if it cannot be told."""
    numbers = np.arange(mask.entries.size).reshape(mask.entries.shape)

    def parts(loss: Loss) -> tuple[float, float, float, bool]:
        """The loss, that of all entries, how far halves are from adding up to it.

        Last, whether the counts of halves add up.
        """
        where = False, numbers % 2 == 0, numbers % 2 == 1, True
        found = np.array([loss(mask.without(batch, x)) for x in where]).T
        at_least_1 = np.where(found == 1, 0, found)  # of maximum(count, 1)
        (whole, moved, error), *counts = (
            (abs(x), abs(x - none), abs(one + other - x - none))
            for x, one, other, none in (*found, at_least_1[1])
        )
        return whole, moved, error, any(e <= 1e-5 * m for _, m, e in counts)

    path, views, can_tell = mask.path, losses, True
    whole, moved, error, count_adds_up = parts(losses[-1])
    adds_up = error <= 1e-5 * moved
    if not mask.moves_loss:
        views = []
    elif adds_up and (mask.ends_loss or not mask.is_ignored_label):
        views = losses[-1:]
    elif len(losses) > 1:  # at parameters of zero, tokens do not see each other
        whole, moved, error, _ = parts(losses[0])
        adds_up = error <= rtol * whole
        views = [] if moved <= 1e-6 * whole else losses
        if views and not adds_up:
            depend = f"the losses of {path}'s entries depend on each other, and the "
            depend += f"count is a sum over them. {PER_SEQUENCE}"
            are_equal, can_tell = _equals(losses[0], batch, mask)
            if count_adds_up or not are_equal:
                is_wrong = count_adds_up and mask.ends_loss
                return [depend] if is_wrong else None
            # A token takes several entries, such as two neighbors of a packed row.
            views, adds_up, count_adds_up = losses[-1:], True, True
    if not views:
        return [
            f"the count follows {path}, which the loss ignores. Multiply the losses by "
            "it, or count with the mask that they are multiplied by."
        ]
    only_loss, only_count = 0, 0
    lost = [[], [], []]  # whether the first entry of a row changes the count alone, ...
    for row, without in _some_rows(batch, mask):
        before = [loss(row) for loss in views]
        for by_row, batch_without in zip(lost, without, strict=False):
            after = [loss(batch_without) for loss in views]
            is_counted = before[0][1] != after[0][1]
            pairs = zip(before, after, strict=True)
            changes = [abs(y - x) > 1e-6 * abs(x) for (x, _), (y, _) in pairs]
            only_loss += not is_counted and changes[0] and adds_up  # not by attention
            only_count += is_counted and not any(changes)
            by_row.append(is_counted and not changes[0])
    size, findings = sum(map(len, lost)), []
    # At parameters of zero some tokens may have no loss, but not the first everywhere.
    if only_count or any(len(x) > 1 and all(x) for x in lost):
        findings.append(
            f"the count takes in what the loss leaves out: {sum(map(sum, lost))} of "
            f"{size} entries of {path} change the count alone. Is it taken from "
            f"labels before their shift, or with padding? {OWN_MASK}"
        )
    if only_loss:
        n, guess = losses[-1](batch)[1], "Is it that of another mask, or a constant?"
        if n == mask.entries.size:
            guess = "The count is the mask's size."
        elif mask.is_counted or n == len(mask.entries):
            guess = f"Is the count one per sequence? {PER_SEQUENCE}"
        findings.append(
            f"the loss takes in what the count leaves out: {only_loss} of {size} "
            f"entries of {path} change the loss alone. {guess} {OWN_MASK} If {path} is "
            "no mask, name the one that is, or give mask=None."
        )
    elif not findings and mask.is_counted and adds_up and not count_adds_up:
        findings.append(
            f"the count is not a sum over {path}'s entries, as the loss is: halves of "
            f"them do not add up to it. {OWN_MASK}"
        )
    elif mask.ends_loss and mask.count not in (0, 1):  # maximum(count, 1) is 1
        findings.append(
            f"the count is {mask.count:g} without any entry of {path}, not 0. "
            f"{OWN_MASK}"
        )
    return findings if findings or can_tell else None


def _equals(loss: Loss, batch: Leaves, mask: Mask) -> tuple[bool, bool]:
    """Whether loss and count keep their ratio without some entries; if that tells."""
    numbers = np.arange(mask.entries.size).reshape(mask.entries.shape)
    x, n = loss(batch)
    some = [loss(mask.without(batch, numbers % i == 0)) for i in (2, 3, 5, 7, 13, 29)]
    some = [(y, 0 if y == 0 and m == 1 else m) for y, m in some]  # maximum(count, 1)
    are_equal = all(abs(y * n - x * m) <= 1e-4 * abs(x * n) for y, m in some)
    return are_equal, any(0 < m < n for _, m in some)


def _sequences(loss: Loss, batch: Leaves, mask: Mask, rtol: float) -> Iterator[str]:
    """Yields what is wrong with a count of sequences; a row may hold several."""
    by_token, left_out = [], []
    whole, _ = loss(batch)
    for row, without in _some_rows(batch, mask):
        value, n = loss(row)
        left_out.append(n == 0 and abs(value) > rtol * abs(whole))
        if len(without) > 1:
            by_token.append(all(loss(x)[1] != n for x in without))
    if by_token and all(by_token):
        yield (
            "the count is not one of sequences: it changes with every entry of "
            f'{mask.path}. For a mean over tokens, leave per="sequence" out.'
        )
    if any(left_out):
        yield (
            "the loss takes in sequences that the count leaves out: "
            f"{sum(left_out)} of {len(left_out)} rows have a loss and a count of 0. "
            "Leave both out, or neither."
        )
