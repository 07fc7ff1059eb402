"""The count reaches an accumulation behind code that passes no keywords."""

from typing import Any

import chex
import jax
import optax
from helpers import PARAMS, grads

from optax_tokenaccum import token_accumulation, with_num_tokens


def times_value(gradient: Any, state: Any, params: Any = None, *, value: Any) -> Any:
    return jax.tree.map(lambda g: -value * g, gradient), state


def test_the_count_is_that_of_the_call():
    inner = optax.GradientTransformationExtraArgs(optax.identity().init, times_value)
    tx = optax.chain(token_accumulation(inner, 2), optax.scale(2.0))

    @jax.jit
    def by_trainer(gradient: Any, state: Any, n: Any, value: Any) -> Any:
        counted = with_num_tokens(tx, n, value=value)
        return counted.update(gradient, state, PARAMS)

    @jax.jit
    def by_hand(gradient: Any, state: Any, n: Any, value: Any) -> Any:
        return tx.update(gradient, state, PARAMS, num_tokens=n, value=value)

    states = [with_num_tokens(tx, 1).init(PARAMS), tx.init(PARAMS)]
    naive = states[0]
    for scale, n, value in [(6.0, 3, 4.0), (90.0, 9, 1.0)]:
        found = [
            f(grads(scale), state, n, value)
            for f, state in zip((by_trainer, by_hand), states, strict=True)
        ]
        chex.assert_trees_all_equal(*found)
        states = [state for _, state in found]
        # A count of 1, once and for all.
        wrong, naive = by_trainer(grads(scale), naive, 1, value)
    updates, state = found[0]
    assert (optax.tree.get(state, "gradient_step"), bool(updates["b"])) == (1, True)
    assert abs(wrong["b"] / updates["b"] - 1) > 0.01
