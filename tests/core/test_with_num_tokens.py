"""The count reaches an accumulation behind code that passes no keywords."""

from typing import Any

import chex
import optax
import pytest
from helpers import PARAMS, grads

from optax_tokenaccum import token_accumulation, with_num_tokens


@pytest.mark.parametrize("form", ["alone", "chained"])
def test_the_count_is_that_of_the_call(form: str, maybe_jit: Any):
    tx = token_accumulation(optax.polyak_sgd(1.0), 2)
    if form == "chained":
        tx = optax.chain(tx, optax.scale(2.0))

    @maybe_jit
    def by_trainer(gradient: Any, state: Any, n: Any, value: Any) -> Any:
        counted = with_num_tokens(tx, n, value=value)
        return counted.update(gradient, state, PARAMS)

    @maybe_jit
    def by_hand(gradient: Any, state: Any, n: Any, value: Any) -> Any:
        return tx.update(gradient, state, PARAMS, num_tokens=n, value=value)

    states = [with_num_tokens(tx, 1).init(PARAMS), tx.init(PARAMS)]
    for scale, n, value in [(6.0, 3, 4.0), (90.0, 9, 1.0)]:
        found = [
            f(grads(scale), state, n, value)
            for f, state in zip((by_trainer, by_hand), states, strict=True)
        ]
        chex.assert_trees_all_equal(*found)
        states = [state for _, state in found]
    updates, state = found[0]
    assert (optax.tree.get(state, "gradient_step"), bool(updates["b"])) == (1, True)
    once = with_num_tokens(tx, 1, value=1.0)  # a count of 1, once and for all
    state = once.init(PARAMS)
    for scale in (6.0, 90.0):
        naive, state = once.update(grads(scale), state, PARAMS)
    assert abs(naive["b"] / updates["b"] - 1) > 0.01
