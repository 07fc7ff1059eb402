"""`window_gradient` of every state that holds an open window, against full batches."""

from typing import Any

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
import window_gradients
from flax import nnx
from helpers import relative_error

from optax_tokenaccum import (
    linen,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_gradient,
)

BATCHES = window_gradients.window_of(8, 0, 3)
PARAMS = window_gradients.params_of()
SGD = optax.sgd(1.0)
gradient_of = jax.jit(jax.grad(window_gradients.loss_fn, has_aux=True))


def check(got: Any) -> None:
    expected = window_gradients.by_hand(window_gradients.loss_fn, PARAMS, BATCHES)
    assert relative_error(got, expected) < 3e-6
    means = [gradient_of(PARAMS, batch) for batch in BATCHES]
    naive = jax.tree.map(
        lambda *g: sum(g) / 2,
        *[jax.tree.map(lambda x, n=n: x / n, g) for g, n in means if n > 0],
    )
    assert relative_error(naive, expected) > 0.05


def test_states_of_optimizers():
    tx = token_accumulation(SGD, 4)
    chain, model = (
        optax.chain(optax.identity(), tx),
        nnx.Dict({name: nnx.Param(x) for name, x in PARAMS.items()}),
    )
    state, optimizer = chain.init(PARAMS), nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_state = linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for batch in BATCHES:
        grads, n = gradient_of(PARAMS, batch)
        _, state = chain.update(grads, state, PARAMS, num_tokens=n)
        train_state = train_state.apply_gradients(grads=grads, num_tokens=n)
        of_model = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(of_model, grads)
        optimizer.update(model, of_model, num_tokens=n)
    check(jax.jit(window_gradient)(state))
    check(window_gradient(train_state))
    check(nnx.to_pure_dict(nnx.state(window_gradient(optimizer.opt_state))))


def test_states_without_an_open_window_of_gradients():
    with pytest.raises(ValueError, match="got 0 in a"):
        window_gradient(SGD.init(PARAMS))
    step = make_window_step(window_gradients.loss_fn, SGD)
    with pytest.raises(ValueError, match="got that of a window step"):
        window_gradient(step.init(PARAMS))
    train = make_train_step(window_gradients.loss_fn, SGD, 4, **meshes.over("8"))
    with pytest.raises(ValueError, match="needs the parameters"):
        window_gradient(train.init(PARAMS).opt_state)  # whose sums are of each device
    none_yet = window_gradient(token_accumulation(SGD, 2).init(jnp.ones(3)))
    np.testing.assert_array_equal(none_yet, np.zeros(3))
