"""Rows cut and ordered at random give the full batch: random trees, dtypes, masks."""

import functools
from typing import Any, NamedTuple

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    token_accumulation,
    window_value_and_grad,
)

pytestmark = pytest.mark.slow

ROWS, LONGEST_WINDOW = 12, 6

examples = functools.partial(hypothesis.settings, deadline=None)

# Only shapes: a dtype is drawn for each leaf.
TREES = {
    "scalar": (),
    "one": {"w": (3,)},
    "nested": {"a": [(2, 2), (1,)], "b": {"c": (), "d": None}},
    "empty leaf": {"w": (2,), "none": (0, 3)},
}


class Rows(NamedTuple):
    """Sequences whose loss is linear in the parameters, so the gradient is known.

    Attributes:
      x: the gradient of each row's loss per unit of weight; leaves `[ROWS, ...]`.
      weights: the number of tokens in each row, 0 if it is masked; `[ROWS]`.
      dtypes: dtypes of the parameters, in the order of the leaves.
    """

    x: Any
    weights: np.ndarray
    dtypes: tuple[str, ...]


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    tree = TREES[draw(st.sampled_from(sorted(TREES)))]
    kinds = st.sampled_from(["float32", "bfloat16", "float16"])
    leaves = jax.tree.leaves(tree, is_leaf=is_shape)
    dtypes = tuple(draw(kinds) for _ in leaves)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # A float16 sum of 12 rows of at most 64 tokens does not overflow.
    sizes = 2.0 ** rng.integers(-6, 4, ROWS)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        scaled = rng.normal(size=(ROWS, *shape)).T * sizes
        return scaled.T.astype(np.float32)

    x = jax.tree.map(numbers, tree, is_leaf=is_shape)
    tokens = rng.integers(1, 65, ROWS) * draw(st.sampled_from([1.0, 1 / 256]))
    mask = np.array(draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)))
    return Rows(x, np.where(mask, tokens, 0).astype(np.float32), dtypes)


@st.composite
def cuts(draw: st.DrawFn) -> np.ndarray:
    """Draw the micro-batch of each row: any size, any order, possibly empty."""
    k = draw(st.integers(1, LONGEST_WINDOW))
    numbers = st.integers(0, k - 1)
    return np.array([*(draw(numbers) for _ in range(ROWS - 1)), k - 1])


