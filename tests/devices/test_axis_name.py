"""The transformation under `shard_map`, `pmap`, `vmap`, with sums per device."""

import functools
import operator
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
DATA, BOTH = ("data",), ("data", "model")
BATCH = make_batch(DEVICES)
STATE = TokenAccumulationState(P(), P(), P(), P("data"), P(), P(), P(), P())


def varying(params: Any, names: Any) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(params, names, to="varying")
    return jax.lax.pvary(params, names)


def on_this_device(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    """The gradient of this device's rows, unless `shard_map` reduces it by itself."""
    return jax.value_and_grad(loss_fn, has_aux=True)(params, batch)


def of_varying(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    """The gradient of this device's rows, with no implicit reduction by `shard_map`."""
    return on_this_device(loss_fn, varying(params, names), batch, names)


def with_all_tokens(loss_fn: Any, params: Any, batch: Any, names: Any) -> Any:
    (loss, n), grads = on_this_device(loss_fn, params, batch, names)
    return jax.lax.psum((loss, n), names), grads


def window(optimizer: Any, names: Any, of: Any, loss_fn: Any) -> Any:
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


@pytest.mark.parametrize(
    ("names", "of", "loss_fn", "check_vma"),
    [
        (DATA, of_varying, loss_sum_fn, True),
        (BOTH, of_varying, loss_mean_fn, True),
        (DATA, on_this_device, loss_mean_fn, False),
        (BOTH, on_this_device, loss_sum_fn, False),
        # `jax.grad` adds up the gradients of replicated parameters, which count once.
        # The count with them is each device's own, or also already reduced.
        (DATA, on_this_device, loss_sum_fn, True),
        (DATA, with_all_tokens, loss_sum_fn, True),
    ],
)
def test_window_is_that_of_the_whole_batch(
    names: Any, of: Any, loss_fn: Any, check_vma: bool
):
    gradients = "mean" if loss_fn is loss_mean_fn else "sum"
    optimizer = token_accumulation(SGD, K, gradients=gradients, axis_name=names)
    run = jax.shard_map(
        window(optimizer, names, of, loss_fn),
        mesh=make_mesh((8,) if names is DATA else (4, 2)),
        in_specs=(P(), P(None, names)),
        out_specs=P(),
        check_vma=check_vma,
    )
    after, tokens = jax.jit(run)(init_params(0), stacked(BATCH))
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
        window(optimizer, DATA, on_this_device, loss_sum_fn),
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


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_state_lives_between_calls_and_rejection_anywhere_is_everywhere(gradients: Any):
    """With a scalar parameter, which has no axis to shard, and a token per device."""
    optimizer = token_accumulation(
        optax.sgd(1.0),
        3,
        gradients=gradients,
        should_skip_update_fn=optax.skip_not_finite,
        axis_name="data",
    )
    over = functools.partial(jax.shard_map, mesh=make_mesh((8,)))

    @jax.jit
    @functools.partial(over, in_specs=(P(), STATE, P("data")), out_specs=(P(), STATE))
    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p * x))(varying(params, "data"))
        n = jnp.sum(x != 0)
        updates, state = optimizer.update(grads, state, params, num_tokens=n)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(())
    state = jax.jit(over(optimizer.init, in_specs=P(), out_specs=STATE))(params)
    signature = signatures(state)
    first, second = np.array([[1, 0, 3, 0, 0, 7, 0, 2], [9] * 8], np.float32)
    bad = np.where(np.arange(8) == 2, np.inf, first)
    for x, mini_step in ((first, 1), (bad, 1), (second, 2)):
        params, state = step(params, state, x)
        assert not state.has_updated and params == 0 and state.mini_step == mini_step
        assert state.skip_state["should_skip"] == (x is bad)
        assert state.skip_state["num_not_finite"] == (x is bad)
        assert signatures(state) == signature
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
    over = functools.partial(jax.shard_map, mesh=make_mesh((8,)))
    params, init = init_params(0), over(optimizer.init, in_specs=P(), out_specs=STATE)
    state = jax.eval_shape(init, params)

    def report(of: Any) -> Any:
        def step(params: Any, state: Any, batch: Any) -> Any:
            (_, n), grads = of(loss_sum_fn, params, batch, "data")
            updates, state = optimizer.update(grads, state, params, num_tokens=n)
            return optax.apply_updates(params, updates), state

        mapped = over(step, in_specs=(P(), STATE, P("data")), out_specs=(P(), STATE))
        return collectives(jax.jit(mapped).lower(params, state, BATCH).compile())

    gradient, sent = 4 * optax.tree.size(params), report(of_varying)
    assert sent.bytes(path="conditional") == gradient
    assert sent.bytes(path="always") < 100
    assert report(on_this_device).bytes(path="always") > gradient


@pytest.mark.parametrize(
    ("axis_name", "kind"), [(0, TypeError), ((), ValueError), (("a", "a"), ValueError)]
)
def test_axis_name_that_names_no_axes(axis_name: Any, kind: type[Exception]):
    with pytest.raises(kind, match="axis_name must be the name of a mesh axis"):
        token_accumulation(optax.sgd(1.0), 2, axis_name=axis_name)
