"""The transformation under `shard_map`, `pmap`, `vmap`, with sums per device."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import TokenAccumulationState, close_window, token_accumulation
from optax_tokenaccum._core.trees import as_varying
from optax_tokenaccum.compiled import collectives

DEVICES = 8
SGD = optax.sgd(meshes.SCALE)
DATA, BOTH = ("data",), ("data", "model")
BATCH = meshes.make_batch(DEVICES)
STATE = TokenAccumulationState(P(), P(), P(), P("data"), P(), P(), P(), P())


def on_this_device(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    """The gradient of this device's rows, unless `shard_map` reduces it by itself."""
    return jax.value_and_grad(loss_fn, has_aux=True)(params, batch)


def of_varying(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    """The gradient of this device's rows, with no implicit reduction by `shard_map`."""
    params = jax.tree.map(lambda x: as_varying(x, names), params)
    return on_this_device(loss_fn, params, batch, names)


def with_all_tokens(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    (loss, n), grads = on_this_device(loss_fn, params, batch, names)
    return jax.lax.psum((loss, n), names), grads


def step_of(optimizer: Any, names: Any, of: Any, loss_fn: Any) -> Any:
    """Return a function that adds this device's rows of a micro-batch."""

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        (loss, n), grads = of(loss_fn, params, batch, names)
        updates, state = optimizer.update(
            grads, state, params, num_tokens=n, value=loss
        )
        return (optax.apply_updates(params, updates), state), state.acc_tokens

    return step


@pytest.mark.parametrize(
    ("names", "shape", "of", "loss_fn", "check_vma"),
    [
        (BOTH, (4, 2), of_varying, helpers.loss_mean_fn, True),
        helpers.slow(DATA, (8,), on_this_device, helpers.loss_mean_fn, False),
        (BOTH, (4, 2), on_this_device, helpers.loss_sum_fn, False),
        # Manual over the data axis only, beside tensor parallelism.
        helpers.slow(DATA, (4, 2), on_this_device, helpers.loss_sum_fn, False),
        # `jax.grad` adds up the gradients of replicated parameters, which count once.
        # The count with them is each device's own, or also already reduced.
        (DATA, (8,), on_this_device, helpers.loss_sum_fn, True),
        (DATA, (8,), with_all_tokens, helpers.loss_sum_fn, True),
    ],
)
def test_window_is_that_of_the_whole_batch(
    names: Any, shape: Any, of: Any, loss_fn: Any, check_vma: bool
):
    gradients = "mean" if loss_fn is helpers.loss_mean_fn else "sum"
    optimizer = token_accumulation(SGD, meshes.K, gradients=gradients, axis_name=names)
    step = step_of(optimizer, names, of, loss_fn)

    def window(params: Any, micro_batches: Any) -> Any:
        carry = params, optimizer.init(params)
        (params, _), tokens = jax.lax.scan(step, carry, micro_batches)
        return params, tokens

    mesh, is_split = meshes.make_mesh(shape), names is DATA and len(shape) == 2
    options = {"axis_names": {*names}, "check_vma": check_vma}
    specs = {"in_specs": (P(), P(None, names)), "out_specs": P()}
    run = jax.shard_map(window, mesh=mesh, **specs, **options)
    params = meshes.placed(mesh, meshes.TENSOR_PARALLEL if is_split else meshes.WHOLE)
    after, tokens = jax.jit(run)(params, meshes.stacked(BATCH))
    assert helpers.relative_error(meshes.applied(after), meshes.exact(DEVICES)) < 2e-6
    assert tokens[-1] == BATCH["mask"].sum()


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_state_lives_between_calls_and_rejection_anywhere_is_everywhere(gradients: Any):
    """With a scalar parameter, which has no axis to shard, and a token per device."""
    optimizer = token_accumulation(
        optax.sgd(1.0), 3, gradients=gradients, axis_name="data", **helpers.SKIPS
    )
    over = functools.partial(jax.shard_map, mesh=meshes.make_mesh((8,)))

    @jax.jit
    @functools.partial(over, in_specs=(P(), STATE, P("data")), out_specs=(P(), STATE))
    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p * x))(as_varying(params, ["data"]))
        n = jnp.sum(x != 0)
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(())
    state = jax.jit(over(optimizer.init, in_specs=P(), out_specs=STATE))(params)
    signature = helpers.signatures(state)
    first, second = np.array([[1, 0, 3, 0, 0, 7, 0, 2], [9] * 8], np.float32)
    bad = np.where(np.arange(8) == 2, np.inf, first)
    for x, mini_step in ((first, 1), (bad, 1), (second, 2)):
        params, state = step(params, state, x)
        assert not state.has_updated and params == 0 and state.mini_step == mini_step
        assert state.skip_state["should_skip"] == (x is bad)
        assert state.skip_state["num_not_finite"] == (x is bad)
        assert helpers.signatures(state) == signature
    np.testing.assert_array_equal(state.acc_grads, first + second)
    params, state = step(params, state, 0 * first)
    assert state.has_updated and params == -np.float32(13 + 72) / 12
    params, state = step(params, state, np.float32([0, 5] + [0] * 6))
    assert state.mini_step == 1 and state.acc_tokens == 1
    if gradients == "sum":
        closed = over(
            lambda params, state: close_window(optimizer, state, params),
            in_specs=(P(), STATE),
            out_specs=(P(), STATE),
        )
        updates, state = jax.jit(closed)(params, state)
        assert updates == -5 and state.mini_step == 0 and state.gradient_step == 2


@pytest.mark.parametrize("over", [jax.vmap, jax.pmap])
def test_token_budget_counts_all_devices(over: Any):
    """The state is created outside and replicated, as in loops around `pmap`."""
    optimizer = token_accumulation(optax.sgd(1.0), every_n_tokens=20, axis_name="i")

    def update(state: Any, n: Any) -> Any:
        return optimizer.update(3.0 * n, state, num_tokens=n)

    state = optimizer.init(jnp.zeros(()))
    state = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), state)
    step = over(update, axis_name="i")
    # On 8 devices: 12 tokens, then 24 in total; all devices close at the same time.
    for first, last, total, closes in (12, 0, 12, 0), (12, 0, 24, 1), (12, 30, 42, 1):
        updates, state = step(state, jnp.float32([first, *[0] * 6, last]))
        np.testing.assert_array_equal(state.acc_tokens, [total] * DEVICES)
        np.testing.assert_array_equal(state.has_updated, [closes] * DEVICES)
        np.testing.assert_array_equal(updates, [-3 * closes] * DEVICES)


def test_one_reduction_when_the_window_closes():
    optimizer = token_accumulation(optax.adamw(1e-3), meshes.K, axis_name="data")
    over = functools.partial(jax.shard_map, mesh=meshes.make_mesh((8,)))
    params = helpers.init_params(0)
    state = jax.eval_shape(over(optimizer.init, in_specs=P(), out_specs=STATE), params)

    def report(of: Any) -> Any:
        step, carry = step_of(optimizer, DATA, of, helpers.loss_sum_fn), (P(), STATE)
        mapped = over(step, in_specs=(carry, P("data")), out_specs=(carry, P()))
        return collectives(jax.jit(mapped).lower((params, state), BATCH).compile())

    gradient, sent = 4 * optax.tree.size(params), report(of_varying)
    assert sent.bytes(path="conditional") == gradient
    assert sent.bytes(path="always") < 100
    assert report(on_this_device).bytes(path="always") > gradient
