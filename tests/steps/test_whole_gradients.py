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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad
from optax_tokenaccum._core import backward, perturbations
from optax_tokenaccum.debug._whole_gradients import whole_gradients

LAYERS, WIDTH = 16, 64
PARAMS = {"layers": jnp.ones((LAYERS, WIDTH, WIDTH)), "scale": jnp.ones(WIDTH)}
TURNED = PARAMS | {"layers": jnp.swapaxes(PARAMS["layers"], 0, 1)}
ALL = ["['layers']"]  # the scale is less than 1 % of the parameters
X = jnp.ones((2, WIDTH))
XS = jnp.stack([X, X])
F32, BF16, SGD = jnp.float32, jnp.bfloat16, optax.sgd(0.1)
IS_OLD = not backward.CAN_ADD_IN_PLACE
on_new_jax = pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")


def loss_with(change: Any, unroll: bool = False) -> Any:
    """A loss whose layers are scanned over after `change`."""

    def loss_fn(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w.astype(x.dtype)), None

        x, layers = x * params["scale"], change(params["layers"])
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, layers, unroll=unroll)
        return jnp.sum(y), x.size

    return loss_fn


def in_custom_jvp(params: Any, x: Any) -> Any:
    apply = jax.custom_jvp(loss_with(lambda w: w))
    apply.defjvp(functools.partial(jax.jvp, loss_with(lambda w: w)))
    return apply({**params, "layers": params["layers"].astype(BF16)}, x)


def scanned(x: Any, layers: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def whole_and_by_layer(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, v: (x @ (v + jnp.sum(w)), None), x, w)[0]


def by_index(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x @ w[i]), x)


def shared(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, x: scanned(x, w), x)


def loss_of(network: Any) -> Any:
    return lambda params, x: (jnp.sum(network(params["layers"], x)), x.size)


LOSSES: dict[str, Any] = {
    "as they are": loss_with(lambda w: w),
    "cast": loss_with(lambda w: w.astype(BF16)),
    "cast in a call": loss_with(jax.jit(lambda w: w.astype(jnp.float16))),
    "named": loss_with(lambda w: checkpoint_name(w, "layers")),
    "doubled": loss_with(lambda w: 2 * w),
    "along axis 1": loss_with(lambda w: jnp.swapaxes(w, 0, 1)),
    "unrolled": loss_with(lambda w: w, unroll=True),
    "custom": in_custom_jvp,
    # In 0.3.0, these were not named.
    "in two parts": loss_of(lambda w, x: scanned(scanned(x, w[:2]), w[2:])),
    "joined": loss_of(lambda w, x: scanned(x, jnp.concatenate([w, w]))),
    "whole and by layer": loss_of(whole_and_by_layer),
    "by index in a loop": loss_of(by_index),
}


def step_and_args(
    name: str, in_window: bool = False, dtype: Any = F32, **options: Any
) -> Any:
    params = TURNED if name == "along axis 1" else PARAMS
    params, x = jax.tree.map(lambda x: x.astype(dtype), (params, X))
    make = make_window_step if in_window else make_train_step
    step = make(LOSSES[name], SGD, **options)
    return step, step.init(params), jnp.stack([x, x]) if in_window else x


WINDOW, IN_A_LOOP = {"in_window": True}, "a loop that is given all of it"


@on_new_jax
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("as they are", WINDOW, None),
        ("cast", {}, None),
        ("cast in a call", WINDOW, None),
        ("named", {}, None),
        ("along axis 1", WINDOW, None),
        ("unrolled", {}, "unrolled"),
        ("custom", {}, "custom_jvp_call"),
        ("as they are", SKIPS, "should_skip_update_fn"),
        ("as they are", {"accumulator_dtype": BF16}, "bfloat16 sum"),
        ("in two parts", {}, "slice"),
        ("joined", {}, "concatenate"),
        ("whole and by layer", {}, IN_A_LOOP),
        ("by index in a loop", {}, IN_A_LOOP),
    ],
)
def test_of_layers_the_reason_is_named(name: str, options: Any, reason: str | None):
    found = whole_gradients(*step_and_args(name, **options))
    assert [*found] == (ALL if reason else [])
    assert reason is None or reason in found["['layers']"]


