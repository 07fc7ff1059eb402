"""The table of `docs/migration.md`: what both columns give on ragged data.

The lines are read from the page. The loss is a masked squared error of a linear model,
whose gradients are one NumPy line in float64.
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

from optax_tokenaccum import MultiSteps, token_accumulation, window_value_and_grad

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)
LINES = {title: (theirs, ours) for title, theirs, ours in ROWS}
MULTI_STEPS, APPLY_EVERY, CALL, SCAN, HF_TRAINER, _, _ = LINES

K, LENGTH, WIDTH = 4, 16, 3
RTOL = helpers.RTOL["float32"]
PARAMS = jnp.arange(1.0, WIDTH + 1)
TOKENS = np.asarray([16, 3, 8, 1])


def window(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Micro-batches with `tokens` loss tokens, each from another distribution."""
    rng = np.random.default_rng(0)
    about = np.arange(K)[:, None, None] * np.ones(WIDTH)
    return {
        "x": (rng.normal(size=(K, LENGTH, WIDTH)) + about).astype(np.float32),
        "y": rng.normal(size=(K, LENGTH)).astype(np.float32),
        "mask": np.arange(LENGTH) < tokens[:, None],
    }


WINDOW = window(TOKENS)


def gradients_of_sums(data: dict[str, np.ndarray]) -> np.ndarray:
    """Summed gradients `[K, WIDTH]`, in float64."""
    x, y, mask = (np.asarray(data[name], np.float64) for name in ("x", "y", "mask"))
    errors = (x @ np.asarray(PARAMS, np.float64) - y) * mask
    return 2 * np.einsum("kl,klw->kw", errors, x)


SUMS = gradients_of_sums(WINDOW)
EXACT = SUMS.sum(0) / TOKENS.sum()
MEAN_OF_MEANS = (SUMS / TOKENS[:, None]).mean(0)


def loss_fn(params: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    errors = (batch["x"] @ params - batch["y"]) ** 2
    return jnp.sum(jnp.where(batch["mask"], errors, 0)), jnp.sum(batch["mask"])


@jax.jit
def mean_gradient(params: jax.Array, batch: Any) -> jax.Array:
    gradient, n = jax.grad(loss_fn, has_aux=True)(params, batch)
    return gradient / n


def micro_batches(data: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{name: x[i] for name, x in data.items()} for i in range(K)]


def run_line(line: str, **names: Any) -> Any:
    return eval(line, NAMES | names)


NAMES = {
    "jax": jax,
    "optax": optax,
    "MultiSteps": MultiSteps,
    "token_accumulation": token_accumulation,
    "window_value_and_grad": window_value_and_grad,
    "loss_fn": loss_fn,
    "micro_batches": WINDOW,
    "params": PARAMS,
    "k": K,
}


def total_update(
    tx: Any, call: str, data: dict[str, np.ndarray] = WINDOW
) -> tuple[jax.Array, Any]:
    """Return the sum of a window's updates, zeros except the last, and the state."""
    state, total = tx.init(PARAMS), jnp.zeros(WIDTH)
    for i, batch in enumerate(micro_batches(data)):
        n, grads = batch["mask"].sum(), mean_gradient(PARAMS, batch)
        updates, state = run_line(call, tx=tx, grads=grads, state=state, n=n)
        assert i == K - 1 or not np.any(updates)
        total += updates
    return total, state


@pytest.mark.parametrize(
    ("row", "theirs_times"),
    [(MULTI_STEPS, 1), (APPLY_EVERY, K)],
    ids=["multi_steps", "apply_every"],
)
def test_optax_lines_under_sgd(row: str, theirs_times: int):
    inner = optax.sgd(1.0)
    theirs, ours = (run_line(line, inner=inner) for line in LINES[row])
    got, _ = total_update(theirs, LINES[CALL][0])
    assert helpers.relative_error(-got, theirs_times * MEAN_OF_MEANS) < RTOL
    assert helpers.relative_error(-got, EXACT) > 0.1
    assert helpers.relative_error(-got, theirs_times * EXACT) > 0.1
    got, _ = total_update(ours, LINES[CALL][1])
    assert helpers.relative_error(-got, EXACT) < RTOL

    # With equal token counts, there is nothing to fix except the sum.
    even = window(np.full(K, LENGTH))
    got, _ = total_update(theirs, LINES[CALL][0], even)
    expected, _ = total_update(ours, LINES[CALL][1], even)
    assert helpers.relative_error(got, theirs_times * expected) < RTOL


def test_num_tokens_of_one_is_the_mean_of_means():
    tx = MultiSteps(optax.sgd(1.0), K)
    got, _ = total_update(tx, LINES[CALL][1].replace("=n", "=1"))
    assert helpers.relative_error(-got, MEAN_OF_MEANS) < RTOL


def test_apply_every_runs_the_inner_optimizer_for_every_micro_batch():
    adam = optax.adam(0.1)
    theirs, ours = (run_line(line, inner=adam) for line in LINES[APPLY_EVERY])
    behind = optax.chain(optax.apply_every(K), adam)
    call_theirs, call_ours = LINES[CALL]

    update, state = total_update(theirs, call_theirs)
    assert optax.tree.get(state, "ScaleByAdamState").count == K
    exact, state = total_update(ours, call_ours)
    assert state.inner_opt_state[0].count == 1
    one_step, _ = adam.update(jnp.float32(EXACT), adam.init(PARAMS))
    assert helpers.relative_error(exact, one_step) < RTOL
    assert helpers.relative_error(update, one_step) > 1  # the sum of K steps

    state = behind.init(PARAMS)
    for i in range(K):
        _, state = behind.update(jnp.ones(WIDTH), state, PARAMS)
        assert optax.tree.get(state, "ScaleByAdamState").count == i + 1


def test_a_scan_written_by_hand():
    def add(sums: jax.Array, micro_batch: Any) -> tuple[jax.Array, None]:
        return sums + mean_gradient(PARAMS, micro_batch), None

    theirs, ours = (
        run_line(line, add=add, zeros=jnp.zeros(WIDTH)) for line in LINES[SCAN]
    )
    assert helpers.relative_error(theirs, MEAN_OF_MEANS) < RTOL
    assert helpers.relative_error(theirs, EXACT) > 0.1
    assert helpers.relative_error(ours, EXACT) < RTOL


def test_one_division_or_the_other():
    theirs, ours = (line.removeprefix("return ") for line in LINES[HF_TRAINER])

    def returned(params: jax.Array, batch: Any, line: str) -> Any:
        loss_sum, n = loss_fn(params, batch)
        names = {"num_items_in_batch": TOKENS.sum()}
        result = run_line(line, loss_sum=loss_sum, n=n, **names)
        return result if isinstance(result, tuple) else (result, n)

    gradient = jax.jit(jax.grad(returned, has_aux=True), static_argnums=2)

    def applied(tx: Any, line: str) -> np.ndarray:
        state = tx.init(PARAMS)
        for batch in micro_batches(WINDOW):
            grads, n = gradient(PARAMS, batch, line)
            updates, state = tx.update(grads, state, PARAMS, num_tokens=n)
        return -np.asarray(updates)

    inner = optax.sgd(1.0)
    exact = token_accumulation(inner, K)
    plain_sum = MultiSteps(inner, K, use_grad_mean=False)
    assert helpers.relative_error(applied(exact, ours), EXACT) < RTOL
    assert helpers.relative_error(applied(plain_sum, theirs), EXACT) < RTOL
    twice = applied(exact, theirs)
    assert helpers.relative_error(twice, EXACT / TOKENS.sum()) < RTOL
    assert helpers.relative_error(twice, EXACT) > 0.1
