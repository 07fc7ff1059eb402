"""Every optax optimizer: bare on full batches, and wrapped on ragged micro-batches.

Gradients, counts and losses are chosen so that every sum and mean over a window is
exact in float32: the wrapped optimizer must receive the same bits as the bare one.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_windows import (
    COUNTS,
    GRADS,
    LOSS_SUMS,
    SHAPES,
    WINDOW_GRADS,
    WINDOW_VALUES,
    WINDOWS,
    K,
    cast,
    eighths,
    windows,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizers import (
    ARGUMENTS,
    DTYPES,
    ENLARGE_ROUNDING,
    EXTRA_ARGS,
    KNOWN,
    MIXED,
    PER_EXAMPLE,
    find_optimizers,
    make_optimizer,
)

from optax_tokenaccum import MultiSteps, make_train_step, token_accumulation

pytestmark = pytest.mark.slow

OPTIMIZERS = find_optimizers()
CASES = [
    pytest.param(name, dtypes, id="-".join((name, *dtypes)))
    for name in OPTIMIZERS
    if name not in PER_EXAMPLE
    for dtypes in DTYPES.get(name, [MIXED])
]

SPECS = {"matrix": PartitionSpec("data"), "vector": PartitionSpec()}


def watched(inner: Any, calls: list[Any]) -> optax.GradientTransformationExtraArgs:
    """Return `inner` with a callback that records each value and gradient it gets."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        jax.debug.callback(lambda *call: calls.append(call), extra["value"], updates)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def extra_args(name: str, grad: Any, value: Any, at: Any) -> dict[str, Any]:
    """Extra arguments of the optimizer, for a parabola with this value and gradient."""

    def value_fn(params: Any) -> jax.Array:
        steps = jax.tree.map(lambda p, q: (p - q).astype(jnp.float32), params, at)
        return value + optax.tree.vdot(grad, steps) + optax.tree.vdot(steps, steps) / 2

    available = {"grad": grad, "value_fn": value_fn, "obj_fn": value_fn}
    return {key: available[key] for key in EXTRA_ARGS.get(name, ())}


def make_program(name: str, inner: Any, optimizer: Any) -> Callable[..., Any]:
    """Scan over windows, each once through `inner` and cut through `optimizer`.

    Both start from the state that `optimizer` reached in the previous window, so
    that rounding differences do not grow from one window to the next.
    """

    def run_window(carry: Any, window: Any) -> Any:
        (params, state), grads, value = carry, window["grads"], window["value"]
        extra = extra_args(name, grads, value, params)
        inner_state = state.inner_opt_state
        updates, new = inner.update(grads, inner_state, params, value=value, **extra)
        # Some optimizers return dtypes that differ from those of `init`.
        new = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), new, inner_state)
        expected = (updates, new)

        def run_micro_batch(carry: Any, x: Any) -> Any:
            params, state = carry
            # The objective of a window is known only at its closing call.
            grad = jax.tree.map(lambda g: jnp.where(x["closes"], g, jnp.nan), grads)
            extra = extra_args(name, grad, value, params)
            if "grad" in extra:
                extra["grad"] = x["grads"]
            update = functools.partial(
                optimizer.update,
                x["grads"],
                state,
                params,
                num_tokens=x["num_tokens"],
                value=x["loss_sum"],
                **extra,
            )

            def leave() -> Any:
                shapes, _ = jax.eval_shape(update)
                return jax.tree.map(
                    lambda s: jnp.zeros(s.shape, s.dtype), shapes
                ), state

            updates, state = jax.lax.cond(x["is_there"], update, leave)
            return (optax.apply_updates(params, updates), state), updates

        carry, updates = jax.lax.scan(run_micro_batch, carry, window["micro_batches"])
        return carry, ((updates, carry[1].inner_opt_state), expected)

    return lambda carry, windows: jax.lax.scan(run_window, carry, windows)


