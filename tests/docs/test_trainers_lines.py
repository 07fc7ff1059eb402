"""What `docs/trainers.md` says of other loops on ragged data, and of ours.

The lines are read from the page. Other forms average as the originals, and are not
their code. The loss is linear, so that its gradients are one NumPy line in float64.
"""

import re
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_tokenaccum
from optax_tokenaccum import MultiSteps, token_accumulation

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)
LINES = {title: (theirs, ours) for title, theirs, ours in ROWS}
MULTI_STEPS, APPLY_EVERY, CALL, SCAN, HF_TRAINER = LINES

RTOL = helpers.RTOL["float32"]
PARAMS, TOKENS = jnp.ones(()), np.asarray([16, 3, 8, 1])
# Each micro-batch is from another distribution.
X = np.random.default_rng(0).normal(size=(4, 16)) + np.arange(4)[:, None]
WINDOW = {"x": np.float32(X), "mask": np.arange(16) < TOKENS[:, None]}
MICRO_BATCHES = [{name: x[i] for name, x in WINDOW.items()} for i in range(4)]
SUMS = (WINDOW["x"] * WINDOW["mask"]).sum(1, dtype=np.float64)  # the gradients
EXACT, MEAN_OF_MEANS = SUMS.sum() / TOKENS.sum(), (SUMS / TOKENS).mean()


def loss_fn(params: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(params * batch["x"] * batch["mask"]), jnp.sum(batch["mask"])


@jax.jit
def mean_gradient(params: jax.Array, batch: Any) -> jax.Array:
    gradient, n = jax.grad(loss_fn, has_aux=True)(params, batch)
    return gradient / n


NAMES = vars(optax_tokenaccum) | {
    "jax": jax,
    "optax": optax,
    "loss_fn": loss_fn,
    "micro_batches": WINDOW,
    "params": PARAMS,
    "k": 4,
    "zeros": jnp.zeros(()),
    "inner": optax.sgd(1.0),
}


def run_line(line: str, **names: Any) -> Any:
    return eval(line, NAMES | names)


def total_update(tx: Any, call: str) -> jax.Array:
    """Return the sum of a window's updates, which are zeros except the last."""
    state, total = tx.init(PARAMS), jnp.zeros(())
    for i, batch in enumerate(MICRO_BATCHES):
        n, grads = batch["mask"].sum(), mean_gradient(PARAMS, batch)
        updates, state = run_line(call, tx=tx, grads=grads, state=state, n=n)
        assert i == 3 or not np.any(updates)
        total += updates
    return total


@pytest.mark.parametrize(("row", "times"), [(MULTI_STEPS, 1), (APPLY_EVERY, 4)])
def test_optax_lines_under_sgd(row: str, times: int):
    theirs, ours = map(run_line, LINES[row])
    got = total_update(theirs, LINES[CALL][0])
    assert helpers.relative_error(-got, times * MEAN_OF_MEANS) < RTOL
    assert helpers.relative_error(-got, EXACT) > 0.1
    assert helpers.relative_error(-got, times * EXACT) > 0.1
    call = LINES[CALL][1]
    assert helpers.relative_error(-total_update(ours, call), EXACT) < RTOL
    got = total_update(ours, call.replace("num_tokens=n", "num_tokens=1"))
    assert helpers.relative_error(-got, MEAN_OF_MEANS) < RTOL


def test_a_scan_written_by_hand():
    def add(sums: jax.Array, micro_batch: Any) -> tuple[jax.Array, None]:
        return sums + mean_gradient(PARAMS, micro_batch), None

    theirs, ours = (run_line(line, add=add) for line in LINES[SCAN])
    assert helpers.relative_error(theirs, MEAN_OF_MEANS) < RTOL
    assert helpers.relative_error(theirs, EXACT) > 0.1
    assert helpers.relative_error(ours, EXACT) < RTOL


def test_one_division_or_the_other():
    theirs, ours = (line.removeprefix("return ") for line in LINES[HF_TRAINER])

    def applied(tx: Any, line: str) -> np.ndarray:
        def returned(params: jax.Array, batch: Any) -> Any:
            loss_sum, n = loss_fn(params, batch)
            names = {"loss_sum": loss_sum, "n": n, "num_items_in_batch": TOKENS.sum()}
            result = run_line(line, **names)
            return result if isinstance(result, tuple) else (result, n)

        state, gradient = tx.init(PARAMS), jax.jit(jax.grad(returned, has_aux=True))
        for batch in MICRO_BATCHES:
            grads, n = gradient(PARAMS, batch)
            updates, state = tx.update(grads, state, PARAMS, num_tokens=n)
        return -np.asarray(updates)

    exact = token_accumulation(optax.sgd(1.0), 4)
    plain_sum = MultiSteps(optax.sgd(1.0), 4, use_grad_mean=False)
    assert helpers.relative_error(applied(exact, ours), EXACT) < RTOL
    assert helpers.relative_error(applied(plain_sum, theirs), EXACT) < RTOL
    twice = applied(exact, theirs)
    assert helpers.relative_error(twice, EXACT / TOKENS.sum()) < RTOL
    assert helpers.relative_error(twice, EXACT) > 0.1
