"""Inner optimizers that refuse keywords, or need more than a gradient."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from problems import PARAMS, batch_of, linear_loss

from optax_tokenaccum import make_train_step, token_accumulation

COUNTS, RTOL = (1, 7, 2, 6), helpers.RTOL["float32"]
MICRO_BATCHES = [batch_of(i, [1.0] * n) for i, n in enumerate(COUNTS)]
SGD = optax.sgd(0.01)


def mean_loss(params: Any, *batches: Any) -> jax.Array:
    """The mean over all rows; in a closure, the rows are constants."""
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *batches)
    loss_sum, n = linear_loss(params, whole)
    return loss_sum / n


def whole_mean(params: Any) -> jax.Array:
    return mean_loss(params, *MICRO_BATCHES)


def mean_of_means(params: Any) -> jax.Array:
    return sum(mean_loss(params, batch) for batch in MICRO_BATCHES) / len(COUNTS)


def sam(**options: Any) -> Any:
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.1))
    return contrib.sam(SGD, adversary, **options)


def plain(inner: Any, steps: int, loss: Any = whole_mean, **extra: Any) -> Any:
    """Trains on full batches, in plain JAX and optax."""

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(params)
        given = {"value": value, "grad": grad} if "value_fn" in extra else {}
        updates, state = inner.update(grad, state, params, **given, **extra)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, inner.init(PARAMS)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def accumulated(inner: Any, windows: int, **extra: Any) -> Any:
    """Trains on micro-batches, with gradients of their means."""
    tx = token_accumulation(inner, len(COUNTS), gradients="mean")
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(mean_loss)(params, batch)
        given = {"value": value, "num_tokens": len(batch["y"])} | extra
        given |= {"grad": grad} if "value_fn" in extra else {}
        updates, state = tx.update(grad, state, params, **given)
        return optax.apply_updates(params, updates), state

    for batch in MICRO_BATCHES * windows:
        params, state = step(params, state, batch)
    return params


FORMS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(99.0), tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(99.0)), ("tx", tx)),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"all": tx}, "all"),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda size: optax.chain(tx, optax.scale(size))
    )(1.0),
    "apply_if_finite": lambda tx: optax.apply_if_finite(optax.chain(tx), 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_strict_optimizer_is_that_of_full_batches_in_every_form(form: str):
    inner = FORMS[form](sam())
    got, expected = accumulated(inner, 4), plain(inner, 4)
    assert helpers.relative_error(got, expected) < RTOL
    assert helpers.relative_error(plain(inner, 4, mean_of_means), expected) > 0.01
    step = make_train_step(linear_loss, inner, len(COUNTS))
    state, _ = helpers.run_step(step, step.init(PARAMS), MICRO_BATCHES * 4)
    assert helpers.relative_error(state.params, got) < RTOL


def gradient_fn(loss: Any) -> Any:
    return lambda params, _: jax.grad(loss)(params)


def backtracking() -> Any:
    search = optax.scale_by_backtracking_linesearch(20)
    return optax.chain(optax.sgd(1.0), search)


@pytest.mark.parametrize(
    ("inner", "given"),
    [
        (optax.lbfgs(), lambda loss: {"value_fn": loss}),
        (backtracking(), lambda loss: {"value_fn": loss}),
        # It differentiates the window again.
        (
            optax.chain(optax.clip(99.0), sam(opaque_mode=True)),
            lambda loss: {"grad_fn": gradient_fn(loss)},
        ),
    ],
    ids=["L-BFGS", "backtracking", "SAM"],
)
def test_a_function_of_the_whole_window_is_handed_on(inner: Any, given: Any):
    expected = plain(inner, 3, **given(whole_mean))
    got = accumulated(inner, 3, **given(whole_mean))
    assert helpers.relative_error(got, expected) < RTOL
    naive = plain(inner, 3, mean_of_means, **given(mean_of_means))
    assert helpers.relative_error(naive, expected) > 0.01


def by_tokens(updates: Any, state: Any, params: Any = None, *, num_tokens: Any) -> Any:
    return jax.tree.map(lambda u: u / num_tokens, updates), state


def test_a_keyword_that_one_refuses_and_none_uses_leaves_the_other():
    """This member refuses `value`, and is given the tokens of the window."""
    strict = optax.GradientTransformationExtraArgs(optax.identity().init, by_tokens)
    got = accumulated(optax.chain(strict, optax.scale(-1.0)), 1)
    grad = jax.grad(whole_mean)(PARAMS)
    expected = jax.tree.map(lambda p, g: p - g / sum(COUNTS), PARAMS, grad)
    assert helpers.relative_error(got, expected) < RTOL