def assert_close(got: Any, expected: Any, beside: Any = None) -> None:
    """Compare leaves: equal dtypes and integers, floats within `helpers.RTOL`.

    Errors are relative to `beside` if given, for example to the parameters that
    updates are added to.
    """

    def compare(path: Any, x: Any, y: Any, z: Any) -> None:
        where = jax.tree_util.keystr(path)
        assert x.dtype == y.dtype, where
        if not jnp.issubdtype(x.dtype, jnp.floating):
            x, y = map(optax.tree.unwrap_random_key_data, (x, y))
            np.testing.assert_array_equal(x, y, where)
        else:
            x64, y64, z64 = (np.asarray(a, np.float64) for a in (x, y, z))
            # Equal infinities agree, like an initial best loss.
            zeros = np.zeros_like(y64)
            error = np.subtract(x64, y64, out=zeros, where=x64 != y64)
            error, norm = map(np.linalg.norm, (error, z64[np.isfinite(z64)]))
            assert error <= helpers.RTOL[str(x.dtype)] * norm, (where, error, norm)

    beside = expected if beside is None else beside
    jax.tree_util.tree_map_with_path(compare, got, expected, beside)


def assert_ran_once_a_window(calls: list[Any], dtypes: tuple[str, str]) -> None:
    """Check that `inner` ran once per window, with the exact mean gradient, value."""
    jax.effects_barrier()
    assert len(calls) == WINDOWS
    # Callbacks may arrive in any order.
    values, grads = zip(*sorted(calls, key=lambda call: float(call[0])), strict=True)
    order = np.argsort(WINDOW_VALUES)
    np.testing.assert_array_equal(values, WINDOW_VALUES[order])
    grads = {name: np.stack([np.asarray(g[name]) for g in grads]) for name in SHAPES}
    windows = cast(WINDOW_GRADS, dtypes)
    chex.assert_trees_all_equal(grads, {name: g[order] for name, g in windows.items()})
    calls.clear()


