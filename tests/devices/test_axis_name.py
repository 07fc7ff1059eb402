"""The transformation under `shard_map`, `pmap`, `vmap`, with sums per device."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    cut,
    init_params,
    loss_mean_fn,
    loss_sum_fn,
    relative_error,
    signatures,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    LAYOUTS,
    SCALE,
    TYPES,
    K,
    applied,
    exact,
    make_batch,
    make_mesh,
    placed,
    stacked,
)

from optax_tokenaccum import (
    TokenAccumulationState,
    close_window,
    collectives,
    token_accumulation,
)

DEVICES = 8
SGD = optax.sgd(SCALE)
SHAPES = {("data",): (8,), ("data", "model"): (4, 2)}
BATCH = make_batch(DEVICES)
STATE = TokenAccumulationState(P(), P(), P(), P("data"), P(), P(), P(), P())


def mesh(names: tuple[str, ...] = ("data",)) -> jax.sharding.Mesh:
    return make_mesh(SHAPES[names])


def varying(params: Any, names: Any) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(params, names, to="varying")
    return jax.lax.pvary(params, names)


def gradient_of_each(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    """The gradient of this device's rows, with no implicit reduction by `shard_map`."""
    grad = jax.value_and_grad(loss_fn, has_aux=True)
    return grad(varying(params, names), batch)


def window(
    optimizer: Any, names: tuple[str, ...], of: Callable[..., Any], loss_fn: Any
) -> Any:
    """Return a function that runs a window on this device's rows."""

    def run(params: Any, micro_batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            params, state = carry
            (loss, n), grads = of(loss_fn, params, batch, names)
            updates, state = optimizer.update(
                grads, state, params, num_tokens=n, value=loss
            )
            return (optax.apply_updates(params, updates), state), state.acc_tokens

        carry = params, optimizer.init(params)
        (params, _), tokens = jax.lax.scan(body, carry, micro_batches)
        return params, tokens

    return run


def on_this_device(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    """The gradient of this device's rows, where autodiff inserts no reduction."""
    return jax.value_and_grad(loss_fn, has_aux=True)(params, batch)


@pytest.mark.parametrize("names", SHAPES, ids=len)
@pytest.mark.parametrize("of", [gradient_of_each, on_this_device])
@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_window_is_that_of_the_whole_batch(
    names: tuple[str, ...], of: Any, gradients: Any
):
    loss_fn = {"sum": loss_sum_fn, "mean": loss_mean_fn}[gradients]
    optimizer = token_accumulation(SGD, K, gradients=gradients, axis_name=names)
    run = jax.shard_map(
        window(optimizer, names, of, loss_fn),
        mesh=mesh(names),
        in_specs=(P(), P(None, names)),
        out_specs=P(),
        check_vma=of is gradient_of_each,
    )
    params = init_params(0)
    after, tokens = jax.jit(run)(params, stacked(BATCH))
    assert relative_error(applied(after), exact(DEVICES)) < 2e-6
    assert tokens[-1] == BATCH["mask"].sum()


@pytest.mark.parametrize("kind", TYPES)
def test_beside_tensor_parallelism(kind: str):
    """Manual over the data axis only; with Explicit axes, inside `auto_axes`."""
    shape, specs = LAYOUTS["tensor parallel"]
    on, batch = make_mesh(shape, kind), make_batch(shape[0])
    optimizer = token_accumulation(SGD, K, axis_name="data")
    is_explicit = kind == "explicit"
    run = jax.shard_map(
        window(optimizer, ("data",), on_this_device, loss_sum_fn),
        mesh=None if is_explicit else on,
        axis_names={"data"},
        in_specs=(P(), P(None, "data")),
        out_specs=P(),
        check_vma=False,
    )
    if is_explicit:
        where = {name: NamedSharding(on, spec) for name, spec in specs.items()}
        out = where, NamedSharding(on, P())
        run = jax.sharding.auto_axes(run, out_sharding=out)
    params = placed(on, specs)
    rows = jax.device_put(stacked(batch), NamedSharding(on, P(None, "data")))
    after, tokens = jax.jit(run)(params, rows)
    assert relative_error(applied(after), exact(shape[0])) < 2e-6
    assert tokens[-1] == batch["mask"].sum()


def with_all_tokens(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    (loss, n), grads = on_this_device(loss_fn, params, batch, names)
    return jax.lax.psum((loss, n), names), grads


@pytest.mark.parametrize("of", [on_this_device, with_all_tokens])
def test_gradients_that_were_reduced_already_count_once(of: Any):
    """`jax.grad` adds up the gradients of replicated parameters.

    The count that goes with them is each device's own, or also already reduced.
    """
    optimizer = token_accumulation(SGD, K, axis_name="data")
    run = jax.shard_map(
        window(optimizer, ("data",), of, loss_sum_fn),
        mesh=mesh(),
        in_specs=(P(), P(None, "data")),
        out_specs=P(),
    )
    params = init_params(0)
    after, tokens = jax.jit(run)(params, stacked(BATCH))
    assert relative_error(applied(after), exact(DEVICES)) < 2e-6
    assert tokens[-1] == BATCH["mask"].sum()


def test_state_lives_between_calls():
    """With a scalar parameter, which has no axis to shard."""
    optimizer = token_accumulation(optax.sgd(1.0), 3, axis_name="data")
    over = functools.partial(jax.shard_map, mesh=mesh())

    @jax.jit
    @functools.partial(
        over, in_specs=(P(), STATE, P("data")), out_specs=(P(), STATE, P())
    )
    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p * x))(varying(params, "data"))
        n = jnp.sum(x != 0)
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state, state.has_updated

    params = jnp.zeros(())
    state = jax.jit(over(optimizer.init, in_specs=P(), out_specs=STATE))(params)
    signature = signatures(state)
    rows = np.array([[1, 0, 3, 0, 0, 7, 0, 2], [9] * 8, [0] * 8, [0, 5] + [0] * 6], "f")
    for x in rows[:2]:
        params, state, updated = step(params, state, x)
        assert not updated and params == 0
        assert signatures(state) == signature
    np.testing.assert_array_equal(state.acc_grads, rows[0] + rows[1])
    params, state, updated = step(params, state, rows[2])
    assert updated and params == -np.float32(13 + 72) / 12
    params, state, _ = step(params, state, rows[3])
    assert state.mini_step == 1 and state.acc_tokens == 1
    closed = jax.jit(
        over(
            lambda params, state: close_window(optimizer, state, params),
            in_specs=(P(), STATE),
            out_specs=(P(), STATE),
        )
    )
    updates, state = closed(params, state)
    assert updates == -5 and state.mini_step == 0 and state.gradient_step == 2


def test_token_budget_counts_all_devices():
    optimizer = token_accumulation(optax.sgd(1.0), every_n_tokens=20, axis_name="i")

    def run(n: jax.Array) -> Any:
        def body(state: Any, n: Any) -> Any:
            _, state = optimizer.update(1.0 * n, state, num_tokens=n)
            return state, (state.has_updated, state.acc_tokens)

        return jax.lax.scan(body, optimizer.init(jnp.zeros(())), n)[1]

    # On 8 devices: 12 tokens, then 24 in total; all devices close at the same time.
    tokens = jnp.array([[12, 12, 12], *[[0, 0, 0]] * 6, [0, 0, 30]], jnp.float32)
    updated, counted = jax.vmap(run, axis_name="i")(tokens)
    np.testing.assert_array_equal(updated, [[False, True, True]] * 8)
    np.testing.assert_array_equal(counted, [[12, 24, 42]] * 8)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_rejection_anywhere_rejects_everywhere(gradients: Any):
    optimizer = token_accumulation(
        optax.sgd(1.0),
        2,
        gradients=gradients,
        should_skip_update_fn=optax.skip_not_finite,
        axis_name="data",
    )
    over = functools.partial(jax.shard_map, mesh=mesh())

    @jax.jit
    @functools.partial(over, in_specs=(P(), P(None, "data")), out_specs=(P(), P()))
    def run(params: Any, rows: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            params, state = carry
            mean = jnp.mean if gradients == "mean" else jnp.sum
            grads = jax.grad(lambda p: mean(p * x))(varying(params, "data"))
            n = varying(jnp.float32(x.size), "data")
            updates, state = optimizer.update(grads, state, params, num_tokens=n)
            record = state.skip_state | {"mini_step": state.mini_step}
            return (optax.apply_updates(params, updates), state), record

        carry, records = jax.lax.scan(body, (params, optimizer.init(params)), rows)
        return carry[0], records

    rows = np.ones((3, 16), np.float32)
    rows[1, 5] = np.inf  # only on device 2
    params, records = run(jnp.zeros(()), rows)
    np.testing.assert_array_equal(records["mini_step"], [1, 1, 0])
    np.testing.assert_array_equal(records["should_skip"], [False, True, False])
    np.testing.assert_array_equal(records["num_not_finite"], [0, 1, 0])
    assert params == -1


def test_pmap():
    """The state is created outside and replicated, as in loops around `pmap`."""
    optimizer = token_accumulation(SGD, K, axis_name="data")

    def step(params: Any, state: Any, batch: Any) -> Any:
        (_, n), grads = on_this_device(loss_sum_fn, params, batch, "data")
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state

    params = init_params(0)
    carry = jax.tree.map(
        lambda x: jnp.stack([x] * DEVICES), (params, optimizer.init(params))
    )
    run = jax.pmap(step, axis_name="data")
    for part in cut(BATCH, K):
        rows = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), part)
        carry = run(*carry, rows)
    for device in range(DEVICES):
        after = jax.tree.map(operator.itemgetter(device), carry[0])
        assert relative_error(applied(after), exact(DEVICES)) < 2e-6


