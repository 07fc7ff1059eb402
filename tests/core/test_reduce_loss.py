"""The four reductions of policy gradients, under every cut between sequences."""

from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum import reduce_loss
from optax_tokenaccum._losses import Reduction

REDUCTIONS = get_args(Reduction)
LENGTH, MAX_LENGTH = 12, 10.0
RTOL = 1e-6


Sequence = tuple[np.ndarray, np.ndarray]  # losses and mask, `[length]`


def sequences_of(seed: int, number: int = 12) -> list[Sequence]:
    """Sequences with signed losses; every fourth has no tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(number):
        n = rng.integers(1, LENGTH // 2 + 1)
        mask = rng.uniform(size=n) < rng.uniform(0.3, 1)
        mask[0] = True
        made.append((rng.normal(size=n) + seed % 3 - 1, mask & (i % 4 != 3)))
    return made


def exact(
    sequences: list[Sequence], reduction: str, count_empty: bool = False
) -> tuple[float, float, float]:
    """The definition, one sequence after another: sum, count, sum of magnitudes."""
    total, count, size = 0.0, 0.0, 0.0
    for losses, mask in sequences:
        n, s = mask.sum(), (losses * mask).sum()
        by = {
            "token-mean": 1,
            "seq-mean-token-mean": max(n, 1),
            "seq-mean-token-sum": 1,
            "seq-mean-token-sum-norm": MAX_LENGTH,
        }[reduction]
        total += s / by
        size += abs(losses * mask).sum() / by
        count += n if reduction == "token-mean" else float(n > 0 or count_empty)
    return total, count, size


def rows_of(sequences: list[Sequence], width: int, rows: int) -> dict[str, np.ndarray]:
    """A sequence in a row; padding has losses of NaN."""
    batch = {
        "losses": np.full((rows, width), np.nan, np.float32),
        "mask": np.zeros((rows, width), bool),
    }
    for row, (losses, mask) in enumerate(sequences):
        batch["losses"][row, : len(mask)] = losses
        batch["mask"][row, : len(mask)] = mask
    return batch


def packed(sequences: list[Sequence], width: int, rows: int) -> dict[str, np.ndarray]:
    """Sequences behind one another; numbers are local to a row, in any order."""
    batch = rows_of([], width, rows) | {"segment_ids": np.zeros((rows, width), int)}
    row = start = 0
    for i, (losses, mask) in enumerate(sequences):
        if start + len(mask) > width:
            row, start = row + 1, 0
        where = row, slice(start, start + len(mask))
        batch["losses"][where], batch["mask"][where] = losses, mask
        batch["segment_ids"][where] = 17 * (i + 3) % 29 + 1
        start += len(mask)
    return batch


LAYOUTS = {"rows": rows_of, "packed": packed}


def reduce(batch: Any, reduction: str, **options: Any) -> Any:
    norm = reduction == "seq-mean-token-sum-norm"
    options |= {"max_length": MAX_LENGTH} if norm else {}
    return reduce_loss(**batch, reduction=reduction, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_cut_gives_the_full_batch(layout: str, reduction: str):
    jitted = jax.jit(lambda batch: reduce(batch, reduction))

    @hypothesis.given(
        st.integers(0, 99),
        st.lists(st.integers(1, 12), min_size=1, max_size=4),
        st.lists(st.sampled_from([LENGTH, 2 * LENGTH]), min_size=5, max_size=5),
    )
    @hypothesis.settings(max_examples=30, deadline=None)
    def check(seed: int, sizes: list[int], widths: list[int]):
        sequences = sequences_of(seed)
        cuts = np.minimum(np.cumsum([0, *sizes, len(sequences)]), len(sequences))
        parts = [sequences[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        found = [
            jitted(LAYOUTS[layout](part, width, len(sequences)))
            for part, width in zip(parts, widths, strict=False)
        ]
        total, count, size = exact(sequences, reduction)
        assert abs(sum(float(x) for x, _ in found) - total) <= RTOL * size
        assert sum(float(n) for _, n in found) == count

    check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sequences_without_tokens_and_padding(reduction: str):
    sequences = sequences_of(0)
    batch = packed(sequences, 2 * LENGTH, 12)
    for count_empty in (False, True)[: 1 if reduction == "token-mean" else 2]:
        total, count, size = exact(sequences, reduction, count_empty)
        found = reduce(batch, reduction, count_empty=count_empty)
        assert abs(float(found[0]) - total) <= RTOL * size
        assert float(found[1]) == count
        # Segment 0 is padding even under the mask.
        batch["losses"] = np.nan_to_num(batch["losses"], nan=1e3)
        for weight in (1, -1):
            weights = np.where(batch["segment_ids"] == 0, weight, batch["mask"])
            masked = batch | {"mask": weights}
            assert reduce(masked, reduction, count_empty=count_empty) == found


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_and_gradients(reduction: str):
    """The derivative by a loss is its weight; none flows to padding."""
    batch = rows_of(sequences_of(1), LENGTH, 12)
    weights = batch["mask"] * np.linspace(0.25, 2, LENGTH, dtype=np.float32)

    def loss_sum(losses: Any) -> Any:
        return reduce({"losses": losses, "mask": weights}, reduction)[0]

    gradient = np.asarray(jax.grad(loss_sum)(batch["losses"]))
    divisor = {
        "seq-mean-token-mean": np.maximum(weights.sum(1, keepdims=True), 1e-9),
        "seq-mean-token-sum-norm": MAX_LENGTH,
    }.get(reduction, 1)
    np.testing.assert_allclose(gradient, weights / divisor, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_weight_that_is_not_a_weight_is_loud(layout: str, reduction: str):
    batch = LAYOUTS[layout](sequences_of(1), LENGTH, 12)
    batch["mask"] = batch["mask"].astype(np.float32)
    for row, weight in ((0, -1.0), (3, -1.0), (0, np.nan)):  # row 3 has no tokens
        weights = batch["mask"].copy()
        weights[row, 0] = weight
        alone = np.zeros_like(weights)  # it is no micro-batch without tokens
        alone[row, 0] = weight
        for mask in (weights, alone):
            loss_sum, count = reduce(batch | {"mask": mask}, reduction)
            assert np.isnan(loss_sum) and count > 0


def test_a_wider_result_for_wider_losses():
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.float32, jnp.bfloat16):
            losses = jax.ShapeDtypeStruct((2, 3), dtype)
            found = jax.eval_shape(reduce_loss, losses, losses)
            assert {x.dtype for x in found} == {jnp.promote_types(dtype, jnp.float32)}
