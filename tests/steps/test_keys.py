"""Which noise a loss draws: never again what was rejected, nor what a user drew."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx

from optax_tokenaccum import (
    accumulate_over_window,
    coupled_value_and_grad,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_value_and_grad,
)
from optax_tokenaccum import (
    nnx as nnx_steps,
)

SGD, ONES = optax.sgd(0.1), jnp.ones(8)


def half_the_time(key: jax.Array) -> jax.Array:
    """A factor that is 1 or, for every other key, infinite."""
    return 1 / jax.random.randint(key, (), 0, 2)


def by_key(params: Any, x: Any, *, rng: Any) -> Any:
    return jnp.sum(params * x) * half_the_time(rng), x.size


def by_state(params: Any, key: Any, x: Any) -> Any:
    key, own = jax.random.split(key)
    return (jnp.sum(params * x) * half_the_time(own), x.size), key


class Noisy(nnx.Module):
    def __init__(self, given: bool):
        self.w = nnx.Param(jnp.ones(8))
        if not given:
            self.rngs = nnx.Rngs(0)
            self.calls = nnx.Variable(jnp.int32(0))


def of_model(model: Noisy, x: Any, rng: Any = None) -> Any:
    if rng is None:
        rng, model.calls[...] = model.rngs(), model.calls[...] + 1
    return jnp.sum(model.w[...] * x) * half_the_time(rng), x.size


def trained(way: str, over: str, calls: int, k: int = 2) -> tuple[int, Any]:
    """The number of updates, and the model of NNX."""
    options, key = meshes.over(over), {"rng": jax.random.key(0)}
    if way.startswith("nnx"):
        model = Noisy(given=way == "nnx, rng")
        tx = token_accumulation(SGD, k, **helpers.SKIPS)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = nnx_steps.make_train_step(of_model, **options)
        for _ in range(calls):
            step(model, optimizer, ONES, **(key if "rng" in way else {}))
        return int(optimizer.step[...]), model
    options |= helpers.SKIPS
    if way == "state":
        step = make_train_step(by_state, SGD, k, has_model_state=True, **options)
        state, key = step.init(ONES, key["rng"]), {}
    else:
        step = make_train_step(by_key, SGD, k, **options)
        state = step.init(ONES)
    state, metrics = helpers.run_step(step, state, [ONES] * calls, **key)
    return int(metrics.gradient_step), None


@pytest.mark.parametrize("over", ["1", "8, each"])
@pytest.mark.parametrize("way", ["rng", "state", "nnx, rng", "nnx"])
def test_a_run_goes_on_after_a_bad_draw(way: str, over: str):
    updates, model = trained(way, over, calls=40)
    assert 5 <= updates <= 15
    if way == "nnx":  # keys move on, and nothing else does
        assert model.rngs.default.count[...] == 40
        assert 2 * updates <= model.calls[...] <= 2 * updates + 1


def seen_by(way: str) -> list[Any]:
    """The keys that a loss is given in one window, from one key of the user."""
    root, seen, window = jax.random.key(3), [], jnp.ones((4, 8))

    def loss_fn(params: Any, x: Any, *, rng: Any) -> Any:
        return jnp.sum(params * x), (x.size, jax.random.key_data(rng))

    def summary_fn(params: Any, x: Any, *, rng: Any) -> Any:
        return jnp.sum(params * x), jax.random.key_data(rng)

    if way == "train step":
        step = make_train_step(loss_fn, SGD, 4, has_aux=True)
        state = step.init(ONES)
        for x in window:
            state, metrics = step(state, x, rng=root)
            seen.append(metrics.aux)
    elif way == "window step":
        step = make_window_step(loss_fn, SGD, has_aux=True)
        seen = [*step(step.init(ONES), window, rng=root)[1].aux]
    elif way == "coupled":
        f = coupled_value_and_grad(
            summary_fn, lambda x: (x[0].sum(), x[1]), has_aux=True
        )
        seen = [*f(ONES, window, rng=root)[0][1]]
    else:
        f = window_value_and_grad(loss_fn, has_aux=True)
        if way == "gradients":
            gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
            f = accumulate_over_window(gradient_fn, has_aux=True)
        seen = [*f(ONES, window, rng=root)[0][1][1]]
    return [tuple(np.asarray(x).tolist()) for x in seen]


@pytest.mark.parametrize(
    "way", ["train step", "window step", "function", "gradients", "coupled"]
)
def test_no_key_is_one_that_a_user_splits_from_the_same_root(way: str):
    """In JAX, `fold_in(key, i)` is `split(key, n)[i]`."""
    root = jax.random.key(3)
    users = [root, *jax.random.split(root, 64)]
    users += [key for parent in users[1:9] for key in jax.random.split(parent, 16)]
    users = {tuple(jax.random.key_data(key).tolist()) for key in users}
    naive = jax.random.fold_in(jax.random.fold_in(root, 0), 3)
    assert tuple(jax.random.key_data(naive).tolist()) in users
    seen = seen_by(way)
    assert len({*seen}) == 4 and users.isdisjoint(seen)
