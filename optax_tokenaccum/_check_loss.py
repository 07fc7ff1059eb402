"""Is a loss a sum over tokens, and is its count the count of those tokens?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_tokenaccum import _checks
from optax_tokenaccum._micro_batch import LossFn, unpack

# (loss_sum, num_tokens) of some rows.
Measure = Callable[[Any], tuple[float, float]]

RTOL = 1e-4  # of a loss in float32, or of one in bfloat16 that is summed in float32
MOST_PROBES = 32  # positions of a mask that are looked at


@dataclass(frozen=True)
class LossReport:
    """What `check_loss_fn` found. `print(report)` says it in words.

    Attributes:
      findings: what is wrong, a sentence each; empty where nothing was found.
      count_checked: how the count was checked; `None` where it could not be.

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

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def assert_exact(self) -> None:
        """Raises `AssertionError` with the findings unless it passed."""
        if not self.passed:
            raise AssertionError(f"loss_fn does not return sums.\n{self}")

    def __str__(self) -> str:
        lines = [f"WRONG: {finding}" for finding in self.findings]
        if self.passed:
            lines.append("OK: the loss and its count are sums over rows.")
        if self.count_checked:
            lines.append(f"The count was checked {self.count_checked}.")
        else:
            lines.append(
                "Whether the count is the loss's own was not checked: no leaf of the "
                "batch looks like a mask, and the loss is not uniform at parameters of "
                "zero."
            )
        return "\n".join(lines)


