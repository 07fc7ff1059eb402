"""When a window of the transformation closes, and what its members are given.

That its update is exact is in test_promises.py.
"""

import sys
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
import problems
import pytest
from flax import nnx
from helpers import PARAMS, SKIPS, grads

from optax_tokenaccum import (
    MultiSteps,
    close_window,
    has_updated,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_gradient,
)

SGD = optax.sgd(1.0)
FINITE = "num_tokens must be finite and >= 0"


def new(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    optimizer = token_accumulation(*args, **kwargs)
    return optimizer, optimizer.init(PARAMS)


def tell(g: Any, _: Any, params: Any = None, *, value, grad, num_tokens, other) -> Any:
    """An update whose state is what it was given."""
    assert other == "as it is"
    return g, jnp.stack([g["b"], value, grad["b"], num_tokens])


@pytest.mark.parametrize("gradients", ["sum", "mean"])
@pytest.mark.parametrize("k", [2, 3])
def test_inner_is_given_the_means_of_the_window(gradients: Any, k: int):
    """`value` and `grad` are sums or means like the gradients, for line searches."""
    inner = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(4), tell)
    optimizer, state = new(inner, k, gradients=gradients)
    extra: dict[str, Any] = {"other": "as it is"}
    for mean, n in [(2.0, 1), (10.0, 9)]:
        given = mean * n if gradients == "sum" else mean
        extra |= {"value": 2 * given, "grad": grads(given)}
        _, state = optimizer.update(grads(given), state, PARAMS, num_tokens=n, **extra)
    if k == 3:  # closed early, it has the value of its micro-batches
        del extra["value"]
        _, state = close_window(optimizer, state, PARAMS, **extra)
    np.testing.assert_allclose(state.inner_opt_state, (9.2, 18.4, 9.2, 10.0), rtol=1e-6)


TWO, TEN = jnp.int32(2), jnp.float32(10)  # known inside a trace, too


@pytest.mark.parametrize(
    ("schedule", "counts", "expected"),
    [
        ({"every_k_schedule": lambda i: jnp.where(i < 2, 1, 3)}, [1] * 8, "11001001"),
        ({"every_k_schedule": lambda _: TWO}, [1] * 4, "0101"),
        ({"every_n_tokens": 10}, [4, 5, 1, 12, 9, 0, 3], "0011001"),
        ({"every_n_tokens": np.int64(10)}, [4, 5, 1, 12], "0011"),
        ({"every_n_tokens": lambda i: 10 + i}, [4, 5, 1, 12, 9, 0, 3], "0011001"),
        ({"every_n_tokens": lambda _: TEN}, [4, 5, 1, 12], "0011"),
        ({"every_k_schedule": sys.maxsize}, [1e9] * 3, "000"),
        ({"every_n_tokens": 10**12}, [1e9] * 3, "000"),
        ({"every_k_schedule": lambda i: np.int64(2**40)}, [1e9] * 3, "000"),
        ({"every_n_tokens": lambda i: np.uint64(2**63)}, [1e9] * 3, "000"),
    ],
)
def test_windows_close_as_scheduled(schedule: Any, counts: Any, expected: str):
    optimizer, state = new(SGD, **schedule)
    update = jax.jit(optimizer.update)
    for n, closes in zip(counts, map(int, expected), strict=True):
        updates, state = update(grads(2.0 * n), state, PARAMS, num_tokens=n)
        assert has_updated(state) == closes
        chex.assert_trees_all_equal(updates, grads(-2.0 * closes))
    _, state = close_window(optimizer, state, PARAMS)
    assert has_updated(state) == (expected[-1] == "0")


@pytest.mark.parametrize("flag", [bool, jnp.asarray], ids=["python", "traced"])
def test_close_window_closes_and_its_false_never_postpones(flag: Any):
    optimizer, state = new(SGD, 2, **SKIPS)
    update = jax.jit(optimizer.update) if flag is jnp.asarray else optimizer.update
    closed = []
    for scale, ask in [(6, 0), (6, 0), (6, 1), (6, 0), (np.nan, 1), (6, 0), (6, 0)]:
        updates, state = update(
            grads(scale), state, PARAMS, num_tokens=3, close_window=flag(bool(ask))
        )
        closed.append(bool(has_updated(state)))
        chex.assert_trees_all_equal(updates, grads(-2.0 if closed[-1] else 0.0))
    # A rejected micro-batch closes the window with what is there.
    assert closed == [False, True, True, False, True, False, True]


def test_without_a_schedule_the_caller_closes_and_a_count_is_any_number():
    optimizer, state = new(SGD)
    for n in (2, 2.0, np.int64(2), np.float32(2), jnp.asarray(2)):
        for close in (False, True):
            updates, state = optimizer.update(
                grads(4.0), state, PARAMS, num_tokens=n, close_window=close
            )
            chex.assert_trees_all_equal(updates, grads(-2.0 * close))
    with pytest.raises(ValueError, match="or close_window to every update"):
        optimizer.update(grads(4.0), state, PARAMS, num_tokens=2)


def test_impossible_count_raises_concrete_and_adds_nothing_traced():
    optimizer, start = new(SGD, 3)
    update = jax.jit(optimizer.update)
    for count in (-1, np.nan, np.inf, -np.inf, 1e39):
        with pytest.raises(ValueError, match=FINITE):
            optimizer.update(grads(1.0), start, PARAMS, num_tokens=count)
        with np.errstate(over="ignore"):
            known = jnp.float32(count)  # inside a trace, too
        with pytest.raises(ValueError, match=FINITE):
            jax.jit(lambda n=known: optimizer.update(PARAMS, start, num_tokens=n))()
        counts = 1.0, float(count), 2.0
        micro_batches = list(zip(map(grads, (2.0, 7.0, 4.0)), counts, strict=True))
        params, _ = helpers.run_window(update, start, PARAMS, micro_batches)
        chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p - 2.0, PARAMS))