def check_transformation(
    name: str, dtypes: tuple[str, str], inner: Any, params: dict[str, jax.Array]
) -> Any:
    """Run all windows twice; return parameters and inner state after the first run."""
    chex.clear_trace_counter()
    calls, results = [], []
    optimizer = token_accumulation(watched(inner, calls), K)
    program = make_program(name, watched(inner, []), optimizer)
    jitted = jax.jit(chex.assert_max_traces(program, n=1), donate_argnums=0)
    state = optimizer.init(params)
    assert_close(state.inner_opt_state, jax.tree.map(jnp.asarray, inner.init(params)))
    carry = (jax.tree.map(jnp.copy, params), state)
    signatures = helpers.signatures(carry)
    shardings = [x.sharding for x in jax.tree.leaves(carry)]
    for compilations_expected in (1, 0):
        old = carry
        with helpers.count_compilations() as compilations:
            carry, (got, expected) = jitted(carry, windows(dtypes))
        assert len(compilations) == compilations_expected
        assert all(x.is_deleted() for x in jax.tree.leaves((old[0], old[1].acc_grads)))
        assert helpers.signatures(carry) == signatures
        for x, sharding in zip(jax.tree.leaves(carry), shardings, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        assert_close(got[1], expected[1])
        updates, bare_updates = jax.tree.map(np.asarray, (got[0], expected[0]))
        assert not any(u[:, :K].any() for u in updates.values())
        assert all(np.isfinite(u).all() and u.any() for u in bare_updates.values())
        closing = {name: u[:, K] for name, u in updates.items()}
        beside = params if name in ENLARGE_ROUNDING else bare_updates
        assert_close(closing, bare_updates, beside)
        assert_ran_once_a_window(calls, dtypes)
        results.append(jax.tree.map(jnp.copy, (carry[0], carry[1].inner_opt_state)))
    return results[0]


def check_train_step(
    dtypes: tuple[str, str], inner: Any, params: dict[str, jax.Array], expected: Any
) -> None:
    """Run all windows once, donating, with a loss that has those gradients."""

    def loss_fn(params: Any, batch: Any) -> Any:
        zeros = jax.tree.map(
            lambda p: (p - jax.lax.stop_gradient(p)).astype(jnp.float32), params
        )
        loss_sum = batch["loss_sum"] + optax.tree.vdot(batch["grads"], zeros)
        return loss_sum, batch["num_tokens"]

    calls = []
    step = make_train_step(loss_fn, watched(inner, calls), K)
    state = step.init(params)
    signatures = helpers.signatures(state)
    data = {"grads": cast(GRADS, dtypes), "loss_sum": LOSS_SUMS, "num_tokens": COUNTS}
    with helpers.count_compilations() as compilations:
        for window, i in np.ndindex(COUNTS.shape):
            old = state
            batch = jax.tree.map(operator.itemgetter((window, i)), data)
            state, metrics = step(state, batch)
            assert old.opt_state.acc_grads["matrix"].is_deleted()
            assert old.params["matrix"].is_deleted() == (i == K - 1)
    assert len(compilations) == 2
    assert helpers.signatures(state) == signatures
    assert float(metrics.loss) == WINDOW_VALUES[-1]
    assert_close((state.params, state.opt_state.inner_opt_state), expected)
    assert_ran_once_a_window(calls, dtypes)


def check(name: str, dtypes: tuple[str, str], devices: int = 1) -> None:
    """Check everything that is promised for one optimizer, on a mesh."""
    inner = make_optimizer(name, OPTIMIZERS[name])
    small = jax.tree.map(lambda x: x / 16, eighths(1))
    mesh = Mesh(np.array(jax.devices()[:devices]), "data")
    params = {
        name: jax.device_put(p, NamedSharding(mesh, SPECS[name]))
        for name, p in cast(small, dtypes).items()
    }
    bare = check_transformation(name, dtypes, inner, params)
    if name not in EXTRA_ARGS:
        check_train_step(dtypes, inner, params, bare)


@pytest.mark.parametrize(("name", "dtypes"), CASES)
def test_wrapped_is_bare_on_the_full_batch(name: str, dtypes: tuple[str, str]):
    check(name, dtypes)


@pytest.mark.parametrize("name", ["adamw", "lamb", "contrib.prodigy"])
def test_on_8_devices(name: str):
    check(name, MIXED, devices=8)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_mean_of_means_differs(name: str):
    inner = make_optimizer(name, OPTIMIZERS[name])
    params = cast(eighths(1), ("float32", "float32"))
    errors = {}
    for kind, optimizer in {
        "exact": MultiSteps(inner, K),
        "naive": optax.MultiSteps(inner, K),
    }.items():
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for n, *grads in zip(COUNTS[0], *(g[0] for g in GRADS.values()), strict=True):
            mean = dict(zip(SHAPES, (g / n for g in grads), strict=True))
            extra = {"num_tokens": n} if kind == "exact" else {}
            updates, state = update(mean, state, params, **extra)
        window = {name: g[0] for name, g in WINDOW_GRADS.items()}
        expected, _ = jax.jit(inner.update)(window, inner.init(params), params)
        errors[kind] = helpers.relative_error(updates, expected)
    assert errors["exact"] < helpers.RTOL["float32"]
    assert errors["naive"] > 0.05


@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_gradients_of_every_example_are_refused(name: str):
    inner = make_optimizer(name, OPTIMIZERS[name])
    params = eighths(1)
    optimizer = token_accumulation(inner, K)
    state = optimizer.init(params)
    of_each = {name: g[0] for name, g in GRADS.items()}
    updates, _ = jax.jit(inner.update)(of_each, state.inner_opt_state, params)
    assert jax.tree.map(jnp.shape, updates) == SHAPES
    with pytest.raises(ValueError, match="tree and shapes of the parameters"):
        optimizer.update(of_each, state, params, num_tokens=K)


def test_enumeration_finds_every_optimizer_that_is_known():
    assert len(KNOWN) > 45
    assert set(OPTIMIZERS) >= KNOWN
    assert set(OPTIMIZERS) >= {*ARGUMENTS, *EXTRA_ARGS, *DTYPES, *PER_EXAMPLE}
    assert set(OPTIMIZERS) >= ENLARGE_ROUNDING
    assert {case.values[0] for case in CASES} | {*PER_EXAMPLE} == set(OPTIMIZERS)
