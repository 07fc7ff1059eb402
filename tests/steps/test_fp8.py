"""Flax's 8-bit floats: scales are overwritten once per window, as by a full batch."""

from collections.abc import Callable
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp

from optax_tokenaccum import (
    audit,
    make_train_step,
    make_window_step,
    regroup_sums,
    token_accumulation,
    window_value_and_grad,
)
from optax_tokenaccum.linen import TrainState

K, ROWS, WINDOWS = 2, 8, 3
# Stateless, because each window is compared from where the last one ended. The loss is
# linear, because rounding to 8 bits would amplify float32 rounding differences.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)
)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, dot_general_cls=lambda: Fp8DirectDotGeneralOp(4))(x)


MODEL = Model()
PARAMS = MODEL.init(jax.random.key(0), jnp.ones((1, 16)))


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    losses = MODEL.apply(params, batch["x"]) * batch["y"]
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def make_window(seed: int) -> list[Any]:
    """Return micro-batches of unequal counts; the first has the largest inputs."""
    rng = np.random.default_rng(seed)
    return [
        {
            "x": np.float32(rng.normal(size=(ROWS, 16)) * (K - i)),
            "y": np.float32(rng.normal(size=(ROWS, 4))),
            "mask": np.float32(rng.uniform(size=(ROWS, 4)) < (i + 1) / K / 2),
        }
        for i in range(K)
    ]


DATA = [make_window(seed) for seed in range(WINDOWS)]


def joined(window: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *window)


def scales(params: Any) -> Any:
    return params[OVERWRITE_WITH_GRADIENT]


def without_scales(tree: Any) -> Any:
    return {"params": tree["params"]}


@jax.jit
def full_batch(params: Any, batch: Any) -> Any:
    """A step of flax's own `TrainState` on the whole batch."""
    gradient, n = jax.grad(loss_fn, has_aux=True)(params, batch)
    mean = jax.tree.map(lambda g: g / n, without_scales(gradient))
    trained = without_scales(params)
    updates, _ = OPTIMIZER.update(mean, OPTIMIZER.init(trained), trained)
    moved = optax.apply_updates(trained, updates)
    return moved | {OVERWRITE_WITH_GRADIENT: scales(gradient)}


def train_step(schedule: Any = K, **options: Any) -> Any:
    step = make_train_step(loss_fn, OPTIMIZER, schedule, **options)

    def run(window: list[Any], params: Any = PARAMS) -> Any:
        state = step.init(params)
        for batch in window:
            state, _ = step(state, batch)
        return state.params

    return run


def window_step(**options: Any) -> Any:
    step = make_window_step(loss_fn, OPTIMIZER, **options)

    def run(window: list[Any], params: Any = PARAMS) -> Any:
        stacked = helpers.stack(window)
        state, _ = step(step.init(params), stacked)
        return state.params

    return run


def linen_state() -> Any:
    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        gradient, n = jax.grad(loss_fn, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads=gradient, num_tokens=n)

    tx = token_accumulation(OPTIMIZER, K)

    def run(window: list[Any], params: Any = PARAMS) -> Any:
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        for batch in window:
            state = step(state, batch)
        return state.params

    return run


