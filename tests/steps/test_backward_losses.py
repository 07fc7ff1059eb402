"""Losses with derivatives of their own, effects, meshes, mutable arrays and errors."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import window_gradients
from helpers import run_step
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from window_gradients import (
    BATCHES,
    KEEPS,
    every_way,
    layer,
    loss_through,
    params_of,
    through_layers,
)

from optax_tokenaccum import make_train_step


def scan(layer: Any) -> Any:
    return lambda params, x: jax.lax.scan(layer, x, params["layers"])[0]


@jax.custom_jvp
def doubled_jvp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


doubled_jvp.defjvp(lambda x, t: (jnp.sin(x[0]), 2 * t[0] * jnp.cos(x[0])))


@jax.custom_vjp
def tripled_vjp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


tripled_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (3 * g @ kept[1].T, 3 * kept[0].T @ g),
)


def named(x: Any, w: Any) -> Any:
    return checkpoint_name(jnp.tanh(x @ w), "hidden"), None


def twice(params: Any, x: Any) -> Any:
    """Every layer in every trip of an outer scan."""
    trip = scan(layer)
    return jax.lax.scan(lambda x, _: (trip(params, x), None), x, length=2)[0]


def doubling(x: Any, w: Any) -> Any:
    size = jax.lax.stop_gradient(1 + jnp.sum(x**2))
    size = jax.lax.while_loop(lambda n: n < 100, lambda n: 2 * n, size)
    return jnp.tanh(x @ w) * size / 100, None


def chosen(x: Any, w: Any) -> Any:
    either = lambda: jnp.tanh(x @ w), lambda: x * w[0]  # noqa: E731
    return jax.lax.cond(x[0, 0] > 0, *either), None


def from_the_host(params: Any, x: Any) -> Any:
    shape = jax.ShapeDtypeStruct((), np.float32)
    scale = jax.pure_callback(lambda x: np.float32(2 * x), shape, x[0, 0])
    return through_layers(params, x) * scale


def over_another_axis(params: Any, x: Any) -> Any:
    mesh = jax.make_mesh((4,), ("other",), axis_types=(AxisType.Auto,))

    def part(w: Any, x: Any) -> Any:
        return jax.lax.psum(jnp.einsum("ri,lio->ro", x, w), "other")

    specs = P(None, "other"), P(None, "other")
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(
        params["layers"], x
    )


def with_own_array(params: Any, x: Any) -> Any:
    ref = jax.new_ref(x)

    def layer(i: Any, _: Any) -> Any:
        ref[...] = jnp.tanh(ref[...] @ params["layers"][i])
        return 0

    jax.lax.fori_loop(0, window_gradients.LAYERS, layer, 0)
    return jax.freeze(ref)


POLICIES = jax.checkpoint_policies
NETWORKS = {
    "custom_jvp": scan(lambda x, w: (doubled_jvp(x @ w), None)),
    "custom_vjp": scan(lambda x, w: (jnp.tanh(tripled_vjp(x, w)), None)),
    "checkpoint": scan(jax.checkpoint(layer)),
    "checkpoint of dots": scan(jax.checkpoint(layer, policy=POLICIES.dots_saveable)),
    "checkpoint of names": scan(
        jax.checkpoint(named, policy=POLICIES.save_only_these_names("hidden"))
    ),
    "scan in a scan": twice,
    "while loop": scan(doubling),
    "cond": scan(chosen),
    "vmap over layers": lambda params, x: jnp.sum(
        jax.vmap(lambda w: layer(x, w)[0])(params["layers"]), 0
    ),
    "gradient": lambda params, x: jax.grad(
        lambda x: jnp.sum(through_layers(params, x) ** 3)
    )(x),
    "pure_callback": from_the_host,
    "shard_map": over_another_axis,
    "own mutable array": with_own_array,
}


def check(way: Any, loss_fn: Any, params: Any = None, batches: Any = BATCHES) -> None:
    params = params_of() if params is None else params
    got = way(loss_fn, params, batches)
    expected = window_gradients.by_hand(loss_fn, params, batches)[1]
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


FAST = ("custom_vjp", "checkpoint of names", "cond", "own mutable array")


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(f, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, f in NETWORKS.items()
    ],
)
@every_way
def test_networks(way: Any, network: Any):
    check(way, loss_through(network))


@every_way
def test_optimization_barrier(way: Any):
    def network(params: Any, x: Any) -> Any:
        return through_layers(jax.lax.optimization_barrier(params), x)

    check(way, loss_through(network))


@every_way
def test_explicit_mesh_that_is_not_set(way: Any):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
    params, batches = jax.device_put((params_of(), BATCHES), NamedSharding(mesh, P()))
    check(way, window_gradients.loss_fn, params, batches)


EFFECTS = {
    "print": lambda x, seen: jax.debug.callback(seen.append, x),
    "ordered print": lambda x, seen: jax.debug.callback(seen.append, x, ordered=True),
    "io_callback": lambda x, seen: io_callback(seen.append, None, x, ordered=True),
}


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_effects_happen_once(effect: Any):
    """Also in the micro-batch without tokens."""
    seen: list[Any] = []

    def network(params: Any, x: Any) -> Any:
        effect(x[0, 0], seen)
        return through_layers(params, x)

    way, loss_fn = window_gradients.train_step, loss_through(network)
    got = way(loss_fn, params_of(), BATCHES)
    jax.effects_barrier()
    assert [float(x) for x in seen] == [float(b["x"][0, 0]) for b in BATCHES]
    expected = window_gradients.by_hand(window_gradients.loss_fn, params_of(), BATCHES)
    chex.assert_trees_all_close(got, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="another name in older jax")
def test_a_mutable_array_that_the_loss_closes_over():
    ref = jax.new_ref(jnp.float32(2))

    def network(params: Any, x: Any) -> Any:
        return through_layers(params, x) * ref[...]

    check(window_gradients.value_and_grad, loss_through(network))


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, ValueError])
@every_way
def test_an_error_of_the_loss_reaches_the_user(way: Any, error: Any):
    def loss_fn(params: Any, batch: Any) -> Any:
        raise error("mine")

    with pytest.raises(error, match="mine"):
        way(loss_fn, params_of(), BATCHES)


@every_way
def test_an_error_that_is_raised_only_once_reaches_the_user(way: Any):
    """A loss with side effects, such as a layer that remembers its losses."""
    calls = []

    def loss_fn(params: Any, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 1:
            raise ValueError("once")
        return window_gradients.loss_fn(params, batch)

    with pytest.raises(ValueError, match="once"):
        way(loss_fn, params_of(), BATCHES)


def test_an_error_while_tracing_leaves_the_state_usable():
    fails = [False]

    def loss_fn(params: Any, batch: Any) -> Any:
        if fails[0]:
            raise NotImplementedError("once")
        return window_gradients.loss_fn(params, batch)

    step = make_train_step(loss_fn, KEEPS, 2)
    state, _ = step(step.init(params_of()), BATCHES[0])
    fails[0] = True
    longer = window_gradients.batch_of(5, 9, rows=12)  # another shape: traced again
    with pytest.raises(NotImplementedError, match="once"):
        step(state, longer)
    fails[0] = False
    state, _ = run_step(step, state, [longer])
    expected = window_gradients.by_hand(
        window_gradients.loss_fn, params_of(), [BATCHES[0], longer]
    )[1]
    got = state.opt_state.inner_opt_state
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