def micro_batches(data: Rows, cut: np.ndarray) -> list[Any]:
    """Give rows of other micro-batches weight 0, so that all shapes are equal."""
    return [
        {"x": data.x, "weights": np.where(cut == i, data.weights, 0)}
        for i in range(cut.max() + 1)
    ]


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    def of_leaf(p: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tensordot(batch["weights"], x, 1, precision="highest") * p.astype(
            jnp.float32
        )

    leaves = jax.tree.leaves(jax.tree.map(of_leaf, params, batch["x"]))
    return sum(map(jnp.sum, leaves), jnp.float32(0)), jnp.sum(batch["weights"])


def zeros(data: Rows) -> Any:
    leaves, structure = jax.tree.flatten(data.x)
    pairs = zip(leaves, data.dtypes, strict=True)
    return structure.unflatten([jnp.zeros(x.shape[1:], dtype) for x, dtype in pairs])


def reference(data: Rows, cut: np.ndarray) -> tuple[Any, Any, Any]:
    """Return the float64 full-batch gradient, rounding bounds and naive gradient."""
    cut_weights = [np.where(cut == i, data.weights, 0.0) for i in range(cut.max() + 1)]
    total = np.float64(data.weights).sum()

    def of_leaf(x: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
        wide = np.float64(x)
        sums = [np.tensordot(w, wide, 1) for w in cut_weights]
        terms = np.tensordot(data.weights, np.abs(wide), 1) / total
        exact = sum(sums) / total
        # Each micro-batch's gradient and the window's are rounded to their dtype once;
        # sums over rows and micro-batches, the count and the quotient are float32.
        finfo = jnp.finfo(dtype)
        each = sum(map(np.abs, sums)) / total + abs(exact)
        bound = float(finfo.eps) / 2 * each
        bound += float(finfo.smallest_subnormal) * (len(sums) / total + 1)
        bound += (ROWS + len(sums) + 5) * np.finfo(np.float32).eps * terms
        means = [s / w.sum() for s, w in zip(sums, cut_weights, strict=True) if w.any()]
        return exact, bound, sum(means) / len(means)

    leaves, structure = jax.tree.flatten(data.x)
    found = [of_leaf(*pair) for pair in zip(leaves, data.dtypes, strict=True)]
    exact, bound, naive = zip(*found, strict=True)
    return tuple(map(structure.unflatten, (exact, bound, naive)))


def within(got: Any, exact: Any, bound: Any) -> bool:
    return all(
        (abs(np.float64(g) - e) <= b).all()
        for g, e, b in zip(*map(jax.tree.leaves, (got, exact, bound)), strict=True)
    )


# One jitted program serves all cuts, because the caller says where a window closes.


@functools.cache
def _update(gradients: str) -> Any:
    optimizer = token_accumulation(optax.identity(), gradients=gradients)

    def loss_of_form(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, n = loss_fn(params, batch)
        return (loss_sum / n if gradients == "mean" else loss_sum), n

    @jax.jit
    def update(params: Any, state: Any, batch: Any, closes: Any) -> Any:
        grads, n = jax.grad(loss_of_form, has_aux=True)(params, batch)
        return optimizer.update(grads, state, params, num_tokens=n, close_window=closes)

    return optimizer, update


def by_transformation(params: Any, batches: list[Any], gradients: str = "sum") -> Any:
    optimizer, update = _update(gradients)
    state = optimizer.init(params)
    for i, batch in enumerate(batches):
        updates, state = update(params, state, batch, i == len(batches) - 1)
    return updates


_halves = make_train_step(loss_fn, optax.identity())
_window_step = make_window_step(loss_fn, optax.identity())
_value_and_grad = jax.jit(window_value_and_grad(loss_fn))


def by_train_step(params: Any, batches: list[Any]) -> Any:
    state = _halves.init(params)
    for batch in batches:
        state, _ = _halves.accumulate(state, batch)
    state, _ = _halves.close_window(state)
    return state.params


def stacked(batches: list[Any]) -> dict[str, Any]:
    """Pad to the longest window with NaNs, which must never be read."""
    poison = jax.tree.map(lambda x: np.full_like(x, np.nan), batches[0])
    padded = batches + [poison] * (LONGEST_WINDOW - len(batches))
    leaves = helpers.stack(padded)
    return {"micro_batches": leaves, "num_micro_batches": np.int32(len(batches))}


def by_window_step(params: Any, batches: list[Any]) -> Any:
    state, _ = _window_step(_window_step.init(params), **stacked(batches))
    return state.params


def by_value_and_grad(params: Any, batches: list[Any]) -> Any:
    return _value_and_grad(params, **stacked(batches))[1]


WAYS = {
    "transformation": by_transformation,
    "mean gradients": functools.partial(by_transformation, gradients="mean"),
    "train step": by_train_step,
    "window step": by_window_step,
    "value and grad": by_value_and_grad,
}


RAGGED = Rows(
    {"w": np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)},
    np.geomspace(1, 64, ROWS).round().astype(np.float32),
    ("float16",),
)
IN_THREE = np.arange(ROWS) // 4


@pytest.mark.parametrize("way", WAYS)
def test_any_cut_in_any_order_is_the_full_batch_and_the_naive_one_is_not(way: str):
    @examples(max_examples=60)
    @hypothesis.example(RAGGED, IN_THREE)
    @hypothesis.given(rows(), cuts())
    def check(data: Rows, cut: np.ndarray) -> None:
        got = WAYS[way](zeros(data), micro_batches(data, cut))
        if not data.weights.any():
            chex.assert_trees_all_equal(got, zeros(data))
            return
        exact, bound, naive = reference(data, cut)
        assert within(got, exact, bound)
        if data is RAGGED:
            assert not within(naive, exact, bound)

    check()