SKIPS: dict[str, Any] = {"should_skip_update_fn": optax.skip_not_finite}
NARROW: dict[str, Any] = {"accumulator_dtype": jnp.bfloat16}
OVER = {"mesh": meshes.make_mesh((8,)), "data_axes": "data"}
OVER_EXPLICIT = OVER | {"mesh": meshes.make_mesh((8,), "explicit")}
EACH: dict[str, Any] = {"reduce_every": "micro_batch"}
WAYS: dict[str, Callable[[], Any]] = {
    "two programs": train_step,
    "one program": lambda: train_step(lambda _: K),
    "skips": lambda: train_step(**SKIPS),
    "window": window_step,
    "linen": linen_state,
    "two programs, 8 devices": lambda: train_step(**OVER),
    "two programs, 8 devices, explicit": lambda: train_step(**OVER_EXPLICIT),
    "two programs, 8 devices, each": lambda: train_step(**OVER, **EACH),
    "window, 8 devices": lambda: window_step(**OVER),
    "window, 8 devices, each": lambda: window_step(**OVER, **EACH),
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_windows_are_the_full_batches(make: Any):
    run, params = make(), PARAMS
    for window in DATA:
        expected = full_batch(params, joined(window))
        params = jax.device_get(run(window, params))
        chex.assert_trees_all_equal_shapes_and_dtypes(params, expected)
        chex.assert_trees_all_close(
            params, expected, rtol=helpers.RTOL["float32"], atol=1e-7
        )


def test_the_last_micro_batch_and_the_sum_differ_from_the_full_batch():
    ones = [jax.grad(loss_fn, has_aux=True)(PARAMS, batch)[0] for batch in DATA[0]]
    of_all, _ = jax.grad(loss_fn, has_aux=True)(PARAMS, joined(DATA[0]))
    naive = ones[-1], jax.tree.map(lambda *xs: sum(xs), *ones)
    for tree in naive:
        assert helpers.relative_error(scales(tree), scales(of_all)) > 0.1


def test_sums_that_are_narrow_leave_the_scales_as_wide_as_they_are():
    chex.assert_trees_all_equal(
        *(scales(train_step(**kind)(DATA[0])) for kind in (NARROW, {}))
    )


@pytest.mark.parametrize("options", [{}, OVER], ids=["one device", "8 devices"])
def test_what_adds_nothing_leaves_no_trace_in_the_scales(options: Any):
    """A rejected micro-batch, and one without tokens, both with NaN activations."""
    window = DATA[0]
    rejected = window[0] | {"x": np.full_like(window[0]["x"], np.nan)}
    empty = rejected | {"mask": np.zeros_like(rejected["mask"])}
    skipping = train_step(**SKIPS, **options)
    clean = scales(skipping(window))
    chex.assert_tree_all_finite(clean)
    chex.assert_trees_all_equal(scales(skipping([rejected, *window])), clean)
    counts = train_step(K + 1, **options)
    chex.assert_trees_all_equal(scales(counts([empty, *window])), clean)
    nothing = train_step(1, **options)([empty])
    chex.assert_trees_all_equal(nothing, PARAMS)


def test_a_skip_function_is_not_shown_the_scales():
    def skips_large_scales(updates: Any, gradient_step: Any, params: Any) -> Any:
        return optax.tree.norm(scales(updates)) > 0, ()

    got = train_step(should_skip_update_fn=skips_large_scales)(DATA[0])
    chex.assert_trees_all_equal(got, train_step()(DATA[0]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 4])
def test_an_open_window_goes_on_with_fewer_devices(count: int):
    mesh = jax.sharding.Mesh(jax.devices()[:count], "data")
    fewer = {"mesh": mesh, "data_axes": "data"} if count > 1 else {}
    many, few = (
        make_train_step(loss_fn, OPTIMIZER, K, **over) for over in (OVER, fewer)
    )
    state, _ = many(many.init(PARAMS), DATA[0][0])
    state = regroup_sums(jax.device_get(state), few.init(PARAMS))
    rest = jax.tree.map(
        lambda x: np.resize(x, (count * ROWS, *x.shape[1:])), DATA[0][1]
    )
    rest["mask"][ROWS:] = 0
    state, metrics = few(state, rest)
    assert metrics.updated
    chex.assert_trees_all_close(
        state.params, train_step()(DATA[0]), rtol=helpers.RTOL["float32"], atol=1e-7
    )


def test_window_value_and_grad_returns_what_comes_next():
    stacked = helpers.stack(DATA[0])
    _, gradient = jax.jit(window_value_and_grad(loss_fn))(PARAMS, stacked)
    of_all, _ = jax.grad(loss_fn, has_aux=True)(PARAMS, joined(DATA[0]))
    chex.assert_trees_all_close(scales(gradient), scales(of_all), rtol=1e-6)


@pytest.mark.parametrize(("multiple", "verdict"), [(1, "EXACT"), (2, "UNKNOWN")])
@pytest.mark.slow
def test_the_audit_does_not_take_scales_for_parameters(multiple: int, verdict: str):
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        step = make_train_step(
            lambda *args: (multiple * loss_fn(*args)[0], loss_fn(*args)[1]),
            optimizer,
            len(micro_batches),
        )
        state = step.init(params)
        for batch in micro_batches:
            state, _ = step(state, batch)
        return state.params

    assert audit(run, loss_fn, PARAMS, DATA[0]).verdict.name == verdict
