"""Which weight a loop gives to the tokens of each micro-batch."""

from typing import NamedTuple

import numpy as np

SIGMAS = 8  # 5 was seen: a token's rounding errors are correlated


class Weights(NamedTuple):
    """The weight of a token of each micro-batch, relative to the exact mean."""

    values: np.ndarray  # [k]; an exact weight is 1
    errors: np.ndarray  # how far rounding may move each weight, [k]
    tokens: np.ndarray  # [k]

    def are_near(self, expected: np.ndarray | int) -> np.ndarray:
        return abs(self.values - expected) <= self.errors * np.maximum(1, expected)

    def explanation(self) -> str:
        """Explains weights that are not all 1."""
        if max(self.tokens) > 2 and self.are_near(self.tokens).all():
            return (
                "a sum is given where a mean is expected, so each micro-batch is "
                "weighted by its tokens once too often. Give optax_tokenaccum."
                'MultiSteps gradients="sum", or divide the loss by its tokens. Or the '
                "loop is right, and loss_fn returns a mean: check_loss_fn tells."
            )
        if (
            min(self.tokens[self.tokens > 0]) < 1
            and self.are_near(np.minimum(self.tokens, 1)).all()
        ):
            return (
                "micro-batches are divided by 1 where loss_fn counts less, as a mean "
                "over max(n, 1) is, so they count for too little. Divide by n wherever "
                "it is positive: loss_sum / jnp.where(n > 0, n, 1)."
            )
        told, k = self.errors < 0.5, len(self.tokens)
        lost, twice = (np.sum(told & self.are_near(times)) for times in (0, 2))
        if lost:
            return (
                f"{lost} of the {k} micro-batches count for nothing: the window closes "
                "without them, or they are lost on the way."
            )
        if twice and (self.are_near(1) | self.are_near(2)).all():
            verb = "count" if twice > 1 else "counts"
            return f"{twice} of the {k} micro-batches {verb} twice."
        if (found := self._wrong_counts()) is not None:
            what, counts = found
            right = self.tokens[self.tokens > 0]
            wrong, right = (
                ", ".join(f"{n:.4g}" for n in x[:4]) for x in (counts, right)
            )
            return (
                f"{what} {wrong} where loss_fn counts {right}. Take the count that "
                "loss_fn returns: without padding, and of labels after their shift."
            )
        return (
            "the micro-batches are weighted in a way of their own, a token with "
            f"{min(self.values):.3g} to {max(self.values):.3g} where 1 is exact. "
            "Something rescales each of them: clipping, which belongs inside the "
            "optimizer that runs once a window, or wrong counts."
        )

    def _wrong_counts(self) -> tuple[str, np.ndarray] | None:
        """What the loop does with which wrong counts; `None` if it is not known."""
        w, errors, n = (x[self.tokens > 0] for x in self)
        if (w <= 0).any():
            return None
        # Weights of means add up to 1, whatever their counts. Clipped ones do not.
        total = n.sum()
        if abs(w @ n - total) <= min(errors @ n, 0.01 * total):
            # Only the proportion is known. Counts that are off by a constant grow by 1
            # with every token.
            slope = np.polyfit(n, w * n, 1)[0] if np.ptp(n) else 1.0
            what = "the means are averaged with wrong counts, in the proportion of"
            return what, w * n / (slope if slope > 0 else 1)
        # The means may be weighted by their tokens, or all alike.
        for divisors in (n / w, total / len(self.tokens) / w):
            slack = divisors * errors
            is_whole = abs(divisors - np.round(divisors)) <= np.minimum(slack, 0.02)
            is_other = abs(divisors - n) > slack
            is_same = np.ptp(divisors) <= slack.min()
            if is_other.sum() > 1 and (is_whole.all() or is_same):
                return "the losses are divided by wrong counts, by", divisors
        return None


def estimate_weights(
    gradients: np.ndarray, tokens: np.ndarray, applied: np.ndarray, rtol: float
) -> Weights | None:
    """Estimates weights by least squares; `None` if they don't explain `applied`.

    Args:
      gradients: of each micro-batch's summed loss, `[k, parameters]`.
      tokens: of each micro-batch, `[k]`.
      applied: the gradient that the loop applied, `[parameters]`.
      rtol: the relative error up to which gradients count as the same.
    """
    if not np.isfinite(applied).all() or not applied.any():
        return None
    columns = gradients[tokens > 0].T
    size, k = columns.shape
    if np.linalg.matrix_rank(columns) < k:
        return None
    inverse = np.linalg.pinv(columns)
    found = inverse @ applied
    rest = applied - columns @ found
    limit = rtol * np.linalg.norm(applied)
    if np.linalg.norm(rest) > limit:
        return None
    if size > 4 * k:
        # White's standard errors, because the noise differs from number to number.
        errors = SIGMAS * np.sqrt(inverse**2 @ rest**2)
    else:
        # There are too few numbers to estimate the noise: assume that it is rtol.
        errors = np.linalg.norm(inverse, axis=1) * limit
    values, slack = np.zeros(len(tokens)), np.full(len(tokens), np.inf)
    values[tokens > 0], slack[tokens > 0] = found, errors
    total = tokens.sum()
    return Weights(values * total, rtol + slack * total, tokens)
