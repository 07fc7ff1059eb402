"""Recipes for frameworks: their parameters in our step, against float64."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

from optax_tokenaccum import (
    make_train_step,
    softmax_cross_entropy_sum,
    token_accumulation,
)

pytestmark = pytest.mark.slow

K = 8
RTOL = helpers.RTOL["float32"]
PARAMS, BATCH = helpers.init_params(0), helpers.ragged_batch(0)
MICRO_BATCHES = helpers.cut(BATCH, K)
# Keeps the gradient that it receives, see tests/core/test_exactness.py.
SGD = optax.sgd(1.0, momentum=0.0)


@functools.cache
def reference() -> Any:
    return helpers.float64_gradient(PARAMS, BATCH)


def loss_of(logits: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return softmax_cross_entropy_sum(logits, batch["labels"], batch["mask"])


def checkpointed_loss_fn(params: Any, batch: Any) -> Any:
    return loss_of(jax.checkpoint(helpers.logits_of)(params, batch["tokens"]), batch)


class Tuple(NamedTuple):
    embed: Any
    hidden: Any
    out: Any


def tuple_loss_fn(params: Any, batch: Any) -> Any:
    return helpers.loss_sum_fn(params._asdict(), batch)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["embed", "rest"],
    meta_fields=["activation"],
)
@dataclasses.dataclass
class Dataclass:
    embed: Any
    rest: dict[str, Any]
    activation: Callable[[Any], jax.Array]


def dataclass_loss_fn(params: Any, batch: Any) -> Any:
    x = params.activation(params.embed[batch["tokens"]] @ params.rest["hidden"])
    return loss_of(x @ params.rest["out"], batch)


class EquinoxModel(eqx.Module):
    embed: jax.Array
    hidden: jax.Array
    out: jax.Array
    order: jax.Array  # integers: an array that is not a parameter
    activation: Callable[[Any], jax.Array]

    def __call__(self, tokens: Any) -> jax.Array:
        x = self.embed[self.order[tokens]]
        return self.activation(x @ self.hidden) @ self.out


class CountingModel(eqx.Module):
    model: EquinoxModel
    seen: eqx.nn.StateIndex

    def __init__(self, model: EquinoxModel):
        self.model, self.seen = model, eqx.nn.StateIndex(jnp.float32(0))

    def __call__(self, batch: Any, model_state: Any) -> Any:
        seen = model_state.get(self.seen) + jnp.sum(batch["mask"])
        return self.model(batch["tokens"]), model_state.set(self.seen, seen)


MODEL = EquinoxModel(
    **PARAMS, order=jnp.arange(helpers.VOCABULARY), activation=jnp.tanh
)


def model_loss_fn(model: EquinoxModel, batch: Any) -> Any:
    return loss_of(model(batch["tokens"]), batch)


def equinox_loss_fn(params: Any, batch: Any, *, static: Any) -> Any:
    return model_loss_fn(eqx.combine(params, static), batch)


def haiku_forward(tokens: Any) -> jax.Array:
    x = hk.Embed(helpers.VOCABULARY, helpers.WIDTH)(tokens)
    x = jnp.tanh(hk.Linear(helpers.WIDTH, with_bias=False)(x))
    return hk.Linear(helpers.VOCABULARY, with_bias=False)(x)


def counting_forward(batch: Any) -> jax.Array:
    seen = hk.get_state("seen", (), init=jnp.zeros)
    hk.set_state("seen", seen + jnp.sum(batch["mask"]))
    return haiku_forward(batch["tokens"])


def haiku_loss_fn(params: Any, batch: Any) -> Any:
    apply = hk.transform(haiku_forward).apply
    return loss_of(apply(params, None, batch["tokens"]), batch)


class Recipe(NamedTuple):
    """A loss and its parameters, with leaves in the order embed, hidden, out."""

    loss_fn: Callable[..., Any]
    params: Any
    loss_kwargs: dict[str, Any] = {}


TRAINED, STATIC = eqx.partition(MODEL, eqx.is_inexact_array)
HAIKU_PARAMS = {
    "embed": {"embeddings": PARAMS["embed"]},
    "linear": {"w": PARAMS["hidden"]},
    "linear_1": {"w": PARAMS["out"]},
}
REST = {name: PARAMS[name] for name in ("hidden", "out")}
RECIPES = {
    "NamedTuple": Recipe(tuple_loss_fn, Tuple(**PARAMS)),
    "dataclass": Recipe(dataclass_loss_fn, Dataclass(PARAMS["embed"], REST, jnp.tanh)),
    "Equinox": Recipe(equinox_loss_fn, TRAINED, {"static": STATIC}),
    "Haiku": Recipe(haiku_loss_fn, HAIKU_PARAMS),
    "jax.checkpoint": Recipe(checkpointed_loss_fn, PARAMS),
}


def gradient_given(state: Any) -> Any:
    return optax.tree.get(state, "trace")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_step_takes_the_parameters_as_they_are(recipe: Recipe):
    step = make_train_step(recipe.loss_fn, SGD, K)
    state = step.init(recipe.params)
    for batch in MICRO_BATCHES:
        state, _ = step(state, batch, **recipe.loss_kwargs)
    exact = gradient_given(state.opt_state)
    assert helpers.relative_error(exact, reference()) < RTOL
    for tree in (exact, state.params):
        assert jax.tree.structure(tree) == jax.tree.structure(recipe.params)

    with helpers.count_compilations() as compiled:
        for batch in MICRO_BATCHES:
            state, _ = step(state, batch, **recipe.loss_kwargs)
    assert compiled == []


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_mean_of_their_means_is_something_else(recipe: Recipe):
    @jax.jit
    @jax.grad
    def mean_gradient(params: Any, batch: Any) -> Any:
        loss_sum, n = recipe.loss_fn(params, batch, **recipe.loss_kwargs)
        return loss_sum / n

    optimizer = optax.MultiSteps(SGD, K)
    state, update = optimizer.init(recipe.params), jax.jit(optimizer.update)
    for batch in MICRO_BATCHES:
        grads = mean_gradient(recipe.params, batch)
        _, state = update(grads, state, recipe.params)
    assert helpers.relative_error(gradient_given(state), reference()) > 0.02
    full = mean_gradient(recipe.params, BATCH)
    assert helpers.relative_error(full, reference()) < RTOL


def test_equinox_loop_with_filter_jit():
    optimizer = token_accumulation(SGD, K)

    @eqx.filter_jit
    def train_step(model: Any, opt_state: Any, batch: Any) -> Any:
        gradient_fn = eqx.filter_grad(model_loss_fn, has_aux=True)
        grads, n = gradient_fn(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, num_tokens=n)
        return eqx.apply_updates(model, updates), opt_state

    model, opt_state = MODEL, optimizer.init(TRAINED)
    for batch in MICRO_BATCHES:
        assert eqx.tree_equal(model, MODEL)
        model, opt_state = train_step(model, opt_state, batch)
    assert helpers.relative_error(gradient_given(opt_state), reference()) < RTOL
    moved = eqx.filter(model, eqx.is_inexact_array)
    applied = helpers.difference(TRAINED, moved)
    # Parameters of size 0.2 round updates of size 1e-2 at about 1e-6.
    assert helpers.relative_error(applied, reference()) < 5 * RTOL


def test_equinox_model_shares_the_arrays_of_the_state():
    step = make_train_step(equinox_loss_fn, SGD, 1)
    state, _ = step(step.init(TRAINED), BATCH, static=STATIC)
    model = eqx.combine(state.params, STATIC)
    state, _ = step(state, BATCH, static=STATIC)
    assert model.embed.is_deleted() and not MODEL.embed.is_deleted()
    assert not eqx.combine(state.params, STATIC).embed.is_deleted()


def equinox_with_state() -> Any:
    model, model_state = eqx.nn.make_with_state(CountingModel)(MODEL)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(params: Any, model_state: Any, batch: Any) -> Any:
        return eqx.combine(params, static)(batch, model_state)

    return apply, params, model_state, lambda model_state: model_state.get(model.seen)


def haiku_with_state() -> Any:
    model = hk.without_apply_rng(hk.transform_with_state(counting_forward))
    _, model_state = jax.jit(model.init)(jax.random.key(0), BATCH)
    return model.apply, HAIKU_PARAMS, model_state, lambda state: state["~"]["seen"]


@pytest.mark.parametrize(
    "with_state", [equinox_with_state, haiku_with_state], ids=["Equinox", "Haiku"]
)
def test_a_model_with_state_hands_it_on_as_aux(with_state: Any):
    apply, params, model_state, seen = with_state()

    def loss_fn(params: Any, batch: Any, *, model_state: Any) -> Any:
        logits, model_state = apply(params, model_state, batch)
        loss_sum, n = loss_of(logits, batch)
        return loss_sum, (n, model_state)

    step = make_train_step(loss_fn, SGD, K, has_aux=True)
    state, so_far = step.init(params), 0
    for batch in MICRO_BATCHES:
        state, metrics = step(state, batch, model_state=model_state)
        model_state = metrics.aux
        so_far += batch["mask"].sum()
        assert float(seen(model_state)) == so_far
    exact = gradient_given(state.opt_state)
    assert helpers.relative_error(exact, reference()) < RTOL


def test_checkpointed_layer_draws_the_same_dropout():
    def loss_with(wrap: Callable[..., Any], key_of: Callable[..., Any]) -> Any:
        @wrap
        def layer(x: Any, w: Any, key: Any) -> jax.Array:
            x = jnp.tanh(x @ w)
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

        def loss_fn(params: Any, batch: Any, *, rng: Any) -> Any:
            x = params["embed"][batch["tokens"]]
            x = layer(x, params["hidden"], key_of(rng))
            return loss_of(x @ params["out"], batch)

        return loss_fn

    def given(loss_fn: Any) -> Any:
        step = make_train_step(loss_fn, SGD, K)
        state = step.init(PARAMS)
        for batch in MICRO_BATCHES:
            state, _ = step(state, batch, rng=jax.random.key(0))
        return gradient_given(state.opt_state)

    def same(key: Any) -> Any:
        return key

    def other(key: Any) -> Any:
        return jax.random.fold_in(key, 1)

    kept = given(loss_with(lambda layer: layer, same))
    assert helpers.relative_error(given(loss_with(jax.checkpoint, same)), kept) < RTOL
    assert helpers.relative_error(given(loss_with(jax.checkpoint, other)), kept) > 0.02
