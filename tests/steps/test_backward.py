"""What a backward pass adds, for leaves and losses of every kind."""

import functools
import random
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from helpers import relative_error, stack
from jax.experimental import io_callback
from problems import (
    BATCHES,
    FEW,
    WAYS,
    batches_of,
    by_hand,
    check_gradient,
    layered_loss,
    loss_through,
    through_layers,
    train_step,
    value_and_grad,
    window_step,
)

from optax_tokenaccum import window_value_and_grad
from optax_tokenaccum._core import backward
from optax_tokenaccum._core.perturbations import LossJaxpr


def also_read_outside(params: Any, x: Any) -> Any:
    return through_layers(params, x) + jnp.sum(params["layers"] ** 2)


def scan(layer: Any) -> Any:
    return lambda params, x: jax.lax.scan(layer, x, params["layers"])[0]


def read_twice(params: Any, x: Any) -> Any:
    def layer(x: Any, both: Any) -> Any:
        return jnp.tanh(x @ both[0] + jnp.sin(x @ both[1])), None

    return jax.lax.scan(layer, x, (params["layers"],) * 2)[0]


@jax.custom_vjp
def tripled_vjp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


tripled_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (3 * g @ kept[1].T, 3 * kept[0].T @ g)
)


@jax.custom_vjp
def doubled_vjp(x: jax.Array, factors: jax.Array) -> jax.Array:
    return x * factors[0]


def _doubled_backward(factors: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    index = 1 + jnp.sum(0 * g).astype(int)  # which no NumPy array can take
    return g * factors[index], None


doubled_vjp.defvjp(lambda x, factors: (x * factors[0], factors), _doubled_backward)


def chosen(x: Any, w: Any) -> Any:
    either = lambda: jnp.tanh(x @ w), lambda: x * w[0]  # noqa: E731
    return jax.lax.cond(x[0, 0] > 0, *either), None


def with_own_array(params: Any, x: Any) -> Any:
    ref = jax.new_ref(x)

    def layer(i: Any, _: Any) -> Any:
        ref[...] = jnp.tanh(ref[...] @ params["layers"][i])
        return 0

    jax.lax.fori_loop(0, problems.LAYERS, layer, 0)
    return jax.freeze(ref)


NETWORKS = {
    "read twice": read_twice,
    "remat, one flag an argument": jax.checkpoint(
        scan(problems.layer), prevent_cse=(True, False)
    ),
    "custom_vjp": scan(lambda x, w: (jnp.tanh(tripled_vjp(x, w)), None)),
    "constant of a backward rule": lambda params, x: doubled_vjp(
        x @ params["layers"][0], jnp.array([1.0, 2.0])
    ),
    "cond": scan(chosen),
    "own mutable array": with_own_array,
}


def divided(network: Any) -> Any:
    """A loss whose value and gradients are NaN without tokens."""

    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_through(network)(params, batch)
        return loss_sum / n * n, n

    return loss_fn


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_networks(network: Any):
    check_gradient(value_and_grad, divided(network))


@pytest.mark.parametrize(
    ("way", "network", "tokens"),
    [(train_step, through_layers, (0, 8)), (window_step, also_read_outside, (8, 0, 3))],
    ids=["first", "outside"],
)
def test_nan_gradients_of_bfloat16_layers(way: Any, network: Any, tokens: Any):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), FEW)
    loss_fn, batches = divided(network), batches_of(*tokens)
    nan = jax.jit(jax.grad(loss_fn, has_aux=True))(params, batches_of(0)[0])[0]
    assert all(jnp.all(jnp.isnan(x)) for x in jax.tree.leaves(nan))
    got = way(loss_fn, params, batches)
    assert relative_error(got, by_hand(loss_fn, params, batches)) < 1e-2


def test_counts_that_are_not_usable_add_nothing():
    def loss_fn(params: Any, batch: Any) -> Any:
        return layered_loss(params, batch)[0], batch["n"]

    counts = -12.0, 4.0, np.nan, np.inf, 3.0
    batches = batches_of(*[8] * len(counts))
    batches = [x | {"n": np.float32(n)} for x, n in zip(batches, counts, strict=True)]
    check_gradient(train_step, loss_fn, batches=batches)


def test_a_count_that_depends_on_the_parameters():
    def loss_fn(params: Any, batch: Any) -> Any:
        y = through_layers(params, batch["x"])
        n = jnp.sum(batch["weights"] * jax.nn.sigmoid(y[:, 0]))
        return layered_loss(params, batch)[0], n

    check_gradient(train_step, loss_fn, batches=batches_of(8, 2, 3))


def test_a_count_of_0_that_is_known_while_the_loss_is_traced():
    def loss_fn(params: Any, batch: Any) -> Any:
        return layered_loss(params, batch)[0] * jnp.nan, 0

    got = value_and_grad(loss_fn, FEW, BATCHES)
    chex.assert_trees_all_equal(got, jax.tree.map(jnp.zeros_like, FEW))