def test_one_reduction_when_the_window_closes():
    optimizer = token_accumulation(optax.adamw(1e-3), K, axis_name="data")
    params = init_params(0)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (_, n), grads = gradient_of_each(loss_sum_fn, params, batch, "data")
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state

    def naive(params: Any, state: Any, batch: Any) -> Any:
        (_, n), grads = on_this_device(loss_sum_fn, params, batch, "data")
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state

    def report(step: Any) -> Any:
        over = functools.partial(jax.shard_map, mesh=mesh())
        init = over(optimizer.init, in_specs=P(), out_specs=STATE)
        mapped = over(step, in_specs=(P(), STATE, P("data")), out_specs=(P(), STATE))
        state = jax.eval_shape(init, params)
        return collectives(jax.jit(mapped).lower(params, state, BATCH).compile())

    gradient = 4 * optax.tree.size(params)
    assert report(step).bytes(path="conditional") == gradient
    assert report(step).bytes(path="always") < 100
    assert report(naive).bytes(path="always") > gradient


@pytest.mark.parametrize(
    ("axis_name", "kind"), [(0, TypeError), ((), ValueError), (("a", "a"), ValueError)]
)
def test_axis_name_that_names_no_axes(axis_name: Any, kind: type[Exception]):
    with pytest.raises(kind, match="axis_name must be the name of a mesh axis"):
        token_accumulation(optax.sgd(1.0), 2, axis_name=axis_name)
