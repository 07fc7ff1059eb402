"""Inner optimizers that refuse keywords, or need more than a gradient."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from optax_tokenaccum import make_train_step, token_accumulation

RNG = np.random.default_rng(0)
COUNTS, RATE = (1, 7, 2, 6), 0.05
MICRO_BATCHES = [(RNG.normal(size=(n, 3)), RNG.normal(size=n)) for n in COUNTS]
RTOL = helpers.RTOL["float32"]
FULL_BATCH = tuple(np.concatenate(x) for x in zip(*MICRO_BATCHES, strict=True))
PARAMS = {"w": jnp.ones(3), "b": jnp.ones(())}


def loss_fn(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2), len(y)


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.divide(*loss_fn(params, batch))


def whole_mean(params: Any) -> jax.Array:
    return mean_loss(params, FULL_BATCH)


def mean_of_means(params: Any) -> jax.Array:
    return sum(mean_loss(params, batch) for batch in MICRO_BATCHES) / len(COUNTS)


def sam(**options: Any) -> Any:
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.1))
    return contrib.sam(optax.sgd(RATE), adversary, **options)


def plain(inner: Any, steps: int, loss: Any = whole_mean, **extra: Any) -> Any:
    """Train on full batches, in plain JAX and optax."""

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
    """Train on micro-batches."""
    tx = token_accumulation(inner, len(COUNTS), gradients="mean")
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(mean_loss)(params, batch)
        given = {"value": value, "num_tokens": len(batch[1])} | extra
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
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
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
    step = make_train_step(loss_fn, inner, len(COUNTS))
    state, _ = helpers.run_step(step, step.init(PARAMS), MICRO_BATCHES * 4)
    assert helpers.relative_error(state.params, got) < RTOL


LINE_SEARCHES = {
    "L-BFGS": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20)
    ),
}


@pytest.mark.parametrize("name", LINE_SEARCHES)
def test_a_line_search_sees_the_value_and_gradient_of_the_window(name: str):
    inner = LINE_SEARCHES[name]
    expected = plain(inner, 3, value_fn=whole_mean)
    got = accumulated(inner, 3, value_fn=whole_mean)
    assert helpers.relative_error(got, expected) < RTOL
    naive = plain(inner, 3, mean_of_means, value_fn=mean_of_means)
    assert helpers.relative_error(naive, expected) > 0.01


def test_an_optimizer_that_differentiates_the_window_again():
    inner = optax.chain(optax.clip(99.0), sam(opaque_mode=True))

    def gradient_of(loss: Any) -> Any:
        return lambda params, _: jax.grad(loss)(params)

    expected = plain(inner, 3, grad_fn=gradient_of(whole_mean))
    got = accumulated(inner, 3, grad_fn=gradient_of(whole_mean))
    assert helpers.relative_error(got, expected) < RTOL
    last = functools.partial(mean_loss, batch=MICRO_BATCHES[-1])
    naive = plain(inner, 3, grad_fn=gradient_of(last))
    assert helpers.relative_error(naive, expected) > 0.01


def by_tokens(updates: Any, state: Any, params: Any = None, *, num_tokens: Any) -> Any:
    return jax.tree.map(lambda u: u / num_tokens, updates), state


def test_a_keyword_that_one_refuses_and_none_uses_leaves_the_other():
    """This member refuses `value`, and is given the tokens of the window."""
    strict = optax.GradientTransformationExtraArgs(optax.identity().init, by_tokens)
    inner = optax.chain(strict, optax.scale(-1.0))
    got = accumulated(inner, 1)
    grad = jax.grad(whole_mean)(PARAMS)
    expected = jax.tree.map(lambda p, g: p - g / sum(COUNTS), PARAMS, grad)
    assert helpers.relative_error(got, expected) < RTOL
