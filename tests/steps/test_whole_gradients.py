"""`whole_gradients` names the gradients that need memory, and no others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SKIPS
from jax.ad_checkpoint import checkpoint_name
from meshes import make_mesh

from optax_tokenaccum import (
    _backward,
    _perturbations,
    make_train_step,
    make_window_step,
    whole_gradients,
    window_value_and_grad,
)

LAYERS, WIDTH = 16, 64
PARAMS = {"layers": jnp.ones((LAYERS, WIDTH, WIDTH)), "scale": jnp.ones(WIDTH)}
ALL = ["['layers']"]  # the scale is less than 1 % of the parameters
X = jnp.ones((2, WIDTH))
F32, BF16 = jnp.float32, jnp.bfloat16
IS_OLD = not _backward.CAN_ADD_IN_PLACE


def loss_with(change: Any, unroll: bool = False) -> Any:
    """A loss whose layers are scanned over after `change`."""

    def loss_fn(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w.astype(x.dtype)), None

        x, layers = x * params["scale"], change(params["layers"])
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, layers, unroll=unroll)
        return jnp.sum(y), x.size

    return loss_fn


def turned(w: Any) -> Any:
    return jnp.swapaxes(w, 0, 1)


def in_bfloat16(w: Any) -> Any:
    return w.astype(jnp.bfloat16)


# What changes the layers before the scan.
CHANGES: dict[str, Any] = {
    "as they are": lambda w: w,
    "cast": in_bfloat16,
    "cast in a call": jax.jit(lambda w: w.astype(jnp.float16)),
    "named": lambda w: checkpoint_name(w, "layers"),
    "doubled": lambda w: 2 * w,
    "along axis 1": turned,
}


def step_and_args(name: str, in_window: bool, dtype: Any = F32) -> Any:
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    if name == "along axis 1":
        params["layers"] = turned(params["layers"])
    make = make_window_step if in_window else make_train_step
    step = make(loss_with(CHANGES[name]), optax.sgd(0.1))
    x = (jnp.stack([X, X]) if in_window else X).astype(dtype)
    return step, step.init(params), x


@pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")
@pytest.mark.parametrize(
    ("name", "in_window"),
    [
        ("as they are", True),
        ("cast", False),
        ("cast in a call", True),
        ("named", False),
        ("along axis 1", True),
    ],
)
def test_layers_are_not_named_that_a_scan_takes_after_an_operation_on_each(
    name: str, in_window: bool
):
    assert whole_gradients(*step_and_args(name, in_window)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_window", "dtype", "reason"),
    [
        ("as they are", True, BF16, None),
        ("doubled", False, BF16, "mul"),
        # The sums of a train step lie like the parameters.
        ("along axis 1", False, F32, "transpose"),
        ("along axis 1", True, F32, None),
    ],
)
def test_a_reason_is_given_exactly_where_memory_is_needed(
    name: str, in_window: bool, dtype: Any, reason: str | None
):
    step, state, x = step_and_args(name, in_window, dtype)
    found = whole_gradients(step, state, x)
    if IS_OLD:
        assert [*found] == ALL
        return
    assert [*found] == (ALL if reason else [])
    assert reason is None or reason in found["['layers']"]
    params, loss_fn = state.params, loss_with(CHANGES[name])

    def by_hand(carry: Any, x: Any) -> Any:
        params, sums, tokens = carry
        gradients, n = jax.grad(loss_fn, has_aux=True)(params, x)
        sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)
        return (params, sums, tokens + n), None

    def window_by_hand(params: Any, x: Any) -> Any:
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
        (_, sums, n), _ = jax.lax.scan(by_hand, (params, sums, 0), x)
        return jax.tree.map(lambda p, s: p - (s / n).astype(p.dtype), params, sums)

    if in_window:
        hand = jax.jit(window_by_hand, donate_argnums=0), params, x
        ours = step, state, x
    else:
        carry = params, state.opt_state.grad_sums, 0
        hand = jax.jit(by_hand, donate_argnums=0), carry, x
        ours = step.accumulate, state, x
    saved = (temporaries(*hand) - temporaries(*ours)) / params["layers"].nbytes
    assert abs(saved) < 0.01 if reason else saved > 0.4


def temporaries(program: Any, *args: Any) -> int:
    return program.lower(*args).compile().memory_analysis().temp_size_in_bytes


def in_custom_jvp(params: Any, x: Any) -> Any:
    apply = jax.custom_jvp(loss_with(lambda w: w))
    apply.defjvp(functools.partial(jax.jvp, loss_with(lambda w: w)))
    return apply({**params, "layers": in_bfloat16(params["layers"])}, x)


def scanned(x: Any, layers: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def scanned_with(x: Any, layers: Any, other: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ (w + jnp.sum(other))), None

    return jax.lax.scan(layer, x, layers)[0]


def by_index(x: Any, layers: Any) -> Any:
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x @ layers[i]), x)


def loss_of(network: Any) -> Any:
    return lambda params, x: (jnp.sum(network(params["layers"], x)), x.size)


@pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")
@pytest.mark.parametrize(
    ("loss_fn", "options", "reason"),
    [
        (loss_with(lambda w: w, unroll=True), {}, "unrolled"),
        (in_custom_jvp, {}, "custom_jvp_call"),
        (loss_with(lambda w: w), SKIPS, "should_skip_update_fn"),
        (loss_with(lambda w: w), {"accumulator_dtype": BF16}, "bfloat16 sum"),
        # In 0.3.0, these were not named.
        (loss_of(lambda w, x: scanned(scanned(x, w[:2]), w[2:])), {}, "slice"),
        (loss_of(lambda w, x: scanned(x, jnp.concatenate([w, w]))), {}, "concatenate"),
        (
            loss_of(lambda w, x: scanned_with(x, w, w)),
            {},
            "a loop that is given all of it",
        ),
        (loss_of(lambda w, x: by_index(x, w)), {}, "a loop that is given all of it"),
    ],
    ids=["unrolled", "custom", "skips", "narrow sums"]
    + ["in two parts", "joined", "whole and by layer", "by index in a loop"],
)
def test_the_reason_is_named(loss_fn: Any, options: Any, reason: str):
    step = make_train_step(loss_fn, optax.sgd(0.1), 2, **options)
    found = whole_gradients(step, step.init(PARAMS), X)
    assert [*found] == ALL
    assert reason in found["['layers']"]


@pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")
def test_what_is_large_and_given_whole_to_a_loop_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_perturbations, "LARGE", 100)

    def shared(layers: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, x: scanned(x, layers), x)

    for network in (lambda w, x: by_index(x, w), shared):
        step = make_train_step(loss_of(network), optax.sgd(0.1), 2)
        assert whole_gradients(step, step.init(PARAMS), X) == {}


@pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")
def test_the_switch_that_adds_every_gradient_after(monkeypatch: pytest.MonkeyPatch):
    step = make_train_step(loss_with(lambda w: w), optax.sgd(0.1), 2)
    assert whole_gradients(step, step.init(PARAMS), X) == {}
    monkeypatch.setenv("OPTAX_TOKENACCUM_ADD_AFTER", "1")
    step = make_train_step(loss_with(lambda w: w), optax.sgd(0.1), 2)
    found = whole_gradients(step, step.init(PARAMS), X)
    assert [*found] == ALL
    assert "OPTAX_TOKENACCUM_ADD_AFTER=1" in found["['layers']"]


def test_every_way_in_after_it_was_traced_and_from_shapes():
    loss_fn = loss_with(lambda w: 2 * w)
    train = make_train_step(loss_fn, optax.sgd(0.1))
    window = make_window_step(loss_fn, optax.sgd(0.1))
    own, xs = jax.jit(window_value_and_grad(loss_fn)), jnp.stack([X, X])
    state = train.init(PARAMS)
    shapes = jax.eval_shape(lambda: (PARAMS, xs))
    own(PARAMS, xs)
    for _ in range(2):
        found = [
            whole_gradients(own, PARAMS, xs),
            whole_gradients(own, *shapes),
            whole_gradients(train.accumulate, state, X),
            whole_gradients(window, window.init(PARAMS), xs),
        ]
        assert all("['layers']" in reasons for reasons in found)
        assert all(reasons == found[0] for reasons in found)
    # Asking leaves nothing behind: the next call runs the program that is there.
    np.testing.assert_array_equal(own(PARAMS, xs)[0][0], own(PARAMS, xs)[0][0])
    with pytest.raises(ValueError, match="must give this library a loss"):
        whole_gradients(lambda x: x, X)
    own = jax.vmap(window_value_and_grad(loss_with(lambda w: w)), (None, 0))
    mapped = whole_gradients(own, PARAMS, jnp.stack([xs, xs]))
    assert [*mapped] == ALL


@pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")
@pytest.mark.parametrize(("axis", "spread"), [(0, 0), (1, 0), (1, 1)])
def test_a_stacked_axis_that_is_spread_is_named(axis: int, spread: int):
    """The types of a `jit` do not tell: the arguments do. A step looks at its state."""
    mesh = make_mesh((8,))
    loss_fn = loss_with(turned if axis else lambda w: w)
    spec = jax.sharding.PartitionSpec(*[None] * spread, "data")
    shardings = {
        "layers": jax.sharding.NamedSharding(mesh, spec),
        "scale": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
    }
    layers = jnp.moveaxis(PARAMS["layers"], 0, axis)
    params = jax.device_put(PARAMS | {"layers": layers}, shardings)
    xs, step = jnp.stack([X, X]), make_window_step(loss_fn, optax.sgd(0.1))
    own = whole_gradients(jax.jit(window_value_and_grad(loss_fn)), params, xs)
    of_step = whole_gradients(step, step.init(params), xs)
    assert [*own] == [*of_step] == (ALL if spread == axis else [])
    # The step adds these gradients whole, as by hand, and so gathers no sum.
    assert all("first axis" in reason for reason in of_step.values())
