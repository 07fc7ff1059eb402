"""What `docs/trainers.md` says of other loops on ragged data, and of ours.

The lines are read from the page. Other forms average as the originals, and are not
their code.
"""

import re
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest

import optax_tokenaccum
from optax_tokenaccum import MultiSteps, token_accumulation

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)
LINES = {title: (theirs, ours) for title, theirs, ours in ROWS}
MULTI_STEPS, APPLY_EVERY, CALL, SCAN, HF_TRAINER = LINES

TOKENS = [16, 3, 8, 1]
WINDOW = [problems.batch_of(i, np.arange(16) < n) for i, n in enumerate(TOKENS)]
EXACT = problems.exact(problems.PARAMS, *WINDOW)["w"]
MEAN_OF_MEANS = np.mean([problems.exact(problems.PARAMS, x)["w"] for x in WINDOW], 0)
PARAMS = problems.PARAMS["w"]


def loss_fn(params: Any, batch: Any) -> Any:
    return problems.linear_loss({"w": params}, batch)


NAMES = vars(optax_tokenaccum) | {
    "jax": jax,
    "loss_fn": loss_fn,
    "micro_batches": helpers.stack(WINDOW),
    "params": PARAMS,
    "k": 4,
    "zeros": jnp.zeros_like(PARAMS),
    "optax": optax,
    "inner": optax.sgd(1.0),
}


@jax.jit
def mean_gradient(params: Any, batch: Any) -> Any:
    gradient, n = jax.grad(loss_fn, has_aux=True)(params, batch)
    return gradient / n


def run_line(line: str, **names: Any) -> Any:
    return eval(line, NAMES | names)


def is_near(got: Any, expected: Any) -> bool:
    return helpers.relative_error(got, expected) < helpers.RTOL["float32"]


def applied(tx: Any, gradient: Any, call: str) -> Any:
    """Return the gradient that a window's updates apply: all are zeros but the last."""
    state = tx.init(PARAMS)
    for i, batch in enumerate(WINDOW):
        grads, n = gradient(PARAMS, batch), batch["weights"].sum()
        updates, state = run_line(call, tx=tx, grads=grads, state=state, n=n)
        assert i == 3 or not np.any(updates)
    return -updates


@pytest.mark.parametrize(("row", "times"), [(MULTI_STEPS, 1), (APPLY_EVERY, 4)])
def test_optax_lines_under_sgd(row: str, times: int):
    (theirs, ours), (their_call, our_call) = map(run_line, LINES[row]), LINES[CALL]
    got = applied(theirs, mean_gradient, their_call)
    assert is_near(got, times * MEAN_OF_MEANS)
    assert not is_near(got, times * EXACT) and not is_near(got, EXACT)
    assert is_near(applied(ours, mean_gradient, our_call), EXACT)
    call = our_call.replace("num_tokens=n", "num_tokens=1")
    assert is_near(applied(ours, mean_gradient, call), MEAN_OF_MEANS)


def test_a_scan_written_by_hand():
    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        return sums + mean_gradient(PARAMS, micro_batch), None

    theirs, ours = (run_line(line, add=add) for line in LINES[SCAN])
    assert is_near(theirs, MEAN_OF_MEANS) and not is_near(theirs, EXACT)
    assert is_near(ours, EXACT)


def test_one_division_or_the_other():
    theirs, ours = (line.removeprefix("return ") for line in LINES[HF_TRAINER])

    def gradient(line: str) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            loss_sum, n = loss_fn(params, batch)
            names = {"loss_sum": loss_sum, "n": n, "num_items_in_batch": sum(TOKENS)}
            result = run_line(line, **names)
            return result[0] if isinstance(result, tuple) else result

        return jax.jit(jax.grad(loss))

    exact = token_accumulation(optax.sgd(1.0), 4)
    plain_sum = MultiSteps(optax.sgd(1.0), 4, use_grad_mean=False)
    call = LINES[CALL][1]
    assert is_near(applied(exact, gradient(ours), call), EXACT)
    assert is_near(applied(plain_sum, gradient(theirs), call), EXACT)
    twice = applied(exact, gradient(theirs), call)
    assert is_near(twice, EXACT / sum(TOKENS)) and not is_near(twice, EXACT)
