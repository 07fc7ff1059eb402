"""What a backward pass adds, for leaves and losses of every kind."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
import window_gradients
from helpers import run_step
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from window_gradients import (
    BATCHES,
    KEEPS,
    LAYERS,
    batch_of,
    by_hand,
    every_way,
    loss_through,
    params_of,
    through_layers,
    window_of,
)

from optax_tokenaccum import make_train_step

slow = pytest.mark.slow


def check(
    way: Any,
    loss_fn: Any,
    params: Any = None,
    batches: Any = BATCHES,
    rtol: float = 1e-4,
) -> None:
    params = params_of() if params is None else params
    got = way(loss_fn, params, batches)
    expected = by_hand(loss_fn, params, batches)[1]
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, rtol=rtol, atol=1e-6)


def divides_by_tokens(params: Any, batch: Any) -> Any:
    """A loss whose value and gradients are NaN without tokens."""
    y = through_layers(params, batch["x"]) + params["out"]
    n = jnp.sum(batch["mask"])
    mean = jnp.sum(jnp.sum(y.astype(jnp.float32) ** 2, -1) * batch["mask"]) / n
    return mean * n, n


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        ((0, 8, 3), jnp.float32),
        ((8, 0, 3), jnp.bfloat16),
        pytest.param((8, 3, 0), jnp.float32, marks=slow),
        pytest.param((0,), jnp.float32, marks=slow),
    ],
    ids=["first", "middle", "last", "only"],
)
@every_way
def test_nan_gradients_of_no_tokens_add_nothing(way: Any, tokens: Any, dtype: Any):
    params, batches = params_of(dtype), window_of(*tokens)
    alone = jax.grad(lambda p: divides_by_tokens(p, batch_of(0, 0))[0])(params)
    assert all(jnp.all(jnp.isnan(x)) for x in jax.tree.leaves(alone))
    rtol = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    check(way, divides_by_tokens, params, batches, rtol)


OVER: dict[str, Any] = {"mesh": meshes.make_mesh((8,)), "data_axes": "data"}
EACH = OVER | {"reduce_every": "micro_batch"}
COUNTS = {
    # Known while the loss is traced.
    "int": 5,
    "int 0": 0,
    "numpy": np.float32(3),
    # Not usable, or only one of them.
    "negative": lambda n: n - 20,
    "NaN": lambda n: jnp.nan * n,
    "one is": lambda n: jnp.where(n == 8, n, -n),
    "one is infinite": lambda n: jnp.where(n == 8, n, jnp.inf),
}


def with_count(count: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = window_gradients.loss_fn(params, batch)
        return loss_sum, count(n) if callable(count) else count

    return loss_fn


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@every_way
def test_counts_that_are_known_or_not_usable(way: Any, count: Any):
    check(way, with_count(count), batches=window_of(8, 4), rtol=1e-5)


def test_tokens_that_are_known_need_no_conditional():
    def conditionals_of(count: Any) -> int:
        step = make_train_step(with_count(count), optax.sgd(1.0), 2)
        state = jax.eval_shape(step.init, params_of())
        text = step.accumulate.lower(state, batch_of(0, 8)).as_text()
        return text.count("stablehlo.case")

    conditionals = conditionals_of(lambda n: n)
    for known in (0, 5):
        fewer = conditionals_of(known) < conditionals
        assert fewer or jax.__version_info__ < (0, 11)  # none in a backward pass


@pytest.mark.parametrize("options", [{}, OVER, EACH], ids=["1", "8", "8, each"])
@pytest.mark.parametrize(
    "k",
    [2, pytest.param(lambda _: 2, marks=slow)],
    ids=["two programs", "one program"],
)
def test_sums_of_a_restored_state_are_overwritten(k: Any, options: Any):
    loss_fn = window_gradients.loss_fn
    step = make_train_step(loss_fn, KEEPS, k, **options)
    state, batches = step.init(params_of()), window_of(0, 8)
    opt_state = state.opt_state
    stale = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), opt_state.acc_grads)
    state = state._replace(opt_state=opt_state._replace(acc_grads=stale))
    got = run_step(step, state, batches)[0].opt_state.inner_opt_state
    expected = by_hand(loss_fn, params_of(), batches)[1]
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def leaves_loss(params: Any, batch: Any) -> Any:
    """A sum over all leaves but "untouched", each to a power of the tokens."""
    total = 0.0
    for name, x in params.items():
        if name != "untouched":
            # Not the square: the gradient of a complex number is not its conjugate.
            factor = 1 + 2j if jnp.iscomplexobj(x) else 1
            total += jnp.real(jnp.sum(x**2 * factor)).astype(jnp.float32)
    losses = total * jnp.mean(batch["x"] ** 2, -1) * batch["mask"]
    return jnp.sum(losses), jnp.sum(batch["mask"])


VECTOR = np.float32(np.random.default_rng(3).normal(size=3))
LEAVES = {
    "all": {
        "untouched": VECTOR,
        "integer": np.arange(3),
        "complex": VECTOR + 1j * VECTOR[::-1],
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2),
        "w": VECTOR,
    },
    "only untouched": {"untouched": VECTOR},
    "float16": {"h": VECTOR.astype(np.float16), "w": VECTOR},
}


@pytest.mark.parametrize("name", LEAVES)
@every_way
def test_leaves_of_every_kind(way: Any, name: str):
    params = jax.tree.map(jnp.asarray, LEAVES[name])
    check(way, leaves_loss, params, rtol=1e-3 if name == "float16" else 1e-5)


def scan(layer: Any) -> Any:
    return lambda params, x: jax.lax.scan(layer, x, params["layers"])[0]


@jax.custom_vjp
def tripled_vjp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


tripled_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (3 * g @ kept[1].T, 3 * kept[0].T @ g),
)


def named(x: Any, w: Any) -> Any:
    return checkpoint_name(jnp.tanh(x @ w), "hidden"), None


def chosen(x: Any, w: Any) -> Any:
    either = lambda: jnp.tanh(x @ w), lambda: x * w[0]  # noqa: E731
    return jax.lax.cond(x[0, 0] > 0, *either), None


def with_own_array(params: Any, x: Any) -> Any:
    ref = jax.new_ref(x)

    def layer(i: Any, _: Any) -> Any:
        ref[...] = jnp.tanh(ref[...] @ params["layers"][i])
        return 0

    jax.lax.fori_loop(0, LAYERS, layer, 0)
    return jax.freeze(ref)


NETWORKS = {
    "custom_vjp": scan(lambda x, w: (jnp.tanh(tripled_vjp(x, w)), None)),
    "checkpoint of names": scan(
        jax.checkpoint(
            named, policy=jax.checkpoint_policies.save_only_these_names("hidden")
        )
    ),
    "cond": scan(chosen),
    "own mutable array": with_own_array,
    "optimization_barrier": lambda params, x: through_layers(
        jax.lax.optimization_barrier(params), x
    ),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@every_way
def test_networks(way: Any, network: Any):
    check(way, loss_through(network))


@pytest.mark.parametrize(
    "effect",
    [
        jax.debug.callback,
        functools.partial(jax.debug.callback, ordered=True),
        lambda see, x: io_callback(see, None, x, ordered=True),
    ],
    ids=["print", "ordered print", "io_callback"],
)
def test_effects_happen_once(effect: Any):
    """Also in the micro-batch without tokens."""
    seen: list[Any] = []

    def network(params: Any, x: Any) -> Any:
        effect(seen.append, x[0, 0])
        return through_layers(params, x)

    got = window_gradients.train_step(loss_through(network), params_of(), BATCHES)
    jax.effects_barrier()
    assert [float(x) for x in seen] == [float(b["x"][0, 0]) for b in BATCHES]
    expected = by_hand(window_gradients.loss_fn, params_of(), BATCHES)[1]
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, ValueError])
@pytest.mark.parametrize("once", [False, True])
@every_way
def test_an_error_of_the_loss_reaches_the_user(way: Any, once: bool, error: Any):
    """Once: of a loss with side effects, as a layer that remembers its losses."""
    calls = []

    def loss_fn(params: Any, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 1 or not once:
            raise error("mine")
        return window_gradients.loss_fn(params, batch)

    with pytest.raises(error, match="mine"):
        way(loss_fn, params_of(), BATCHES)
