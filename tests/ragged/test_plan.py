"""Plans hold every sequence once, keep their limits, and have the lowest cost."""

import functools
import itertools
import operator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from optax_tokenaccum.ragged import choose_length_buckets, plan_window

COSTS = [None, lambda rows, length: rows * length**2, lambda rows, length: 7 + rows]


def cost(plans: Any, price: Any = None) -> int:
    price = price or (lambda rows, length: rows * length)
    return sum(price(plan.num_rows, plan.length) for plan in plans)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    st.lists(st.integers(1, 16), min_size=1, max_size=6),
    st.sets(st.integers(1, 15), max_size=2).map(lambda found: sorted(found | {16})),
    st.integers(16, 40),
    st.sampled_from(COSTS),
)
def test_no_assignment_to_the_shapes_is_cheaper(
    window: list[int], length_buckets: list[int], max_tokens: int, price: Any
):
    shapes = [(max_tokens // length, length) for length in length_buckets]
    best = np.inf
    for assigned in itertools.product(range(len(shapes)), repeat=len(window)):
        if all(n <= shapes[s][1] for n, s in zip(window, assigned, strict=True)):
            calls = [-(-assigned.count(s) // shapes[s][0]) for s in range(len(shapes))]
            sizes = [(price or operator.mul)(*shape) for shape in shapes]
            best = min(best, sum(map(np.multiply, calls, sizes)))
    options: Any = {"max_tokens": max_tokens, "length_buckets": length_buckets}
    assert cost(plan_window(window, **options, cost=price), price) == best


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([None, lambda rows, length: rows * length**2]),
)
def test_no_other_buckets_waste_less(found: list[int], n: int, price: Any):
    def total(chosen: tuple[int, ...]) -> float:
        charge = price or (lambda rows, length: rows * length)
        bucket_of = np.searchsorted(chosen, found)
        rows = np.bincount(bucket_of, minlength=len(chosen))
        return sum(
            float(charge(np.array(r), b)) for r, b in zip(rows, chosen, strict=True)
        )

    chosen = choose_length_buckets(found, n, cost=price)
    assert list(chosen) == sorted(set(chosen)) and len(chosen) <= n
    assert chosen[-1] == max(found)
    distinct = sorted(set(found))
    others = itertools.combinations(distinct[:-1], min(n, len(distinct)) - 1)
    best = min(total((*other, distinct[-1])) for other in others)
    assert total(chosen) == pytest.approx(best)


plan = functools.partial(plan_window, max_tokens=64)


def test_lengths_may_be_any_iterable():
    lengths = [3, 60, 2]
    expected = repr(plan(lengths))
    for given in (
        dict(enumerate(lengths)).values(),
        map(int, lengths),
        np.array(lengths),
    ):
        assert repr(plan(given)) == expected
    assert choose_length_buckets((n for n in lengths), 1) == (60,)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "at least 1: got none", lambda: plan([])),
        (ValueError, "a list of numbers", lambda: plan([[3, 4]])),
        (ValueError, "got 0 at index 2", lambda: plan([3, 1, 0])),
        (ValueError, "got 65 tokens at index 1", lambda: plan([3, 65])),
        (ValueError, "max_tokens", lambda: plan_window([1], max_tokens=0)),
        (ValueError, "room for 65 rows", lambda: plan([1], batch_multiple=65)),
        (ValueError, "got -1 at index 0", lambda: choose_length_buckets([-1], 2)),
        (ValueError, "n must be", lambda: choose_length_buckets([1], 0)),
    ],
    ids=range(8),
)
def test_what_does_not_fit_is_named(error: type, message: str, call: Any):
    with pytest.raises(error, match=message):
        call()