def check_loss_fn(
    loss_fn: LossFn, params: Any, micro_batches: Sequence[Any]
) -> LossReport:
    """Checks that `loss_fn` returns a sum over tokens and the number of those tokens.

    The likeliest mistake with exact accumulation is a loss that is no sum: it compiles,
    it trains, and the result is wrong. The same rows are cut in other ways and counted
    twice: sums must add up. Entries of masks are taken away one at a time: loss and
    count must change together. Where there is no mask, parameters of zero make a cross
    entropy the same for every token, so that loss and count must be proportional.

    It finds a loss that is already a mean, a count from another mask (unshifted, with
    padding, one per sequence), a term that depends on the batch (an auxiliary loss,
    batch statistics), and randomness.

    Args:
      loss_fn: `loss_fn(params, micro_batch) -> (loss_sum, num_tokens)`.
      params: the parameters to look at.
      micro_batches: pytrees whose leaves share a leading axis of rows, of two rows or
        more, with different numbers of tokens.

    Returns:
      A `LossReport`: print it.

    Raises:
      ValueError: the leaves of a micro-batch do not share a leading axis, or no
        micro-batch has two rows.
      TypeError: `loss_fn` is not a function or returned something else than a pair.

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
    _checks.check_function(loss_fn, "loss_fn")
    batches = [jax.tree.map(jnp.asarray, batch) for batch in micro_batches]
    sizes = [_checks.leading_axis(batch, "a micro-batch") for batch in batches]
    if max(sizes, default=0) < 2:
        raise ValueError(
            "check_loss_fn needs a micro-batch of at least two rows, to cut it: got "
            f"micro-batches of {sizes} rows."
        )

    @jax.jit
    def measured(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, (num_tokens, _) = unpack(loss_fn(params, batch), False)
        return loss_sum, _checks.as_num_tokens(num_tokens)

    def at(params: Any) -> Measure:
        def measure(batch: Any) -> tuple[float, float]:
            loss_sum, num_tokens = measured(params, batch)
            return float(loss_sum), float(num_tokens)

        return measure

    measure = at(params)
    batch = batches[int(np.argmax(sizes))]
    findings = list(_findings_on_sums(measure, batch))
    how = None
    if not findings:
        zeros = jax.tree.map(jnp.zeros_like, params)
        how, found = _check_masks(measure, batches)
        if how is None:
            how, found = _check_uniform(at(zeros), batches)
        findings += found
    return LossReport(tuple(findings), how)


def _same(x: float, y: float, size: float = 0.0) -> bool:
    return abs(x - y) <= RTOL * max(abs(x), abs(y), size)


def _rows(batch: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: x[start:stop], batch)


def _findings_on_sums(measure: Measure, batch: Any) -> Iterator[str]:
    """What does not add up when rows are counted twice or apart."""
    rows = _checks.leading_axis(batch, "a micro-batch")
    loss, n = measure(batch)
    if measure(batch) != (loss, n):
        yield "the loss is random: two calls differ. Fix its key, or leave dropout out."
        return
    if not (np.isfinite(loss) and np.isfinite(n)):
        yield f"loss and count must be finite: got {loss} and {n}."
        return
    twice, n_twice = measure(jax.tree.map(lambda x: jnp.concatenate([x, x]), batch))
    halves = [
        measure(_rows(batch, *cut)) for cut in ((0, rows // 2), (rows // 2, rows))
    ]
    loss_apart, n_apart = np.sum(halves, axis=0).tolist()
    size = sum(abs(loss) for loss, _ in halves)
    if not _same(n_twice, 2 * n):
        yield (
            f"the count is no sum: {n:g} tokens, and {n_twice:g} with every row twice. "
            "Return the sum of the loss's own mask."
        )
    elif not _same(n_apart, n):
        yield (
            f"the count depends on the batch: {n:g} tokens in all rows, {n_apart:g} in "
            "their halves. Return the sum of the loss's own mask."
        )
    if _same(twice, loss, size) and not _same(loss, 0, size):
        yield (
            "the loss is already a mean: rows counted twice leave it as it is. Return "
            "the sum."
        )
    elif not _same(twice, 2 * loss, size):
        yield (
            "the loss holds a term that is no sum over tokens: it is "
            f"{twice:.6g}, not {2 * loss:.6g}, with every row twice. An auxiliary loss "
            "that is a mean goes in as loss_sum + c * auxiliary * num_tokens."
        )
    elif not _same(loss_apart, loss, size):
        yield (
            "the loss of a row depends on the other rows: all rows together have "
            f"{loss:.6g}, their halves {loss_apart:.6g}. Batch statistics (BatchNorm) "
            "and balance losses do that; no accumulation can make them those of the "
            "full batch."
        )


# Masks.


def _check_masks(measure: Measure, batches: list[Any]) -> tuple[str | None, list[str]]:
    """Takes entries of what looks like a mask away: loss and count change together."""
    batch = max(batches, key=lambda batch: measure(batch)[1])
    leaves, structure = jax.tree.flatten(batch)
    found, looked_at = [], []
    for place, (path, leaf) in enumerate(_checks.named_leaves(batch)):
        without = _value_of_nothing(leaf)
        if without is None:
            continue

        def measure_with(leaf: jax.Array, place: int = place) -> tuple[float, float]:
            changed = [*leaves[:place], leaf, *leaves[place + 1 :]]
            return measure(structure.unflatten(changed))

        if all(measure_with(jnp.full_like(leaf, without))):
            continue  # labels of 0 and 1, say: nothing is without loss or count
        before = measure_with(leaf)
        only_loss, only_count, both = 0, 0, 0
        for entry in _entries(leaf, without):
            after = measure_with(leaf.at[tuple(entry)].set(without))
            loss_changed, count_changed = (
                x != y for x, y in zip(before, after, strict=True)
            )
            both += loss_changed and count_changed
            only_loss += loss_changed and not count_changed
            only_count += count_changed and not loss_changed
        looked_at.append(path)
        if only_count:
            found.append(
                f"the count takes in what the loss leaves out: {only_count} of "
                f"{both + only_count + only_loss} entries of {path} change the count "
                "alone. Is it taken from labels before their shift, or with padding? "
                "Count with the mask that the loss is multiplied by."
            )
        if only_loss:
            found.append(
                f"the loss takes in what the count leaves out: {only_loss} of "
                f"{both + only_count + only_loss} entries of {path} change the loss "
                "alone. Is it one per sequence, or a constant? Count with the mask "
                "that the loss is multiplied by."
            )
    how = f"entry by entry of {', '.join(looked_at)}" if looked_at else None
    return how, found


def _value_of_nothing(leaf: jax.Array) -> Any:
    """What takes an entry of a mask away, or `None` where a leaf is no mask."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # keys
        return None
    values = np.unique(np.asarray(leaf)) if leaf.ndim else np.zeros(0)
    if leaf.dtype == jnp.bool_ or set(values.tolist()) == {0, 1}:
        return np.zeros((), leaf.dtype)
    is_labels = jnp.issubdtype(leaf.dtype, jnp.integer) and values.size
    return values[0] if is_labels and values[0] < 0 else None


