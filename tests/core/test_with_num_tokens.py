"""The count reaches an accumulation behind code that passes no keywords."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import has_updated, token_accumulation, with_num_tokens

PARAMS = {"w": jnp.zeros(3)}
SUMS = [np.array([6.0, 0, 3]), np.array([1.0, 1, 1])]
COUNTS = [3, 1]


def around(name: str) -> Any:
    inner = token_accumulation(optax.adam(1e-2), 2)
    if name == "chained":
        return optax.chain(inner, optax.scale(2.0))
    return inner


@pytest.mark.parametrize("name", ["alone", "chained"])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_count_is_that_of_the_call(name: str, jit: Any):
    tx = around(name)

    @jit
    def by_trainer(grads: Any, state: Any, n: Any) -> Any:
        return with_num_tokens(tx, n).update(grads, state, PARAMS)

    @jit
    def by_hand(grads: Any, state: Any, n: Any) -> Any:
        return tx.update(grads, state, PARAMS, num_tokens=n)

    states = [with_num_tokens(tx, 1).init(PARAMS), tx.init(PARAMS)]
    for x, n in zip(SUMS, COUNTS, strict=True):
        found = [
            f({"w": jnp.asarray(x, jnp.float32)}, state, n)
            for f, state in zip((by_trainer, by_hand), states, strict=True)
        ]
        chex.assert_trees_all_equal(*found)
        states = [state for _, state in found]
    assert bool(has_updated(states[0] if name == "alone" else states[0][0]))
    # The mean of means is another gradient.
    exact = sum(SUMS) / sum(COUNTS)
    assert not np.allclose(
        np.mean([x / n for x, n in zip(SUMS, COUNTS, strict=True)], 0), exact
    )


def test_other_arguments_are_handed_on_too():
    tx = token_accumulation(optax.polyak_sgd(1.0), 1)
    grads = {"w": jnp.ones(3)}
    counted = with_num_tokens(tx, 2, value=jnp.float32(4.0))
    updates, _ = counted.update(grads, tx.init(PARAMS), PARAMS)
    expected, _ = tx.update(grads, tx.init(PARAMS), PARAMS, num_tokens=2, value=4.0)
    chex.assert_trees_all_close(updates, expected)
    assert float(jnp.abs(updates["w"]).sum()) > 0
