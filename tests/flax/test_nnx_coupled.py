"""`nnx.coupled_value_and_grad`, against `nnx.value_and_grad` of the whole window."""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from optax_tokenaccum.nnx import coupled_value_and_grad

X = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.lora = nnx.LoRA(6, 2, 6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(jnp.tanh(self.linear(x) + self.lora(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: dict[str, bool] | None = None):
        self.block, self.out = Block(rngs), nnx.Linear(6, 3, rngs=rngs)
        self.out.bias[...] = jnp.ones(3)
        self.norm = None if norm is None else nnx.BatchNorm(6, rngs=rngs, **norm)

    def __call__(self, x: Any) -> Any:
        x = nnx.remat(lambda block, x: block(x))(self.block, x)
        return self.out(x if self.norm is None else self.norm(x))


def summary_fn(model: Any, x: Any) -> Any:
    y = model(x)
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def loss_fn(y: Any) -> Any:
    y = jnp.concatenate(y)
    return jnp.mean(jnp.exp(3 * y @ y.T)), y.mean()


def whole_window(model: Any) -> Any:
    return loss_fn(jnp.stack([summary_fn(model, x) for x in X]))


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam])
@pytest.mark.parametrize("norm", [None, {"use_running_average": True}])
def test_dropout_and_filters(wrt: Any, norm: Any):
    ours, theirs = (Model(nnx.Rngs(0), norm) for _ in "ab")
    f = coupled_value_and_grad(summary_fn, loss_fn, has_aux=True, wrt=wrt)
    reference = nnx.value_and_grad(
        whole_window, has_aux=True, argnums=nnx.DiffState(0, wrt)
    )
    for _ in range(2):  # the second call begins with the keys that the first one left
        got, expected = nnx.jit(f)(ours, X), reference(theirs)
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)
        states = [nnx.state(model, nnx.RngState) for model in (ours, theirs)]
        chex.assert_trees_all_equal(*states)


def test_statistics_that_change_raise():
    model = Model(nnx.Rngs(0), {})
    f = coupled_value_and_grad(summary_fn, loss_fn, has_aux=True)
    with pytest.raises(ValueError, match="change at norm/mean, norm/var"):
        f(model, X)


def test_parameters_that_are_assigned_raise():
    def assigns(model: Any, x: Any) -> Any:
        model.out.bias[...] = jnp.zeros(3)
        return model(x)

    with pytest.raises(
        ValueError, match="summary_fn must not assign parameters.* change at out/bias"
    ):
        coupled_value_and_grad(assigns, jnp.sum)(Model(nnx.Rngs(0)), X)


def test_a_keyword_may_have_any_name():
    def scaled(model: Any, x: Any, *, rest: Any, state: Any) -> Any:
        return rest * state * model.out(x)

    f = coupled_value_and_grad(scaled, jnp.sum)
    (loss, _), _ = f(Model(nnx.Rngs(0)), X, rest=2.0, state=3.0)
    np.testing.assert_allclose(loss, 6 * np.sum(Model(nnx.Rngs(0)).out(X)), rtol=1e-4)