def test_leaves_of_every_kind():
    def loss_fn(params: Any, batch: Any) -> Any:
        # Not the square: the gradient of a complex number is not its conjugate.
        total = jnp.real(jnp.sum(params["complex"] ** 2 * (1 + 2j)))
        for name in ("integer", "empty", "scalar", "w"):
            total += jnp.sum(params[name] ** 2)
        return problems.squares(total, batch)

    vector = problems.normal(3, 3)
    leaves = {
        "untouched": vector,
        "integer": np.arange(3),
        "complex": vector + 1j * vector[::-1],
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2),
        "w": vector,
    }
    params = jax.tree.map(jnp.asarray, leaves)
    check_gradient(value_and_grad, loss_fn, params)


@pytest.mark.parametrize("way", WAYS)
def test_no_layers(way: Any):
    check_gradient(way, layered_loss, FEW | {"layers": FEW["layers"][:0]})


def test_complex_layers_that_are_a_constant_of_their_scan_too():
    def network(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            w = w * params["layers"][0]
            return jnp.tanh(x @ jnp.real(w) + jnp.imag(w)[0]), None

        return jax.lax.scan(layer, x, params["layers"])[0]

    params = FEW | {"layers": FEW["layers"] * (1 + 2j)}
    check_gradient(value_and_grad, loss_through(network), params)


def test_effects_happen_once():
    """Also in the micro-batch without tokens."""
    printed: list[Any] = []
    in_order: list[Any] = []
    loaded: list[Any] = []

    def load(x: Any) -> Any:
        loaded.append(x)
        return np.ones_like(x)

    def network(params: Any, x: Any) -> Any:
        jax.debug.callback(printed.append, x[0, 0])
        io_callback(in_order.append, None, x[0, 0], ordered=True)
        scale = io_callback(load, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
        return through_layers(params, x * scale)

    got = train_step(loss_through(network), FEW, BATCHES)
    jax.effects_barrier()
    for seen in (printed, in_order, loaded):
        assert [float(x) for x in seen] == [float(b["x"][0, 0]) for b in BATCHES]
    expected = by_hand(layered_loss, FEW, BATCHES)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)

    def counts_what_it_loads(params: Any, batch: Any) -> Any:
        loss_sum, n = layered_loss(params, batch)
        return loss_sum, io_callback(load, jax.ShapeDtypeStruct((), n.dtype), n)

    with pytest.raises(
        ValueError, match="num_tokens must not depend on an io_callback"
    ):
        train_step(counts_what_it_loads, FEW, BATCHES)


def test_a_count_may_be_added_up_in_a_mutable_array():
    @jax.jit
    def add(ref: Any, x: Any) -> None:
        ref[...] += x

    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, _ = layered_loss(params, batch)
        n = jax.new_ref(batch["weights"][0])
        add(n, batch["weights"][1:].sum())
        return loss_sum, n[...]

    check_gradient(train_step, loss_fn, batches=batches_of(8, 2, 3))


@pytest.mark.parametrize(("way", "once"), [(value_and_grad, False), (train_step, True)])
def test_an_error_of_the_loss_reaches_the_user(way: Any, once: bool):
    """Once: of a loss with side effects, as a layer that remembers its losses."""
    calls = []

    def loss_fn(params: Any, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 1 or not once:
            raise TypeError("mine")
        return layered_loss(params, batch)

    with pytest.raises(TypeError, match="mine"):
        way(loss_fn, FEW, BATCHES)


def test_lanes_of_vmap_and_derivatives_in_forward_mode():
    """As many tokens in each would hide lanes that are swapped."""
    scales = jnp.asarray([1.0, 2.0])
    windows = stack([stack(batches_of(*n)) for n in ((8, 0, 3), (0, 8, 1))])

    def loss_fn(params: Any, batch: Any, scale: Any) -> Any:
        loss_sum, n = layered_loss(params, batch)
        return scale * loss_sum, n

    def mean(params: Any, window: Any, scale: Any) -> Any:
        f = functools.partial(loss_fn, params, scale=scale)
        loss_sums, counts = jax.vmap(f)(window)
        return jnp.sum(loss_sums) / jnp.sum(counts)

    def gradient(params: Any, window: Any, scale: Any) -> Any:
        return window_value_and_grad(loss_fn)(params, window, scale=scale)[1]

    def with_derivatives(f: Any) -> Any:
        """By parameters and a keyword. In 0.3.0, an empty error."""
        derivatives = jax.jacfwd(lambda *args: 2 * (f(*args),), (0, 2), has_aux=True)
        return jax.jit(jax.vmap(derivatives, (None, 0, 0)))(FEW, windows, scales)

    got, expected = map(with_derivatives, (gradient, jax.grad(mean)))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


def test_reverse_mode_is_right_or_an_error():
    def loss(params: Any) -> Any:
        return window_value_and_grad(layered_loss)(params, stack(BATCHES))[0][0]

    if backward.CAN_ADD_IN_PLACE:
        with pytest.raises(ValueError, match="Linearization failed"):
            jax.grad(loss)(FEW)
        return
    expected = by_hand(layered_loss, FEW, BATCHES)
    chex.assert_trees_all_close(jax.grad(loss)(FEW), expected, rtol=1e-4)


Take = Callable[[Any], Any]
CHANGES: list[Take] = [
    jax.jit(lambda p: 3.0 * p),
    jnp.sin,
    lambda p: jnp.swapaxes(p, 0, 1),
    jax.jit(lambda p: jnp.moveaxis(p, 2, 0)),
    jax.checkpoint(lambda p: jnp.swapaxes(p, 1, 2)),
    lambda p: p.astype(jnp.bfloat16),
    lambda p: p.astype(jnp.float32),
]


def random_leaf(choose: random.Random, is_layer: bool) -> Take:
    """Take a parameter, change it in some ways, and take one of its layers or all."""
    name = choose.choice("abc")
    changes = choose.choices(CHANGES, k=choose.randint(0, 3))
    part = choose.choice([0, -1]) if is_layer else slice(None)

    def take(params: Any) -> Any:
        p = functools.reduce(lambda p, change: change(p), changes, params[name])
        return p[part]

    return take


def random_scan(choose: random.Random) -> Callable[[Any, Any], Any]:
    """Scan over parameters, with others as constants, and maybe one that is carried."""
    scanned = [random_leaf(choose, False) for _ in range(choose.randint(1, 3))]
    constant = [random_leaf(choose, True) for _ in range(choose.randint(0, 2))]
    carried = random_leaf(choose, True) if choose.random() < 0.5 else None
    remat, nested, reverse, called = (choose.random() < 0.5 for _ in range(4))
    unroll = choose.choice([1, 2])

    def run(params: Any, x: Any) -> Any:
        constants = [take(params) for take in constant]

        def layer(carry: Any, weights: Any) -> Any:
            x, w_carried = carry
            for i, w in enumerate([*weights, *constants], start=2):
                x = jnp.tanh(x @ w.astype(x.dtype) / i + 1 / i)
            if w_carried is not None:
                x = x + jnp.sin(x @ w_carried.astype(x.dtype))
                w_carried = 0.5 * w_carried + 0.1
            return (x, w_carried), None

        def layers(carry: Any, weights: Any) -> Any:
            return jax.lax.scan(lambda carry, _: layer(carry, weights), carry, length=2)

        body = layers if nested else layer
        start = x, None if carried is None else carried(params)
        weights = [take(params) for take in scanned]
        body = jax.checkpoint(body) if remat else body
        end, _ = jax.lax.scan(body, start, weights, reverse=reverse, unroll=unroll)
        return end[0]

    return jax.jit(jax.checkpoint(run)) if called else run


def random_loss(seed: int) -> Any:
    """A loss of one or two scans, which is NaN without tokens."""
    choose = random.Random(seed)
    scans = [random_scan(choose) for _ in range(choose.randint(1, 2))]

    def network(params: Any, x: Any) -> Any:
        x = x.astype(jnp.promote_types(params["a"].dtype, jnp.float32))
        for scan in scans:
            x = scan(params, x)
        return x

    return divided(network)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_programs_with_scans(seed: int):
    """All axes have one size, so that swapped gradients have the right shapes."""
    way, loss_fn = WAYS[seed % len(WAYS)], random_loss(seed)
    shape = (problems.FEATURES,) * 3
    params = {n: jnp.asarray(problems.normal(i, *shape)) for i, n in enumerate("abc")}
    params["out"] = FEW["out"]
    if seed % 2:
        params["b"] = params["b"].astype(jnp.bfloat16)
    got = way(loss_fn, params, BATCHES)
    if "bf16[" in str(jax.make_jaxpr(loss_fn)(params, BATCHES[0])):
        # Another loss in float64. By hand, gradients are rounded to 9 bits too.
        assert relative_error(got, by_hand(loss_fn, params, BATCHES)) < 0.01
        return
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params, BATCHES))
        expected = by_hand(loss_fn, *wide)
    assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("is_spread", [[False, False], [True, False], [True, True]])
def test_no_gradient_is_rounded_to_the_bits_of_its_parameter(is_spread: list[bool]):
    """Whether another gradient is added within the backward pass, or none."""

    def loss_fn(params: Any, x: Any) -> Any:
        def layer(so_far: Any, layers: Any) -> Any:
            a, b = layers
            return so_far + jnp.sum(x * a.astype(jnp.float32)) + jnp.sum(b), None

        loss_sum, _ = jax.lax.scan(layer, 0.0, (params["a"], params["b"]))
        return loss_sum, (jnp.float32(1), None)

    params = {name: jnp.ones((2, 1), jnp.bfloat16) for name in "ab"}
    x = jnp.float32(1.001)  # 1 in bfloat16
    loss = LossJaxpr(loss_fn, params, x).perturbed_loss(jnp.float32(1))
    sums, *_ = backward.add_gradients(loss, [jnp.zeros((2, 1))] * 2, params, is_spread)
    assert x.astype(jnp.bfloat16) == 1
    np.testing.assert_array_equal(sums[0], jnp.full((2, 1), x))