def _entries(leaf: jax.Array, without: Any) -> np.ndarray:
    """Entries of a mask that are there: the first, the last, and some between."""
    there = np.argwhere(np.asarray(leaf) != without)
    rows = np.unique(there[:, 0], return_index=True)[1] if len(there) else []
    chosen = np.linspace(0, len(there) - 1, min(len(there), MOST_PROBES)).astype(int)
    return there[np.union1d(chosen, rows[: MOST_PROBES // 2]).astype(int)]


# Where there is no mask: a cross entropy at parameters of zero.


def _check_uniform(
    measure_at_zero: Measure, batches: list[Any]
) -> tuple[str | None, list[str]]:
    """With equal logits every token costs the same: the loss is a count itself."""
    rows = [
        _rows(batch, i, i + 1)
        for batch in batches
        for i in range(jax.tree.leaves(batch)[0].shape[0])
    ][:MOST_PROBES]
    losses, counts = np.array([measure_at_zero(row) for row in rows]).T
    if not np.isfinite(losses).all() or not losses.any():
        return None, []
    how = "at parameters of zero, where every token costs the same"
    if np.ptp(losses) <= RTOL * abs(losses).max():
        if np.ptp(counts) == 0:
            return None, []  # rows of equal lengths tell nothing
    elif _proportional(losses, counts):
        return how, []
    ratios = _ratios_of_uniform(losses)
    if ratios is None:
        return None, []
    slope, offset = np.polyfit(counts, losses, 1) if np.ptp(counts) else (0, 0)
    if np.ptp(counts) == 0:
        what = "one per sequence" if counts[0] == 1 else "the same with any padding"
    elif _proportional(losses, counts + offset / slope):
        what = f"{-offset / slope:+.3g} in every row: labels before their shift?"
    else:
        what = "another mask's"
    return how, [
        f"the count is not that of the loss but {what}. Rows whose loss tokens are as "
        f"{' to '.join(f'{r:g}' for r in ratios[:4])} were counted as "
        f"{counts[:4].tolist()}. Count with the mask that the loss is multiplied by."
    ]


def _proportional(losses: np.ndarray, counts: np.ndarray) -> bool:
    ratio = losses.sum() / counts.sum() if counts.sum() else np.inf
    return bool((abs(losses - ratio * counts) <= RTOL * abs(losses).max()).all())


def _ratios_of_uniform(losses: np.ndarray) -> np.ndarray | None:
    """The rows' tokens up to a factor, if losses are multiples of the log of a number.

    That of the classes, or of one that they are a power of.
    """
    cost = np.log(np.arange(2, 300_000))[:, None]
    tokens = losses / cost
    near = abs(tokens - np.round(tokens)) <= RTOL * np.maximum(tokens, 1)
    fits = near.all(1) & (np.ptp(np.round(tokens), axis=1) > 0)
    fits &= RTOL * tokens.max(1) < 0.05  # many tokens are near to anything
    return np.round(tokens[np.flatnonzero(fits)[-1]]) if fits.any() else None