def test_rejected_micro_batch_never_happened():
    optimizer, start = new(optax.adam(0.1), 2, gradients="mean", **SKIPS)
    update = jax.jit(optimizer.update)
    good = [(grads(float(i + 1)), i + 1) for i in range(4)]
    clean = helpers.run_window(update, start, PARAMS, good)
    of_last_call = {"skip_state": (), "has_updated": ()}
    for position in range(5):
        spoilt = [*good[:position], (grads(np.nan), 5), *good[position:]]
        params, state = helpers.run_window(update, start, PARAMS, spoilt)
        chex.assert_trees_all_equal(params, clean[0])
        both = [x._replace(**of_last_call) for x in (state, clean[1])]
        chex.assert_trees_all_equal(*both)


def test_skip_function_sees_the_mean_and_is_not_asked_without_tokens():
    """A threshold on the norm means the same for 1 token and for 100."""
    seen: list[float] = []

    def skip(updates: Any, gradient_step: Any, params: Any) -> Any:
        seen.append(float(updates["b"]))
        return updates["b"] > 5.0, updates["b"]

    optimizer, state = new(SGD, 9, should_skip_update_fn=skip)
    for scale, n in [(3.0, 1), (300.0, 100), (60.0, 10), (99.0, 0)]:
        _, state = optimizer.update(grads(scale), state, PARAMS, num_tokens=n)
    assert seen[1:4] == [3.0, 3.0, 6.0]
    assert int(state.mini_step) == 3  # the third was rejected; the fourth counts
    assert float(state.skip_state.of_function) == 6.0  # kept from the third
    assert int(state.skip_state.rejected) == 1


def test_close_window_of_a_chain_without_and_with_micro_batches():
    optimizer = optax.chain(token_accumulation(SGD, 8))
    close = jax.jit(lambda state, params: close_window(optimizer, state, params))
    state = optimizer.init(PARAMS)
    for n, mean in ((0, 0.0), (9, 10.0), (0, 0.0)):
        if n:
            _, state = optimizer.update(grads(n * mean), state, PARAMS, num_tokens=n)
        updates, state = close(state, PARAMS)
        chex.assert_trees_all_equal(updates, grads(-mean))
        deep = {"a": [state, optax.adam(0.1).init(PARAMS)]}
        assert has_updated(state) == has_updated(deep) == (n > 0)


def test_window_gradient_of_states_without_an_open_window():
    of_window = make_window_step(problems.linear_loss, SGD).init(problems.PARAMS)
    over_8 = make_train_step(problems.linear_loss, SGD, 4, **meshes.over("8"))
    of_devices = over_8.init(problems.PARAMS).opt_state
    of_several = jax.vmap(token_accumulation(SGD, 2).init)(jnp.ones((3, 3)))
    for message, state in (
        ("got 0 in a", SGD.init(PARAMS)),
        ("in the function that is mapped over them", of_several),
        ("got 0 in a StepState", of_window),
        ("may be of each device", of_devices),  # whose sums are of each device
    ):
        with pytest.raises(ValueError, match=message):
            window_gradient(state)
    none_yet = window_gradient(token_accumulation(SGD, 2).init(jnp.ones(3)))
    np.testing.assert_array_equal(none_yet, np.zeros(3))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("way", ["two programs", "nnx two programs"])
def test_window_gradient_has_the_shapes_of_the_parameters_on_every_mesh(
    way: str, devices: int
):
    mesh = meshes.make_mesh((devices,))
    step = meshes.make_step(way, SGD, mesh, loss_fn=problems.linear_loss, k=4)
    batch = problems.batch_of(0, [1.0] * 8)
    state, _ = step(step.init(problems.PARAMS), batch)
    expected = problems.exact(problems.PARAMS, batch)
    found = [window_gradient(state.opt_state, state.params)]
    if way in nnx_ways.WAYS:
        given = state.optimizer.opt_state, nnx.state(state.model, nnx.Param)
        found.append(window_gradient(*given))
        assert not has_updated(state.optimizer.opt_state)
    else:
        found.append(window_gradient(state))
        with pytest.raises(ValueError, match="may be of each device"):
            window_gradient(state.opt_state)
    for gradient in found:
        got, wanted = (jax.tree.leaves(x) for x in (gradient, expected))
        chex.assert_trees_all_equal_shapes(got, wanted)
        chex.assert_trees_all_close(got, wanted, rtol=1e-5)


def test_nothing_is_infinite_or_nan_where_jax_looks_for_it():
    """Outside of a jit, jax checks the result of each operation."""
    with jax.debug_nans(True), jax.debug_infs(True):
        optimizer = MultiSteps(SGD, 2)
        state = optimizer.init(PARAMS)
        for _ in range(2):
            _, state = optimizer.update(grads(1.0), state, PARAMS, num_tokens=3)
        window_gradient(state)
        close_window(optimizer, state, PARAMS)


def test_window_gradient_of_an_accumulation_of_some_parameters():
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    inner = {"some": token_accumulation(SGD, 2), "none": optax.set_to_zero()}
    tx = optax.partition(inner, {"a": "none", "b": "some"})
    _, state = tx.update(params, tx.init(params), params, num_tokens=4)
    [gradient] = jax.tree.leaves(window_gradient(state, params))
    np.testing.assert_array_equal(gradient, np.full((2, 2), 0.25))
