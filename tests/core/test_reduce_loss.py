"""The four reductions of policy gradients, under every cut between sequences."""

from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_tokenaccum.losses import Reduction, reduce_loss

REDUCTIONS = get_args(Reduction)
NORM = REDUCTIONS[-1]
LENGTH, NUMBER, MAX_LENGTH, RTOL = 12, 12, 10.0, 1e-6

Sequence = tuple[np.ndarray, np.ndarray]  # losses and mask, `[length]`


def sequences_of(seed: int) -> list[Sequence]:
    """Sequences with signed losses; every fourth has no tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(NUMBER):
        n = rng.integers(1, LENGTH // 2 + 1)
        mask = rng.uniform(size=n) < rng.uniform(0.3, 1)
        mask[0] = True
        made.append((rng.normal(size=n) + seed % 3 - 1, mask & (i % 4 != 3)))
    return made


def check_exact(
    found: list[Any], sequences: list[Sequence], reduction: str, count_empty: bool
) -> None:
    """Compares with the definition, one sequence after another, in float64."""
    total, count, size = 0.0, 0.0, 0.0
    for losses, mask in sequences:
        n = mask.sum()
        by = {"seq-mean-token-mean": max(n, 1), "seq-mean-token-sum-norm": MAX_LENGTH}
        of_tokens = losses * mask / by.get(reduction, 1)
        total, size = total + of_tokens.sum(), size + abs(of_tokens).sum()
        count += n if reduction == "token-mean" else float(n > 0 or count_empty)
    assert abs(sum(float(x) for x, _ in found) - total) <= RTOL * size
    assert sum(float(n) for _, n in found) == count


def rows_of(sequences: list[Sequence], width: int = LENGTH) -> dict[str, np.ndarray]:
    """A sequence in a row; padding has losses of NaN."""
    losses = np.full((NUMBER, width), np.nan, np.float32)
    batch = {"losses": losses, "mask": np.zeros((NUMBER, width), bool)}
    for row, (losses, mask) in enumerate(sequences):
        batch["losses"][row, : len(mask)] = losses
        batch["mask"][row, : len(mask)] = mask
    return batch


def packed(sequences: list[Sequence], width: int = LENGTH) -> dict[str, np.ndarray]:
    """Several sequences in a row; numbers are local to it, and tokens in any order."""
    batch = rows_of([], width) | {"segment_ids": np.zeros((NUMBER, width), int)}
    row = start = 0
    for i, (losses, mask) in enumerate(sequences):
        if start + len(mask) > width:
            row, start = row + 1, 0
        where = row, slice(start, start + len(mask))
        batch["losses"][where], batch["mask"][where] = losses, mask
        batch["segment_ids"][where] = 17 * (i + 3) % 29 + 1
        start += len(mask)
    order = np.random.default_rng(0).permutation(width)
    return {name: x[:, order] for name, x in batch.items()}


LAYOUTS = {"rows": rows_of, "packed": packed}
of_every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
of_every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def reduce(batch: Any, reduction: str, **options: Any) -> Any:
    norm = reduction == "seq-mean-token-sum-norm"
    options |= {"max_length": MAX_LENGTH} if norm else {}
    return reduce_loss(**batch, reduction=reduction, **options)


@of_every_layout
@of_every_reduction
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
        ends = np.minimum(np.cumsum([*sizes, NUMBER]), NUMBER)
        parts = [sequences[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        given = zip(parts, widths, strict=False)
        found = [jitted(LAYOUTS[layout](part, width)) for part, width in given]
        check_exact(found, sequences, reduction, count_empty=False)

    check()


@of_every_reduction
def test_sequences_without_tokens_and_padding(reduction: str):
    sequences = sequences_of(0)
    for count_empty in (False, reduction != "token-mean"):
        batch = packed(sequences, 2 * LENGTH)
        found = reduce(batch, reduction, count_empty=count_empty)
        check_exact([found], sequences, reduction, count_empty)
        # Segment 0 is padding even under the mask.
        batch["losses"] = np.nan_to_num(batch["losses"], nan=1e3)
        for weight in (1, -1):
            weights = np.where(batch["segment_ids"] == 0, weight, batch["mask"])
            masked = batch | {"mask": weights}
            assert reduce(masked, reduction, count_empty=count_empty) == found


@of_every_reduction
def test_the_derivative_by_a_loss_is_its_weight_and_none_flows_to_padding(
    reduction: str,
):
    batch = rows_of(sequences_of(1))
    weights = batch["mask"] * np.linspace(0.25, 2, LENGTH, dtype=np.float32)
    gradient = jax.grad(
        lambda losses: reduce({"losses": losses, "mask": weights}, reduction)[0]
    )(batch["losses"])
    divisor = {
        "seq-mean-token-mean": np.maximum(weights.sum(1, keepdims=True), 1e-9),
        "seq-mean-token-sum-norm": MAX_LENGTH,
    }.get(reduction, 1)
    np.testing.assert_allclose(gradient, weights / divisor, rtol=1e-6)


@of_every_layout
@of_every_reduction
def test_a_weight_that_is_not_a_weight_is_loud(layout: str, reduction: str):
    batch = LAYOUTS[layout](sequences_of(1))
    places = np.argwhere(~np.isnan(batch["losses"]))  # with a token or without
    for place, weight in ((0, -1.0), (1, -1.0), (len(places) - 1, np.nan)):
        alone = np.zeros(batch["mask"].shape, np.float32)
        alone[*places[place]] = weight
        # A micro-batch with this weight alone is not one without tokens.
        for mask in (alone, np.where(alone == 0, batch["mask"], alone)):
            loss_sum, count = reduce(batch | {"mask": mask}, reduction)
            assert np.isnan(loss_sum) and count > 0


@of_every_reduction
def test_rows_without_tokens(reduction: str):
    batch = {"losses": np.float32([[1, 2, 3, 4]]), "mask": np.ones((1, 4), bool)}
    for rows in (slice(0), ...):
        empty = {name: x[rows, :0] for name, x in batch.items()}
        ids = np.zeros(empty["mask"].shape, int)
        assert reduce(empty | {"segment_ids": ids}, reduction) == (0, 0)


def test_one_loss_a_row_says_what_to_write():
    with pytest.raises(ValueError, match=r"return jnp.sum\(.*\), mask.sum\(\)"):
        reduce_loss(np.ones(3), np.ones(3))


def test_strict_dtype_promotion_and_a_traced_length():
    batch = {"losses": jnp.ones((2, 3), jnp.bfloat16), "mask": jnp.ones((2, 3), bool)}
    f = jax.jit(lambda batch, n: reduce_loss(**batch, max_length=n, reduction=NORM))
    for options in ({}, {"mask": batch["losses"]}, {"segment_ids": batch["mask"] + 0}):
        with jax.numpy_dtype_promotion("strict"):
            assert f(batch | options, jnp.bfloat16(3)) == (2, 2)
            for reduction in REDUCTIONS:
                assert reduce(batch | options, reduction)[1] > 0


def test_a_wider_result_for_wider_losses():
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.float32, jnp.bfloat16):
            losses = jax.ShapeDtypeStruct((2, 3), dtype)
            found = jax.eval_shape(reduce_loss, losses, losses)
            assert {x.dtype for x in found} == {jnp.promote_types(dtype, jnp.float32)}
