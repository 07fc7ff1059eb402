"""Steps and functions of windows can be exported, read back and run."""

from typing import Any

import chex
import jax
import meshes
import numpy as np
import optax
import problems
import pytest
from helpers import stack
from problems import FEW

from optax_tokenaccum import (
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    window_value_and_grad,
)

ADAM, K = optax.adam(0.1), 3
BATCH = problems.batch_of(0, [1.0] * 8)
WINDOW = stack([problems.batch_of(i, [i + 1.0] * 8) for i in range(K)])


def read_back(f: Any, *args: Any) -> Any:
    """The exported function, through its bytes."""
    exported = jax.export.export(jax.jit(f))(*args)
    return jax.export.deserialize(exported.serialize()).call


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


@pytest.mark.parametrize("over", ["1", "8", "8, each"])
@pytest.mark.parametrize("make", [make_train_step, make_window_step])
def test_a_step(make: Any, over: str):
    in_window = make is make_window_step
    k = {} if in_window else {"every_k_schedule": 2}
    step = make(problems.layered_loss, ADAM, **k, **meshes.over(over))
    batch = WINDOW if in_window else BATCH
    state = step.init(FEW)

    def call(given: Any, batch: Any) -> Any:
        state = jax.tree.unflatten(structure, given)
        return leaves(step(state, batch))

    given, structure = jax.tree.flatten(state)
    found = read_back(call, given, batch)(given, batch)
    for x, y in zip(found, leaves(step(state, batch)), strict=True):
        assert x.dtype == y.dtype
        x, y = np.float64(x), np.float64(y)
        assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y)


def test_functions_of_windows_also_with_a_symbolic_number_of_micro_batches():
    def summary_fn(params: Any, batch: Any) -> Any:
        return problems.layered_loss(params, batch)

    def mean(summaries: Any) -> Any:
        return summaries[0].sum() / summaries[1].sum()

    [k] = jax.export.symbolic_shape("k")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((k, *x.shape[1:]), x.dtype), WINDOW
    )
    for f in (
        window_value_and_grad(problems.layered_loss),
        coupled_value_and_grad(summary_fn, mean),
    ):
        found = read_back(f, FEW, shapes)
        for n in (1, K):
            window = jax.tree.map(lambda x, n=n: x[:n], WINDOW)
            chex.assert_trees_all_close(
                found(FEW, window), jax.jit(f)(FEW, window), rtol=1e-5
            )


def test_layers_lie_row_by_row_in_other_programs():
    f = jax.jit(window_value_and_grad(problems.layered_loss))
    assert "LayoutConstraint" in f.lower(FEW, WINDOW).as_text()