def temporaries(program: Any, *args: Any) -> int:
    return program.lower(*args).compile().memory_analysis().temp_size_in_bytes


@on_new_jax
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
    (found,) = [*whole_gradients(step, state, x).values()] or [None]
    assert found is None if reason is None else reason in found

    def by_hand(carry: Any, x: Any) -> Any:
        params, sums, tokens = carry
        gradients, n = jax.grad(LOSSES[name], has_aux=True)(params, x)
        sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)
        return (params, sums, tokens + n), None

    def window_by_hand(params: Any, x: Any) -> Any:
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
        (_, sums, n), _ = jax.lax.scan(by_hand, (params, sums, 0), x)
        return jax.tree.map(lambda p, s: p - (s / n).astype(p.dtype), params, sums)

    if in_window:
        hand, given, ours = window_by_hand, state.params, step
    else:
        given = state.params, state.opt_state.grad_sums, 0
        hand, ours = by_hand, step.accumulate
    needed = temporaries(jax.jit(hand, donate_argnums=0), given, x)
    saved = needed - temporaries(ours, state, x)
    saved /= state.params["layers"].nbytes
    assert abs(saved) < 0.01 if reason else saved > 0.4


@on_new_jax
@pytest.mark.parametrize("network", [by_index, shared])
def test_layers_that_are_large_and_given_whole_to_a_loop_are_not_named(
    monkeypatch: pytest.MonkeyPatch, network: Any
):
    monkeypatch.setattr(perturbations, "LARGE", 100)
    step = make_train_step(loss_of(network), SGD)
    assert whole_gradients(step, step.init(PARAMS), X) == {}


@on_new_jax
def test_the_switch_that_adds_every_gradient_after(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPTAX_TOKENACCUM_ADD_AFTER", "1")
    found = whole_gradients(*step_and_args("as they are"))
    assert [*found] == ALL
    assert "OPTAX_TOKENACCUM_ADD_AFTER=1" in found["['layers']"]


def test_every_way_in_after_it_was_traced_and_from_shapes():
    step, state, _ = step_and_args("doubled")
    own = jax.jit(window_value_and_grad(LOSSES["doubled"]))
    own(PARAMS, XS)
    for _ in range(2):
        found = [
            whole_gradients(own, PARAMS, XS),
            whole_gradients(own, *jax.eval_shape(lambda: (PARAMS, XS))),
            whole_gradients(step.accumulate, state, X),
            whole_gradients(*step_and_args("doubled", in_window=True)),
        ]
        assert all("['layers']" in reasons for reasons in found)
        assert all(reasons == found[0] for reasons in found)
    # Asking leaves nothing behind: the next call runs the program that is there.
    np.testing.assert_array_equal(own(PARAMS, XS)[0][0], own(PARAMS, XS)[0][0])
    with pytest.raises(ValueError, match="must give this library a loss"):
        whole_gradients(lambda x: x, X)
    own = jax.vmap(window_value_and_grad(LOSSES["as they are"]), (None, 0))
    assert [*whole_gradients(own, PARAMS, jnp.stack([XS, XS]))] == ALL


@on_new_jax
@pytest.mark.parametrize(("axis", "spread"), [(0, 0), (1, 0), (1, 1)])
def test_layers_whose_stacked_axis_is_spread_are_named(axis: int, spread: int):
    """A step looks at its state; the types of a `jit` do not tell."""
    loss_fn = LOSSES["along axis 1" if axis else "as they are"]
    mesh, specs = make_mesh((8,)), {"layers": P(*[None] * spread, "data"), "scale": P()}
    shardings = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    params = jax.device_put(TURNED if axis else PARAMS, shardings)
    step = make_window_step(loss_fn, SGD)
    of_step = whole_gradients(step, step.init(params), XS)
    assert [*of_step] == (ALL if spread == axis else [])
    # The step adds these gradients whole, as by hand, and so gathers no sum.
    assert all("first axis" in reason for reason in of_step.values())
